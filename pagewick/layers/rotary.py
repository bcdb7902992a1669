"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the scalings of its frequencies.

T tokens of a batch, R = rotary_dim values of a head that are rotated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.config import QueryScaleConfig, RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.quantization.share import check_floats

CosSin = tuple[Tensor, Tensor]


class Angles(NamedTuple):
    """The numbers that the positions of a batch give.

    cos, sin: [T, R / 2] float32, or empty where nothing is rotated. q_scales: [T] float32, factors of queries.
    q_factors: [T, 1], the same in the dtype of hidden states; only with rotation. logs: [T, 1], log(position + 1) in
    that dtype, in models whose heads are scaled by them (layers/log_scales.py).
    """

    cos: Tensor
    sin: Tensor
    q_scales: Tensor | None = None
    q_factors: Tensor | None = None
    logs: Tensor | None = None


def inverse_frequencies(config: RopeConfig, *, is_long: bool = False) -> Tensor:
    """Return the angle per position of each pair of values: [R / 2], float32, the same bits as transformers.

    linear: every frequency is divided by `factor` (position interpolation, arXiv:2306.15595).
    dynamic: the frequencies up to the original length; for longer ones see RotaryEmbedding.
    llama3: long wavelengths are divided by `factor`, short ones kept, those between blended (Llama 3.1's model card and
    reference code). yarn: likewise, with bounds of another kind (arXiv:2309.00071, section 3.2). longrope: each is
    divided by a number of its own, from long_factor if `is_long`, else from short_factor (arXiv:2402.13753).
    proportional: [head_dim / 2], those of a whole head divided by `factor`, and 0 for the pairs that stand still.
    """
    whole = config.head_dim if config.kind == "proportional" else config.rotary_dim
    powers = config.theta ** (torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / whole)
    if config.kind == "proportional":
        return torch.cat((1.0 / powers, torch.zeros((whole - config.rotary_dim) // 2))) / config.factor
    if config.kind == "longrope":
        factors = config.long_factor if is_long else config.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    if config.kind == "yarn":
        return _yarn(config, powers)
    frequencies = 1.0 / powers
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = ((config.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / config.factor + smooth * frequencies
    return frequencies


def _yarn(config: RopeConfig, powers: Tensor) -> Tensor:
    """Return YaRN's frequencies.

    A frequency is kept if its pair turns more than beta_fast times within the original length, divided by `factor` if
    it turns less than beta_slow times, and blended by a ramp between. truncate: the ramp starts and ends at a pair.
    """
    low, high = _yarn_pair(config, config.beta_fast), _yarn_pair(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # as in transformers: a step instead of a division by zero
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    # transformers subtracts from 1 twice, which in float32 does not restore the ramp.
    kept = 1 - ramp
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_pair(config: RopeConfig, turns: float) -> float:
    """Return the index (a fraction) of the pair that turns `turns` times within the original length."""
    length = config.original_max_position_embeddings
    return config.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


class RotaryEmbedding(nn.Module):
    """positions [T] -> (cos, sin), each [T, R / 2] in float32: computed once per step, used by every layer.

    With mrope_section positions may also be [3, T]: some pairs turn with a token's position in time, some with its row
    in an image, some with its column. The three are one after the other (Qwen2-VL's mrope, arXiv:2409.12191, section
    2.1), or, with mrope_interleaved, alternate (Qwen3-VL, arXiv:2511.21631). Three equal positions give the same bits
    as one.

    A token's angles depend only on its position, never on the length of its sequence, because its key stays in the
    cache, perhaps shared with other sequences, and is not computed again. Two scalings are therefore adapted:

    longrope has factors for short and for long sequences. If the engine admits sequences that are longer than the
    original length (context.max_model_len), all sequences use the long factors. A smaller max_model_len selects the
    short ones.
    dynamic stretches the frequencies with the length. The length for a token is its position + 1, as if the sequence
    were computed token by token.
    """

    def __init__(self, context: LayerContext, config: RopeConfig) -> None:
        super().__init__()
        assert not config.mrope_section or config.has_fitting_sections, config.mrope_section
        is_long = config.kind == "longrope" and context.max_model_len > config.original_max_position_embeddings
        self._config = config
        self._is_long = is_long
        assert not (config.is_reversed and config.kind == "dynamic"), "its frequencies are computed elsewhere"
        frequencies = inverse_frequencies(config, is_long=is_long).to(context.device)
        if config.num_still:
            assert config.kind != "dynamic" and config.attention_factor == 1.0, (
                "pairs that stand still keep their values"
            )
            still = torch.zeros(config.num_still // 2, device=context.device)
            frequencies = torch.cat((still, frequencies))
        self._frequencies = -frequencies if config.is_reversed else frequencies
        self.alpha: nn.Parameter | None = None
        if config.is_learned:
            assert config.kind != "dynamic", "its frequencies are computed elsewhere"
            self.alpha = nn.Parameter(torch.empty_like(frequencies), requires_grad=False)
        self._q_scales: Tensor | None = None
        if config.query_beta:
            steps = torch.arange(context.max_model_len) // config.original_max_position_embeddings
            self._q_scales = _scales(context, steps, config.query_beta)
            self._q_factors = self._q_scales.to(context.dtype)

    @property
    def rotation(self) -> str:
        """Everything on which the angles depend, as text. Keys with another rotation must not be reused."""
        config = self._config
        order = "interleaved" if config.mrope_interleaved else ""
        kinds = (
            "reversed" if config.is_reversed else "",
            "learned" if config.is_learned else "",
            f"{config.num_still} still" if config.num_still else "",
        )
        others = "".join(f" {value}" for value in (config.mrope_section, order, config.head_dim, *kinds) if value)
        return f"{config} {'long' if self._is_long else 'short'}{others}"

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return () if self.alpha is None else ((None, "alpha"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        assert self.alpha is not None, "others list no tensors"
        check_floats(tensor, tuple(self.alpha.shape))
        self.alpha.copy_(tensor)

    def finish_loading(self) -> None:
        if self.alpha is not None:
            self._frequencies = self._frequencies * self.alpha.exp()

    def forward(self, positions: Tensor) -> CosSin:
        if positions.dim() == 1:
            return self._on_one_axis(positions)
        sections = list(self._config.mrope_section)
        assert len(positions) == len(sections), "without mrope_section a token has one position"
        on_each_axis = [self._on_one_axis(axis) for axis in positions]
        join = _interleaved if self._config.mrope_interleaved else _in_sections
        cos, sin = (join(parts, sections) for parts in zip(*on_each_axis, strict=True))
        return cos, sin

    def angles(self, positions: Tensor) -> Angles:
        """Return all that rotation does at these positions [T] or [3, T]."""
        cos, sin = self(positions)
        if self._q_scales is None:
            return Angles(cos, sin)
        factors = _rows_at(self._q_factors, positions)
        return Angles(cos, sin, _rows_at(self._q_scales, positions).view(-1), factors)

    def shifted_angles(self, positions: Tensor, shift: int) -> Angles:
        """Return the angles at positions [T] + shift, and at position 0 where that would be below."""
        config = self._config
        assert config.kind != "dynamic" and self._q_scales is None, "no such layer shifts positions"
        return Angles(*kernels.rotary_angles(positions, self._frequencies, config.attention_factor, shift))

    def _on_one_axis(self, positions: Tensor) -> CosSin:
        config = self._config
        if config.kind == "dynamic":
            original = config.original_max_position_embeddings
            return kernels.dynamic_rotary_angles(positions, config.theta, config.rotary_dim, config.factor, original)
        return kernels.rotary_angles(positions, self._frequencies, config.attention_factor)


class QueryScales(nn.Module):
    """positions [T] -> factors of queries, in layers that rotate nothing."""

    def __init__(self, context: LayerContext, config: QueryScaleConfig) -> None:
        super().__init__()
        steps = torch.arange(1, context.max_model_len + 1) // config.length
        self._scales = _scales(context, steps, config.beta)
        self._nothing = torch.empty(0, device=context.device)

    def angles(self, positions: Tensor) -> Angles:
        return Angles(self._nothing, self._nothing, _rows_at(self._scales, positions).view(-1))


def rotary_of(
    context: LayerContext, rope: RopeConfig | None, query_scale: QueryScaleConfig | None
) -> RotaryEmbedding | QueryScales | None:
    """Make what a layer needs of its tokens' positions; None: it needs nothing."""
    if rope is None:
        return None if query_scale is None else QueryScales(context, query_scale)
    assert query_scale is None, "query_beta scales queries that are rotated"
    return RotaryEmbedding(context, rope)


def _scales(context: LayerContext, steps: Tensor, beta: float) -> Tensor:
    """Return the factors of queries of the positions with these whole numbers [L]: [L, 1] float32."""
    return (1 + beta * torch.log(1 + steps.to(torch.float32))).unsqueeze(1).to(context.device)


def _rows_at(scales: Tensor, positions: Tensor) -> Tensor:
    """Return the factors [T, 1] of these positions [T]."""
    assert len(positions.shape) == 1, "queries are scaled by a token's only position"
    return kernels.gather_rows(scales, positions, len(scales), 1, False)


def _in_sections(axes: Sequence[Tensor], sections: Sequence[int]) -> Tensor:
    """Take a section of the pairs from each of three axes [T, R / 2], one after the other: [T, R / 2]."""
    parts = [torch.split(values, list(sections), dim=-1)[axis] for axis, values in enumerate(axes)]
    return torch.cat(parts, dim=-1)


def _interleaved(axes: Sequence[Tensor], sections: Sequence[int]) -> Tensor:
    """Take the pairs 1, 4, ... from the second axis [T, R / 2], 2, 5, ... from the third, the others from the first."""
    joined = axes[0].clone()
    for axis in (1, 2):
        pairs = slice(axis, 3 * sections[axis], 3)
        joined[:, pairs] = axes[axis][:, pairs]
    return joined
