"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464): a state in place of keys and values.

Also with a decay for each number of a key (Kimi Delta Attention, arXiv:2510.26692).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch
from pagewick.errors import ConfigError
from pagewick.kernels.options import DeltaOptions
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from pagewick.layers.rotary import Angles
from pagewick.layers.state import Constant, StateLayer, constant, times
from pagewick.layers.state_config import TILED, DeltaConfig
from pagewick.parallel.sharding import check_tensor_parallel, shard_bounds
from pagewick.quantization.share import Part, Range, Share

# Raise the number whenever the layout of a state changes.
_LAYOUT = "gated delta 1"


class GatedDeltaNet(StateLayer):
    """Linear attention: [T, hidden_size] -> [T, hidden_size].

    Each rank has some of the key heads, and the value heads that use them. Raises ConfigError unless all ranks get as
    many key heads, and for several ranks if value heads are tiled.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: DeltaConfig) -> None:
        rank, num_ranks = context.tp_rank, context.tp_size
        super().__init__(config.state_bytes(num_ranks), _LAYOUT)
        check_tensor_parallel(config.num_key_heads, num_ranks, parts="key heads of linear attention")
        if config.is_tiled and num_ranks > 1:
            raise ConfigError(f"--tensor-parallel-size {num_ranks} does not fit the model's {TILED}\n  use 1")
        keys = shard_bounds(config.num_key_heads, rank, num_ranks)
        ratio = config.num_value_heads // config.num_key_heads
        values = _value_heads(config, keys)
        self._num_keys, self._num_values = keys[1] - keys[0], (keys[1] - keys[0]) * ratio
        self.in_proj = Linear(context, prefix, _input_share(config, hidden_size, keys, values))
        self.out_proj = RowParallelLinear(
            context,
            f"{prefix}.out_proj",
            config.num_value_heads * config.value_dim,
            hidden_size,
            multiple=ratio * config.value_dim,
        )
        # The columns of the output projection are in the file's order, and the rule's results by key head.
        self._columns: Tensor | None = None
        if config.is_tiled:
            self._columns = torch.tensor(_file_order(config, values), device=context.device)
        num_channels = config.num_channels // num_ranks
        num_gates, num_decays = self._num_values * config.value_dim, self._num_values * config.decays_per_head
        self.f_b_proj: ColumnParallelLinear | None = None
        self.g_b_proj: ColumnParallelLinear | None = None
        self._widths = [num_channels, num_gates, self._num_values, num_decays]
        if config.gate_rank is not None:
            self._widths = [num_channels, config.gate_rank, self._num_values, config.gate_rank]
            self.f_b_proj, self.g_b_proj = (
                ColumnParallelLinear(
                    context, f"{prefix}.{name}", config.gate_rank, config.num_value_heads * size, multiple=ratio * size
                )
                for name, size in (("f_b_proj", config.decays_per_head), ("g_b_proj", config.value_dim))
            )
        self.conv_weight = constant(context, num_channels, config.conv_size)
        self.log_decay = constant(context, self._num_values)
        self.dt_bias = constant(context, num_decays)
        self.norm_weight = constant(context, config.value_dim)
        self.options = DeltaOptions(
            num_key_heads=self._num_keys,
            num_value_heads=self._num_values,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_weight=self.conv_weight,
            log_decay=self.log_decay,
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
            norm_eps=config.norm_eps,
            has_channel_decay=config.has_channel_decay,
            strength=config.strength,
            has_sigmoid_gate=config.has_sigmoid_gate,
            decay_bound=config.decay_bound,
        )
        count = config.num_value_heads
        decays = tuple(times(head, config.decays_per_head) for head in values)
        shape, dimension = ((1, 1, count, 1), 2) if config.is_decay_4d else ((count,), 0)
        self._constants = {
            **self._convolutions(config, keys, values),
            "A_log": Constant(shape, values, self.log_decay, dimension=dimension),
            "dt_bias": Constant((count * config.decays_per_head,), decays, self.dt_bias),
            "norm.weight": Constant((config.value_dim,), ((0, config.value_dim),), self.norm_weight),
        }

    def _convolutions(self, config: DeltaConfig, keys: Range, values: Sequence[Range]) -> dict[str, Constant]:
        """Return the weights of the convolution as the file has them."""
        kept = _channels(config, keys, values)
        if not config.has_parts:
            return {"conv1d.weight": Constant((config.num_channels, 1, config.conv_size), kept, self.conv_weight)}
        found, begin = {}, 0
        for kind, (num_rows, ranges) in _parts(config, keys, values).items():
            end = begin + sum(stop - start for start, stop in ranges)
            shape = (num_rows, 1, config.conv_size)
            found[f"{kind}_conv1d.weight"] = Constant(shape, ranges, self.conv_weight[begin:end])
            begin = end
        return found

    def forward(self, hidden_states: Tensor, angles: Angles | None, batch: AttentionBatch) -> Tensor:
        """angles: not used; the order of the tokens is in the state."""
        states, metadata = self.states(batch, len(hidden_states))
        qkv, gate, beta, decay = self.in_proj(hidden_states, batch).split(self._widths, dim=1)
        if self.f_b_proj is not None and self.g_b_proj is not None:
            gate, decay = self.g_b_proj(gate, batch), self.f_b_proj(decay, batch)
        mixed = kernels.gated_delta_net(qkv, gate, beta, decay, states, metadata, self.options)
        if self._columns is not None:
            mixed = kernels.gather_columns(mixed, self._columns)
        return self.out_proj(mixed, batch)  # type: ignore[no-any-return]


def _value_heads(config: DeltaConfig, keys: Range) -> tuple[Range, ...]:
    """Return the places in the file of the value heads of these key heads, by key head."""
    ratio = config.num_value_heads // config.num_key_heads
    if not config.is_tiled:
        return ((keys[0] * ratio, keys[1] * ratio),)
    places = [key + config.num_key_heads * index for key in range(*keys) for index in range(ratio)]
    return tuple((place, place + 1) for place in places)


def _file_order(config: DeltaConfig, values: Sequence[Range]) -> list[int]:
    """Return the columns of this layer's results in the order of the file."""
    places = [place for start, stop in values for place in range(start, stop)]
    heads = sorted(range(len(places)), key=places.__getitem__)
    return [column for head in heads for column in range(head * config.value_dim, (head + 1) * config.value_dim)]


def _input_share(config: DeltaConfig, hidden_size: int, keys: Range, values: Sequence[Range]) -> Share:
    """Return the share of the input projections: queries, keys, values; gates of the output; beta; decay."""
    ratio, key_dim, value_dim = config.num_value_heads // config.num_key_heads, config.key_dim, config.value_dim
    num_values = config.num_value_heads
    if config.is_fused:
        # Each key head's query, key, values and gates follow each other.
        unit = 2 * key_dim + 2 * ratio * value_dim
        places = (0, key_dim, 2 * key_dim, 2 * key_dim + ratio * value_dim, unit)
        rows = [
            (head * unit + places[kind], head * unit + places[kind + 1]) for kind in range(4) for head in range(*keys)
        ]
        parts = [Part("in_proj_qkvz", config.num_key_heads * unit, tuple(rows))]
    else:
        if config.has_parts:
            kinds = _parts(config, keys, values)
            parts = [Part(f"{kind}_proj", *kinds[kind]) for kind in kinds]
        else:
            parts = [Part("in_proj_qkv", config.num_channels, _channels(config, keys, values))]
        if config.gate_rank is not None:
            # Every rank has the two vectors.
            rank = config.gate_rank, ((0, config.gate_rank),)
            betas = Part("in_proj_b", num_values, tuple(values))
            parts += [Part("g_a_proj", *rank), betas, Part("f_a_proj", *rank)]
            return Share(tuple(parts), hidden_size, (0, hidden_size))
        parts.append(Part("in_proj_z", num_values * value_dim, tuple(times(head, value_dim) for head in values)))
    if config.has_fused_gates:
        small = [
            (head * 2 * ratio + kind * ratio, head * 2 * ratio + (kind + 1) * ratio)
            for kind in range(2)
            for head in range(*keys)
        ]
        parts.append(Part("in_proj_ba", 2 * num_values, tuple(small)))
    else:
        per_head = config.decays_per_head
        decays = tuple(times(head, per_head) for head in values)
        parts += [Part("in_proj_b", num_values, tuple(values)), Part("in_proj_a", num_values * per_head, decays)]
    return Share(tuple(parts), hidden_size, (0, hidden_size))


def _parts(config: DeltaConfig, keys: Range, values: Sequence[Range]) -> dict[str, tuple[int, tuple[Range, ...]]]:
    """Return the rows of all queries, of all keys and of all values: how many there are, and those of these heads."""
    of_keys = config.num_key_heads * config.key_dim, (times(keys, config.key_dim),)
    of_values = tuple(times(head, config.value_dim) for head in values)
    return {"q": of_keys, "k": of_keys, "v": (config.num_value_heads * config.value_dim, of_values)}


def _channels(config: DeltaConfig, keys: Range, values: Sequence[Range]) -> tuple[Range, ...]:
    """Return the rows of these heads where all queries are followed by all keys, and these by all values."""
    size = config.num_key_heads * config.key_dim
    first, last = times(keys, config.key_dim)
    of_values = (times(head, config.value_dim) for head in values)
    rows = ((2 * size + start, 2 * size + stop) for start, stop in of_values)
    return (first, last), (size + first, size + last), *rows
