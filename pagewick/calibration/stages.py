"""The weights of a decoder layer in the order in which they are quantized, and their absorbers: from a ModelConfig.

Names are the decoder's, relative to the layer, without ".weight" for weights of linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagewick.layers.compressed_config import WindowConfig
from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.layers.state_config import ChannelScanConfig, ConvolutionConfig, DeltaConfig, MambaConfig, StateConfig
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, Block, LayerConfig, MlpConfig


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


_BOTH_SIDES = "a product reads both sides of the norm before it"
_NO_NORM = "no norm with a weight comes before it"
_NO_GATE = "the inputs come from an activation without a gate"
_NOT_GROWING = "the inputs come from an activation that does not grow with the gate's other half"
# Gated activations that are not linear in what the gate multiplies.
_NOT_LINEAR = frozenset(
    {"clamped_silu10", "clamped_swish", "silu_within4", "silu_within5", "silu_within7", "silu_within16"}
)
_STATE_NAMES = {MambaConfig: "mamba", ConvolutionConfig: "short_conv", ChannelScanConfig: "mamba"}
_NOT_LINEAR_BEFORE = "the inputs are not linear in what comes before"
_SHARED = "the tensor before it holds the factors of a product"
Stage = tuple[Fold, ...]
"""Folds whose inputs are known as soon as the weights of earlier stages are quantized."""


def stages_of(config: ModelConfig, layer: LayerConfig) -> list[Stage]:
    """Return a layer's stages, in the order of computation."""
    block, attention = layer.block or config.block, layer.attention
    assert not isinstance(attention, WindowConfig), "such layers are not run one by one"
    if block in ("parallel", "parallel_norms"):
        assert attention is not None and layer.mlp is not None, "only sequential blocks may lack one of them"
        attending, feeding = _attention_inputs(attention), _mlp_inputs(layer.mlp)
        folds: Stage = (_fold((*attending, *feeding), _norm(config, layer, "input_layernorm", attention, layer.mlp)),)
        if block == "parallel_norms":
            folds = (
                _fold(attending, _norm(config, layer, "input_layernorm", attention)),
                _fold(feeding, _norm(config, layer, "post_attention_layernorm", layer.mlp)),
            )
        outputs = (*_attention_output(attention), *_mlp_outputs(layer.mlp))
        return [folds, *_inner(attention), *_latents(layer.mlp), outputs, *_latent_outputs(layer.mlp)]
    first_norm, second_norm = _norms_before(config, layer, block)
    stages: list[Stage] = []
    if attention is not None:
        beside = [] if layer.beside is None else [layer.beside.mamba]
        parts = (attention, *beside)
        points = tuple(point for part in parts for point in _attention_inputs(part))
        stages.append((_fold(points, first_norm),))
        stages += [*_inner(attention), tuple(fold for part in parts for fold in _attention_output(part))]
    if layer.mlp is not None:
        stages.append((_fold(_mlp_inputs(layer.mlp), second_norm),))
        stages += [*_latents(layer.mlp), _mlp_outputs(layer.mlp), *_latent_outputs(layer.mlp)]
    return stages


def _fold(points: tuple[Point, ...], norm: NormAbsorber | None) -> Fold:
    return Fold(points, norm, _NO_NORM if norm is None else "")


def _norms_before(
    config: ModelConfig, layer: LayerConfig, block: Block
) -> tuple[NormAbsorber | None, NormAbsorber | None]:
    """Return the norms before attention and before the MLP."""
    if block == "post_norm":
        return None, None
    second = "pre_feedforward_layernorm" if block == "sandwich" else "post_attention_layernorm"
    return _norm(config, layer, "input_layernorm", layer.attention), _norm(config, layer, second, layer.mlp)


_Part = AttentionConfig | MlaConfig | WindowConfig | StateConfig | MlpConfig | MoeConfig | None


def _norm(config: ModelConfig, layer: LayerConfig, name: str, *parts: _Part) -> NormAbsorber | None:
    """Return a norm; None if it has no weight to divide. parts: those that read its outputs."""
    if not config.norm.has_weight:
        return None
    readers = tuple(reader for part in parts for reader in _routers(part))
    if name in layer.gated_norms:
        return NormAbsorber(f"{name}.norm", 0.0, has_bias=False, readers=(*readers, f"{name}.gate_down"))
    return NormAbsorber(name, config.norm.offset, config.norm.has_bias, readers)


def _routers(part: _Part) -> Iterator[str]:
    """The routers of a part, which stay unquantized; an indexer has one that weighs its heads."""
    if isinstance(part, MoeConfig):
        yield "mlp.gate"
        if part.has_shared_gate:
            yield "mlp.shared_expert_gate"
    elif isinstance(part, MlaConfig) and _has_indexer(part):
        yield "self_attn.indexer.weights_proj"


def _has_indexer(config: MlaConfig) -> bool:
    """Whether latent attention has an indexer of its own."""
    return config.indexer is not None and not config.indexer.is_shared


def _attention_inputs(config: AttentionConfig | MlaConfig | StateConfig) -> tuple[Point, ...]:
    if isinstance(config, DeltaConfig):
        kinds = (
            *(("qkvz",) if config.is_fused else ("z",) if config.has_parts else ("qkv", "z")),
            *(("ba",) if config.has_fused_gates else ("b", "a")),
        )
        parts = ("q_proj", "k_proj", "v_proj") if config.has_parts else ()
        if config.gate_rank is not None:
            kinds, parts = ("b",), (*parts, "f_a_proj", "g_a_proj")
        names = (*parts, *(f"in_proj_{kind}" for kind in kinds))
        return (Point(tuple(f"linear_attn.{name}" for name in names)),)
    if isinstance(config, StateConfig):
        return (Point((f"{_STATE_NAMES[type(config)]}.in_proj",)),)
    if isinstance(config, MlaConfig):
        queries = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        index_keys = ("self_attn.indexer.wk",) if _has_indexer(config) else ()
        gates = ("self_attn.g_proj",) if config.has_head_gates or config.has_number_gates else ()
        return (Point((f"self_attn.{queries}", "self_attn.kv_a_proj_with_mqa", *index_keys, *gates)),)
    names = ("q_proj", "k_proj", "v_proj") if config.layout == "parts" else ("qkv_proj",)
    if config.has_head_gates or config.has_number_gates:
        names = (*names, "g_proj")
    if config.head_blocks is not None:
        names = (*names, "indexer.q_proj", "indexer.k_proj")
    return (Point(tuple(f"self_attn.{name}" for name in names)),)


def _inner(config: AttentionConfig | MlaConfig | StateConfig) -> list[Stage]:
    """The second factors of latent attention, and of gates that come from small vectors."""
    if isinstance(config, DeltaConfig) and config.gate_rank is not None:
        rows = tuple(range(config.gate_rank))
        return [
            tuple(
                Fold((Point((f"linear_attn.{kind}_b_proj",)),), RowsAbsorber(f"linear_attn.{kind}_a_proj", rows, False))
                for kind in "fg"
            )
        ]
    if isinstance(config, ChannelScanConfig):
        points = [Fold((Point((f"mamba.{name}",)),), None, _NOT_LINEAR_BEFORE) for name in ("x_proj", "dt_proj")]
        return [(fold,) for fold in points]
    if not isinstance(config, MlaConfig):
        return []
    folds = [Fold((Point(("self_attn.kv_b_proj",)),), NormAbsorber("self_attn.kv_a_layernorm", 0.0, has_bias=False))]
    index_queries = ("self_attn.indexer.wq_b",) if _has_indexer(config) else ()
    if config.has_gates:
        parts = (("self_attn.q_b_proj",), index_queries) if index_queries else (("self_attn.q_b_proj",),)
        folds += [Fold((Point(names),), None, _BOTH_SIDES) for names in parts]
    elif config.q_lora_rank is not None:
        norm = NormAbsorber("self_attn.q_a_layernorm", 0.0, has_bias=False)
        folds.append(Fold((Point(("self_attn.q_b_proj", *index_queries)),), norm))
    return [tuple(folds)]


def _attention_output(config: AttentionConfig | MlaConfig | StateConfig) -> Stage:
    """The output projection, whose inputs are sums of values, if each head has values of its own."""
    if isinstance(config, DeltaConfig):
        return (Fold((Point(("linear_attn.out_proj",)),), None, "all heads share the norm before it"),)
    if isinstance(config, StateConfig):
        reason = _SHARED if isinstance(config, ConvolutionConfig) else _NOT_LINEAR_BEFORE
        return (Fold((Point((f"{_STATE_NAMES[type(config)]}.out_proj",)),), None, reason),)
    num_heads, points = config.num_heads, (Point(("self_attn.o_proj",)),)
    if isinstance(config, MlaConfig):
        size, stride = config.v_head_dim, config.qk_nope_head_dim + config.v_head_dim
        rows = _head_rows(num_heads, size, config.qk_nope_head_dim, stride)
        return (Fold(points, RowsAbsorber("self_attn.kv_b_proj", rows, has_bias=False)),)
    size, num_kv_heads = config.output_dim, config.num_kv_heads
    if config.qkv_limit is not None:
        return (Fold(points, None, "the inputs come from values that are limited"),)
    if num_kv_heads < num_heads:
        return (Fold(points, None, "several heads share the values that the inputs come from"),)
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
    paths = _experts(config) if config.latent_size is None else _shared_expert(config)
    latents = [] if config.latent_size is None else [Point(("mlp.fc1_latent_proj",))]
    return *latents, *(_expert_inputs(config, path) for path in paths)


def _expert_inputs(config: MoeConfig, path: str) -> Point:
    if _is_fused(config, path):
        return Point((f"{path}.gate_up_proj",))
    return Point(tuple(f"{path}.{name}" for name in config.input_projections))


def _latents(config: MlpConfig | MoeConfig) -> list[Stage]:
    """The first projections of experts that read latents."""
    if isinstance(config, MlpConfig) or config.latent_size is None:
        return []
    points = tuple(_expert_inputs(config, path) for path in _routed_experts(config))
    return [(Fold(points, RowsAbsorber("mlp.fc1_latent_proj", tuple(range(config.latent_size)), has_bias=False)),)]


def _latent_outputs(config: MlpConfig | MoeConfig) -> list[Stage]:
    """The projection behind the sum of the experts' latents."""
    if isinstance(config, MlpConfig) or config.latent_size is None:
        return []
    return [(Fold((Point(("mlp.fc2_latent_proj",)),), None, "several experts make the inputs"),)]


def _mlp_outputs(config: MlpConfig | MoeConfig) -> Stage:
    if isinstance(config, MoeConfig):
        shared = config.shared_intermediate_size or 0
        if not config.is_gated or {config.activation, config.shared_activation} & _NOT_LINEAR:
            reason = _NOT_GROWING if config.is_gated else _NO_GATE
            return tuple(Fold((Point((f"{path}.down_proj",)),), None, reason) for path in _experts(config))
        sizes = {path: shared if path == "mlp.shared_expert" else config.intermediate_size for path in _experts(config)}
        return tuple(
            _down(path, f"{path}.gate_up_proj", size, first=size)
            if _is_fused(config, path)
            else _down(path, f"{path}.up_proj", size)
            for path, size in sizes.items()
        )
    if not config.is_gated or config.activation in _NOT_LINEAR:
        return (Fold((Point(("mlp.down_proj",)),), None, _NOT_GROWING if config.is_gated else _NO_GATE),)
    size = config.intermediate_size
    if config.is_fused:
        return (_down("mlp", "mlp.gate_up_proj", size, first=size, has_bias=config.bias),)
    return (_down("mlp", "mlp.up_proj", size, has_bias=config.bias),)


def _down(path: str, up: str, size: int, *, first: int = 0, has_bias: bool = False) -> Fold:
    """The projection after a gated activation: its columns are made by the rows from `first` on of `up`."""
    rows = RowsAbsorber(up, tuple(range(first, first + size)), has_bias)
    return Fold((Point((f"{path}.down_proj",)),), rows)


def _is_fused(config: MoeConfig, path: str) -> bool:
    """Whether an expert's gate and up are one tensor."""
    return config.is_shared_fused and path == "mlp.shared_expert"


def _experts(config: MoeConfig) -> Iterator[str]:
    yield from _routed_experts(config)
    yield from _shared_expert(config)


def _routed_experts(config: MoeConfig) -> Iterator[str]:
    yield from (f"mlp.experts.{expert}" for expert in range(config.num_experts))


def _shared_expert(config: MoeConfig) -> Iterator[str]:
    if config.shared_intermediate_size is not None:
        yield "mlp.shared_expert"
