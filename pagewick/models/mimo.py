"""MiMo-V2-Flash. Llama, except:

- Values are smaller than keys, and scaled by a number.
- Five of six layers have a window, twice as many key and value heads, a rotation of their own, and a sink in each
  head's softmax. A part of each head is rotated.
- All layers but the first have experts, chosen as in DeepSeek-V3, without a shared one.
- Further tensors of a file, which predict later tokens, are not used.

The published file has entries of its own for the layers with a window, and lists of 0 and 1 in place of kinds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import layers_by_kind, sigmoid_routing
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, LayerConfig, NormConfig

_DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "sliding_window": 129,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "attention_value_scale": 0.707,
}
_THETA, _WINDOW_THETA, _ROTATED = 5e6, 1e4, 0.334
_ONLY: Final = {"n_shared_experts": 0, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
_LATER_TOKENS: Final = r"(model\.)?mtp\..*"
_NAMES: Final = (
    NameMap(parts=(("sinks.weight", "attention_sink_bias"),)),
    # It is in files that transformers writes as it computes.
    NameMap(parts=(("sinks.weight", "sinks"),)),
)


def read_mimo_v2_flash(entries: Entries) -> ModelConfig:
    entries = _with_kinds(entries.renamed({"rms_norm_eps": "layernorm_epsilon"}).filled(_DEFAULTS))
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    num_experts = entries.size("n_routed_experts", 256)
    moe = reading.make_moe(
        sigmoid_routing(entries, num_experts, default_scaling=1.0),
        num_experts=num_experts,
        intermediate_size=entries.size("moe_intermediate_size"),
        activation=reading.read_activation(entries),
        has_router_bias=True,
    )
    mlps = layers_by_kind(entries, moe, default_dense=1)
    num_layers = len(mlps)
    windows = reading.read_windows(
        entries, [layer_idx > 0 and (layer_idx + 1) % 6 > 0 for layer_idx in range(num_layers)]
    )
    everywhere = _attention(entries)
    within = replace(everywhere, num_kv_heads=_kv_heads_of_windows(entries, everywhere), has_sinks=True)
    options: dict[str, Any] = {"default_partial_rotary_factor": _ROTATED}
    full = reading.read_rope_of(entries, everywhere, default_theta=_THETA, layer_type=reading.FULL, **options)
    windowed = reading.read_rope_of(entries, within, default_theta=_WINDOW_THETA, layer_type=reading.SLIDING, **options)
    layers = [
        LayerConfig(attention=everywhere, mlp=mlp, rope=full)
        if window is None
        else LayerConfig(attention=within, mlp=mlp, rope=windowed, window=window)
        for mlp, window in zip(mlps, windows, strict=True)
    ]
    norm = NormConfig(eps=entries.positive("rms_norm_eps", 1e-5))
    return reading.model_config(entries, norm=norm, layers=tuple(layers), names=_NAMES, ignored=(_LATER_TOKENS,))


def _with_kinds(entries: Entries) -> Entries:
    """Return the entries as transformers writes them, in place of those of the published file."""
    changed: dict[str, Any] = {}
    for name, own, kinds in (
        ("layer_types", "hybrid_layer_pattern", (reading.FULL, reading.SLIDING)),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        flags = entries.sizes(own, least=0)
        if flags is None:
            continue
        if set(flags) - {0, 1}:
            raise entries.wrong(own, "a list of 0 and 1")
        listed = [kinds[flag] for flag in flags]
        if entries.get(name) not in (None, listed):
            raise entries.wrong(own, f"left out or agree with {name}")
        changed[name] = listed
    if (size := entries.optional_size("sliding_window_size")) is not None:
        # It does not count the new token itself.
        changed["sliding_window"] = size + 1
    if "swa_rope_theta" in entries:
        changed["rope_local_base_freq"] = entries.positive("swa_rope_theta")
    return entries.replaced(changed)


def _attention(entries: Entries) -> AttentionConfig:
    value_dim = entries.size("v_head_dim", most=entries.size("head_dim"))
    return reading.read_attention(
        entries,
        qkv_bias=entries.flag("attention_bias", False),
        value_dim=value_dim,
        value_scale=entries.optional_positive("attention_value_scale") or 1.0,
    )


def _kv_heads_of_windows(entries: Entries, attention: AttentionConfig) -> int:
    for name, value in (
        ("swa_num_attention_heads", attention.num_heads),
        ("swa_head_dim", attention.head_dim),
        ("swa_v_head_dim", attention.value_dim),
    ):
        entries.demand(name, value, value, "layers with a window have as large heads as the others, and as many")
    count = entries.size("swa_num_key_value_heads", 2 * attention.num_kv_heads)
    if attention.num_heads % count:
        raise entries.wrong("swa_num_key_value_heads", f"a divisor of num_attention_heads ({attention.num_heads})")
    return count
