"""The weights of a decoder layer in the order in which they are quantized, and their absorbers: from a ModelConfig.

Names are the decoder's, relative to the layer, without ".weight" for weights of linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagewick.layers.config import DeltaConfig, MlaConfig, MoeConfig
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig


@dataclass(frozen=True, slots=True)
class Point:
    """Weights that are multiplied by the same rows."""

    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NormAbsorber:
    """A norm, whose outputs are divided by factors. offset: added to its weight.

    readers: unquantized weights that read its outputs besides the points.
    """

    name: str
    offset: float
    has_bias: bool
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowsAbsorber:
    """A linear layer, some of whose outputs are divided by factors. rows: the row that makes each of the inputs."""

    name: str
    rows: tuple[int, ...]
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Fold:
    """Points whose columns may be multiplied by common factors, if something before them can be divided by these.

    absorber: None if nothing can; `reason` then says why.
    """

    points: tuple[Point, ...]
    absorber: NormAbsorber | RowsAbsorber | None
    reason: str = ""


_NO_NORM = "no norm comes before it"
# Gated activations that are not linear in what the gate multiplies.
_NOT_LINEAR = ("clamped_swish",)
Stage = tuple[Fold, ...]
"""Folds whose inputs are known as soon as the weights of earlier stages are quantized."""


def stages_of(config: ModelConfig, layer: LayerConfig) -> list[Stage]:
    """Return a layer's stages, in the order of computation."""
    attention, mlp = _attention_inputs(layer.attention), _mlp_inputs(layer.mlp)
    if config.block == "parallel":
        first = [(Fold((*attention, *mlp), _norm(config, "input_layernorm", layer.mlp)),)]
        return [*first, *_inner(layer.attention), (*_attention_output(layer.attention), *_mlp_outputs(layer.mlp))]
    first_norm, second_norm = _norms_before(config, layer)
    return [
        (Fold(attention, first_norm, _NO_NORM if first_norm is None else ""),),
        *_inner(layer.attention),
        _attention_output(layer.attention),
        (Fold(mlp, second_norm, _NO_NORM if second_norm is None else ""),),
        _mlp_outputs(layer.mlp),
    ]


def _norms_before(config: ModelConfig, layer: LayerConfig) -> tuple[NormAbsorber | None, NormAbsorber | None]:
    """Return the norms before attention and before the MLP."""
    if config.block == "post_norm":
        return None, None
    second = "pre_feedforward_layernorm" if config.block == "sandwich" else "post_attention_layernorm"
    return _norm(config, "input_layernorm", None), _norm(config, second, layer.mlp)


def _norm(config: ModelConfig, name: str, mlp: MlpConfig | MoeConfig | None) -> NormAbsorber:
    readers: list[str] = []
    if isinstance(mlp, MoeConfig):
        readers = ["mlp.gate", *(["mlp.shared_expert_gate"] if mlp.has_shared_gate else [])]
    return NormAbsorber(name, config.norm.offset, config.norm.has_bias, tuple(readers))


def _attention_inputs(config: AttentionConfig | MlaConfig | DeltaConfig) -> tuple[Point, ...]:
    if isinstance(config, DeltaConfig):
        kinds = (
            *(("qkvz",) if config.is_fused else ("qkv", "z")),
            *(("ba",) if config.has_fused_gates else ("b", "a")),
        )
        return (Point(tuple(f"linear_attn.in_proj_{kind}" for kind in kinds)),)
    if isinstance(config, MlaConfig):
        queries = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        return (Point((f"self_attn.{queries}", "self_attn.kv_a_proj_with_mqa")),)
    names = ("q_proj", "k_proj", "v_proj") if config.layout == "parts" else ("qkv_proj",)
    return (Point(tuple(f"self_attn.{name}" for name in names)),)


def _inner(config: AttentionConfig | MlaConfig | DeltaConfig) -> list[Stage]:
    """The second factors of latent attention."""
    if not isinstance(config, MlaConfig):
        return []
    names = [("kv_b_proj", "kv_a_layernorm")]
    if config.q_lora_rank is not None:
        names.append(("q_b_proj", "q_a_layernorm"))
    return [
        tuple(
            Fold((Point((f"self_attn.{name}",)),), NormAbsorber(f"self_attn.{norm}", 0.0, has_bias=False))
            for name, norm in names
        )
    ]


def _attention_output(config: AttentionConfig | MlaConfig | DeltaConfig) -> Stage:
    """The output projection, whose inputs are sums of values, if each head has values of its own."""
    if isinstance(config, DeltaConfig):
        return (Fold((Point(("linear_attn.out_proj",)),), None, "all heads share the norm before it"),)
    num_heads, points = config.num_heads, (Point(("self_attn.o_proj",)),)
    if isinstance(config, MlaConfig):
        size, stride = config.v_head_dim, config.qk_nope_head_dim + config.v_head_dim
        rows = _head_rows(num_heads, size, config.qk_nope_head_dim, stride)
        return (Fold(points, RowsAbsorber("self_attn.kv_b_proj", rows, has_bias=False)),)
    size, num_kv_heads = config.head_dim, config.num_kv_heads
    if num_kv_heads < num_heads:
        return (Fold(points, None, "several heads share the values that its inputs come from"),)
    name, first, stride = {
        "parts": ("v_proj", 0, size),
        "fused": ("qkv_proj", (num_heads + num_kv_heads) * size, size),
        "by_head": ("qkv_proj", 2 * size, 3 * size),
    }[config.layout]
    rows = _head_rows(num_heads, size, first, stride)
    return (Fold(points, RowsAbsorber(f"self_attn.{name}", rows, config.qkv_bias)),)


def _head_rows(num_heads: int, size: int, first: int, stride: int) -> tuple[int, ...]:
    """Return the rows of each head's `size` values, which begin at `first` and are `stride` apart."""
    return tuple(first + head * stride + place for head in range(num_heads) for place in range(size))


def _mlp_inputs(config: MlpConfig | MoeConfig) -> tuple[Point, ...]:
    if isinstance(config, MlpConfig):
        names = ("gate_up_proj",) if config.is_fused else config.input_projections
        return (Point(tuple(f"mlp.{name}" for name in names)),)
    return tuple(Point((f"{path}.gate_proj", f"{path}.up_proj")) for path in _experts(config))


def _mlp_outputs(config: MlpConfig | MoeConfig) -> Stage:
    if isinstance(config, MoeConfig):
        shared = config.shared_intermediate_size or 0
        if config.activation in _NOT_LINEAR:
            reason = "its inputs come from an activation that does not grow with the gate's other half"
            return tuple(Fold((Point((f"{path}.down_proj",)),), None, reason) for path in _experts(config))
        sizes = {path: shared if path == "mlp.shared_expert" else config.intermediate_size for path in _experts(config)}
        return tuple(_down(path, f"{path}.up_proj", size) for path, size in sizes.items())
    if not config.is_gated:
        return (Fold((Point(("mlp.down_proj",)),), None, "its inputs come from an activation without a gate"),)
    size = config.intermediate_size
    if config.is_fused:
        return (_down("mlp", "mlp.gate_up_proj", size, first=size, has_bias=config.bias),)
    return (_down("mlp", "mlp.up_proj", size, has_bias=config.bias),)


def _down(path: str, up: str, size: int, *, first: int = 0, has_bias: bool = False) -> Fold:
    """The projection after a gated activation: its columns are made by the rows from `first` on of `up`."""
    rows = RowsAbsorber(up, tuple(range(first, first + size)), has_bias)
    return Fold((Point((f"{path}.down_proj",)),), rows)


def _experts(config: MoeConfig) -> Iterator[str]:
    yield from (f"mlp.experts.{expert}" for expert in range(config.num_experts))
    if config.shared_intermediate_size is not None:
        yield "mlp.shared_expert"
