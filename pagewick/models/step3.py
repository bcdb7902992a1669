"""Step 3.7 as a text model: its part that sees is not loaded. Llama, except:

- Norms scale by 1 + weight. Queries and keys are normalised per head.
- Three of four layers have a window, more query heads, and a rotation of their own.
- Each head's output is multiplied by the sigmoid of a gate.
- All layers but the first three have experts, chosen by sigmoid and a learned bias, and a shared one. Weights are
  normalised.
- In the last layers, both factors of the gated products are bounded.
- Further layers of a file, which predict later tokens, are not used.

Published files have lists with an entry for each layer, those further ones included, in place of what transformers
writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import later_layers
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig, MlpConfig, NormConfig

if TYPE_CHECKING:
    from pagewick.layers.config import MoeConfig

# Names in published files.
_ALIASES: Final = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
_DEFAULTS: Final = {"head_dim": 128, "max_position_embeddings": 128000}
# Entries of published files of which only one value is implemented.
_ONLY: Final[dict[str, Any]] = {
    "gating": True,
    "mlp_bias": False,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_bidirectional_attention": False,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "zero_centered": True,
}
# Entries that may be lists with an entry for each layer.
_LISTS: Final = (
    "layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared",
    "use_rope_layers",
)  # fmt: skip
# Bounds of both factors of gated products -> the kernels' name of the activation.
_ACTIVATIONS: Final = {
    0: "silu", 4: "silu_within4", 5: "silu_within5", 7: "silu_within7", 16: "silu_within16",
}  # fmt: skip
_NAMES: Final = NameMap(
    parts=(
        ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
        ("mlp.gate", "moe.gate"),
        ("mlp.experts", "moe"),
        ("mlp.shared_expert", "share_expert"),
    )
)
_VISION: Final = r"(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\..*"


def read_step3p7_multimodal(entries: Entries) -> ModelConfig:
    config = read_text_part(entries, _read_text)
    return replace(config, ignored=(*config.ignored, _VISION))


def _read_text(entries: Entries) -> ModelConfig:
    entries = _of_layers(entries.renamed(_ALIASES).filled(_DEFAULTS))
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    num_layers = reading.read_num_layers(entries)
    if not all(entries.get("use_rope_layers") or ()):
        raise entries.wrong("use_rope_layers", "left out or a list of true: all layers are rotated here")
    eps = entries.positive("rms_norm_eps", 1e-5)
    windows = reading.read_windows(entries, [False] * num_layers)
    entries = _with_ropes(entries, windows)
    everywhere, within = _attentions(entries, eps, windows)
    ropes = {
        has_window: reading.read_rope_of(entries, everywhere, layer_type=_kind(has_window))
        for has_window in {window is not None for window in windows}
    }
    layers = [
        LayerConfig(
            attention=everywhere if window is None else within, mlp=mlp, rope=ropes[window is not None], window=window
        )
        for window, mlp in zip(windows, _mlps(entries, num_layers), strict=True)
    ]
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps, offset=1.0),
        layers=tuple(layers),
        names=(_NAMES,),
        ignored=later_layers(entries),
    )


def _of_layers(entries: Entries) -> Entries:
    """Return the entries with lists that have nothing for layers that predict later tokens."""
    num_layers = reading.read_num_layers(entries)
    return entries.replaced(
        {name: value[:num_layers] for name in _LISTS if isinstance(value := entries.get(name), list)}
    )


def _kind(has_window: bool) -> str:
    return reading.SLIDING if has_window else reading.FULL


def _with_ropes(entries: Entries, windows: Sequence[int | None]) -> Entries:
    """Return the entries with rope_parameters for both kinds of layers, as transformers writes them."""
    # The scaling is that of layers that see everything.
    if entries.get("yarn_only_types") not in (None, [], [reading.FULL]):
        raise entries.wrong("yarn_only_types", f"left out or {[reading.FULL]}")
    if entries.get("rope_parameters"):
        return entries
    if isinstance(entries.get("rope_theta"), list):
        thetas = entries.numbers("rope_theta") or ()
    else:
        thetas = (entries.positive("rope_theta", 10000.0),) * len(windows)
    shares = entries.numbers("partial_rotary_factors") or (1.0,) * len(windows)
    for name, values in (("rope_theta", thetas), ("partial_rotary_factors", shares)):
        kinds = {(window, value) for window, value in zip(windows, values, strict=False)}
        if len(values) != len(windows) or len(kinds) != len(set(windows)):
            raise entries.wrong(
                name, f"a list of num_hidden_layers ({len(windows)}) numbers, one for each kind of layer"
            )
    ropes: dict[str, Any] = {
        _kind(window is not None): {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        for window, theta, share in zip(windows, thetas, shares, strict=True)
    }
    if reading.FULL in ropes and (scaling := entries.child("rope_scaling")) is not None:
        ropes[reading.FULL] |= scaling.values
    nothing = dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factors"))
    return entries.replaced({**nothing, "rope_parameters": ropes})


def _attentions(entries: Entries, eps: float, windows: Sequence[int | None]) -> tuple[AttentionConfig, AttentionConfig]:
    """Return the attention of layers that see everything, and that of layers with a window."""
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries,
        num_kv_heads=entries.size("num_key_value_heads", 8),
        softmax_scale=entries.positive("query_pre_attn_scalar", entries.size("head_dim")) ** -0.5,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norm=HeadNormConfig(eps=eps, offset=1.0),
        has_head_gates=True,
    )
    count = attention.num_heads
    if (other := entries.child("attention_other_setting")) is not None:
        count = other.size("num_attention_heads", count)
        other.demand("num_attention_groups", attention.num_kv_heads, attention.num_kv_heads)
        other.demand("head_dim", attention.head_dim, attention.head_dim)
    count = entries.size("num_sliding_attention_heads", count)
    if count % attention.num_kv_heads:
        raise entries.wrong("num_sliding_attention_heads", f"a multiple of {attention.num_kv_heads}")
    # transformers writes it once more for each layer with a window.
    expected = {
        str(layer_idx): {"num_attention_heads": count} for layer_idx, window in enumerate(windows) if window is not None
    }
    if entries.get("per_layer_config") not in (None, {}, expected):
        raise entries.wrong("per_layer_config", f"left out or the {count} heads of layers with a window")
    return attention, replace(attention, num_heads=count)


def _mlps(entries: Entries, num_layers: int) -> list[MlpConfig | MoeConfig]:
    num_experts, top_k = entries.size("n_routed_experts", 288), entries.size("num_experts_per_tok", 8)
    routing = {
        "top_k": top_k,
        "scoring": "sigmoid",
        "renormalize": True,
        "scaling": entries.positive("moe_router_scaling_factor", 1.0),
    }
    mlps: list[MlpConfig | MoeConfig] = []
    bounded, shared = (
        bounded_activations(entries, name, num_layers) for name in ("swiglu_limits", "swiglu_limits_shared")
    )
    for is_sparse, activation, own in zip(_are_sparse(entries, num_layers), bounded, shared, strict=True):
        if not is_sparse:
            mlps.append(reading.read_mlp(entries, activation=own))
            continue
        moe = reading.make_moe(
            routing,
            num_experts=num_experts,
            intermediate_size=entries.size("moe_intermediate_size"),
            activation=activation,
            has_router_bias=True,
            shared_intermediate_size=entries.size("share_expert_dim", 1280),
            shared_activation=own,
        )
        mlps.append(moe)
    return mlps


def _are_sparse(entries: Entries, num_layers: int) -> Sequence[bool]:
    """Return for each layer whether it has experts."""
    kinds = entries.texts("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise entries.wrong("mlp_layer_types", f"a list of num_hidden_layers ({num_layers}) times dense or sparse")
        return [kind == "sparse" for kind in kinds]
    name = "moe_layers_enum"
    numbers = entries.get(name)
    if isinstance(numbers, str) and all(part.strip().isdecimal() for part in numbers.split(",")):
        # A string with commas in published files.
        entries = entries.replaced({name: [int(part) for part in numbers.split(",")]})
    found = entries.sizes(name, least=0)
    sparse = range(3, num_layers) if found is None else found
    return [layer_idx in sparse for layer_idx in range(num_layers)]


def bounded_activations(entries: Entries, name: str, num_layers: int) -> Sequence[str]:
    """Return each layer's activation by the bounds in the file; 0 and null are none."""
    bounds = entries.get(name) or [0] * num_layers
    known = ", ".join(str(bound) for bound in _ACTIVATIONS)
    if (
        not isinstance(bounds, list)
        or len(bounds) != num_layers
        or not all(bound is None or (isinstance(bound, int | float) and bound in _ACTIVATIONS) for bound in bounds)
    ):
        raise entries.wrong(name, f"a list of num_hidden_layers ({num_layers}) times {known}: others are not supported")
    return [_ACTIVATIONS[bound or 0] for bound in bounds]


def bound_of(activation: str) -> float:
    """Return the bound of both factors of gated products that an activation stands for; 0: it has none."""
    return next((float(bound) for bound, name in _ACTIVATIONS.items() if name == activation), 0.0)
