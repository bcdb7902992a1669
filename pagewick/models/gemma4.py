"""Gemma 4. Gemma 3, except:

- Norms scale by their weight alone. Values are normalised, too, and scores are not scaled.
- Layers without a window have heads of another size, perhaps fewer key and value heads, and keys that are values.
  Only a part of their pairs turns.
- The last layers may attend to the keys and values of earlier ones, and may have MLPs twice as wide.
- Each layer has an input of its own, or experts beside its MLP, and a factor at its end.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pagewick.layers.config import MoeConfig, RopeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_alone, read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import (
    AttentionConfig,
    HeadNormConfig,
    LayerConfig,
    LayerInputsConfig,
    MlpConfig,
    NormConfig,
)
from pagewick.models.rope_entries import read_rope
from pagewick.models.vision.gemma4_entries import with_gemma4

_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_UNIFIED: Final[dict[str, Any]] = {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
LAYER_INPUT_NAMES: Final = (
    ("layer_inputs.embed_tokens", "embed_tokens_per_layer"),
    ("layer_inputs.projection", "per_layer_model_projection"),
    ("layer_inputs.norm", "per_layer_projection_norm"),
    ("layer_input.gate_proj", "per_layer_input_gate"),
    ("layer_input.projection", "per_layer_projection"),
    ("layer_input.norm", "post_per_layer_input_norm"),
)
_NAMES: Final = NameMap(
    parts=(
        *LAYER_INPUT_NAMES,
        ("layer_scalar.weight", "layer_scalar"),
        ("mixture.gate", "router.proj"),
        ("mixture.router_norm.weight", "router.scale"),
        ("mixture.expert_scales.weight", "router.per_expert_scale"),
        ("mixture.experts", "experts"),
    )
)


def read_gemma4(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_gemma4, is_tied=True)


def read_gemma4_multimodal(entries: Entries) -> ModelConfig:
    return with_gemma4(read_text_part(entries, _read_gemma4, is_tied=True), entries)


def read_gemma4_unified(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_gemma4_unified, is_tied=True)


def read_gemma4_unified_multimodal(entries: Entries) -> ModelConfig:
    return read_text_part(entries, _read_gemma4_unified, is_tied=True)


def _read_gemma4(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    if entries.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise entries.wrong("use_bidirectional_attention", "null or 'vision': attention to later tokens of a text")
    num_layers = reading.read_num_layers(entries)
    slides = [(layer_idx + 1) % 6 != 0 and layer_idx + 1 < num_layers for layer_idx in range(num_layers)]
    windows = reading.read_windows(entries, slides)
    if windows[-1] is not None:
        raise entries.wrong("layer_types", "a list whose last layer sees everything")
    lenders = reading.read_lenders(entries, windows)
    eps = entries.positive("rms_norm_eps", 1e-6)
    activation = reading.read_activation(entries, "gelu_pytorch_tanh", "hidden_activation")
    is_wide, experts = entries.flag("use_double_wide_mlp", False), _experts(entries, activation, eps)
    layers: list[LayerConfig] = []
    for layer_idx, (window, lender) in enumerate(zip(windows, lenders, strict=True)):
        attention = _attention(entries, layer_idx, window, eps, has_keys=lender is None)
        if lender is not None and _kept(layers[lender].attention) != _kept(attention):
            raise entries.wrong("num_kv_shared_layers", f"fewer: layer {layer_idx} has other heads than {lender}")
        size = entries.size("intermediate_size") * (2 if is_wide and lender is not None else 1)
        layers.append(
            LayerConfig(
                attention=attention,
                mlp=MlpConfig(intermediate_size=size, activation=activation),
                rope=_rope(entries, attention.head_dim, window),
                window=window,
                lender=lender,
                experts=experts,
            )
        )
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        block="extended",
        norm=NormConfig(eps=eps),
        embedding_scale=float(entries.size("hidden_size")) ** 0.5,
        is_embedding_scale_rounded=True,
        logit_soft_cap=entries.optional_positive("final_logit_softcapping"),
        layer_inputs=_layer_inputs(entries, activation, eps),
        layers=tuple(layers),
        names=(_NAMES,),
        ignored=reading.borrowers_tensors(lenders),
    )


def _read_gemma4_unified(entries: Entries) -> ModelConfig:
    """Read Gemma 4 12B, whose layers have neither inputs of their own nor experts."""
    entries.demand("enable_moe_block", False, False, "there are no experts in this architecture")
    entries.demand("hidden_size_per_layer_input", 0, 0, "there are no such inputs in this architecture")
    return _read_gemma4(entries.filled(_UNIFIED))


def _attention(entries: Entries, layer_idx: int, window: int | None, eps: float, *, has_keys: bool) -> AttentionConfig:
    has_bias, are_values = entries.flag("attention_bias", False), entries.flag("attention_k_eq_v", False)
    num_heads = entries.size("num_attention_heads")
    num_kv_heads, head_dim = _sizes_of_heads(entries, layer_idx, window, has_own_number=are_values)
    if num_heads % num_kv_heads:
        raise entries.wrong("num_attention_heads", f"a multiple of {num_kv_heads}, the key heads of layer {layer_idx}")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        softmax_scale=1.0,
        qkv_bias=has_bias,
        o_bias=has_bias,
        layout="queries" if not has_keys else "keys_are_values" if are_values and window is None else "parts",
        head_norm=HeadNormConfig(eps=eps),
        has_value_norm=True,
    )


def _sizes_of_heads(entries: Entries, layer_idx: int, window: int | None, *, has_own_number: bool) -> tuple[int, int]:
    """Return the number of key and value heads of a layer and the size of its heads.

    Files of transformers 5 name the layers that differ. Others have entries for all layers without a window; that with
    the number of heads counts if has_own_number.
    """
    num_kv_heads, head_dim = entries.size("num_key_value_heads"), entries.size("head_dim")
    by_layer = entries.child("per_layer_config")
    if by_layer is not None:
        # Numbers of layers have zeros before them there, so that all are of one length.
        name = next((key for key in by_layer if re.fullmatch(f"0*{layer_idx}", str(key), re.ASCII)), "")
        own = by_layer.child(name) or Entries({})
        if unknown := set(own) - {"num_key_value_heads", "head_dim"}:
            raise own.wrong(min(unknown), "left out: layers that differ in it are not supported")
        return own.size("num_key_value_heads", num_kv_heads), own.size("head_dim", head_dim)
    if window is not None:
        return num_kv_heads, head_dim
    number = entries.optional_size("num_global_key_value_heads") if has_own_number else None
    return number or num_kv_heads, entries.size("global_head_dim")


def _rope(entries: Entries, head_dim: int, window: int | None) -> RopeConfig:
    kind, theta = (_FULL, 1e6) if window is None else (_SLIDING, 1e4)
    rope = read_rope(
        entries,
        head_dim=head_dim,
        max_position_embeddings=reading.read_max_position(entries),
        default_theta=theta,
        layer_type=kind,
        may_be_proportional=True,
    )
    if rope.kind == "default" and rope.rotary_dim != head_dim:
        raise entries.wrong("rope_parameters", f"without a partial_rotary_factor in {kind} of type default")
    return rope


def _layer_inputs(entries: Entries, activation: str, eps: float) -> LayerInputsConfig | None:
    # Null means none, as 0 does.
    name = "hidden_size_per_layer_input"
    size = entries.count(name) if name in entries else 0
    if not size:
        return None
    vocab_size = entries.size("vocab_size_per_layer_input")
    if vocab_size < entries.size("vocab_size"):
        raise entries.wrong("vocab_size_per_layer_input", "at least vocab_size: every token has such a row")
    return LayerInputsConfig(vocab_size=vocab_size, size=size, activation=activation, eps=eps)


def _experts(entries: Entries, activation: str, eps: float) -> MoeConfig | None:
    if not entries.flag("enable_moe_block", False):
        return None
    return reading.make_moe(
        {"top_k": entries.size("top_k_experts"), "renormalize": True},
        num_experts=entries.size("num_experts"),
        intermediate_size=entries.size("moe_intermediate_size"),
        activation=activation,
        has_expert_scales=True,
        router_norm_eps=eps,
        logit_scale=float(entries.size("hidden_size")) ** -0.5,
    )


def _kept(attention: Any) -> tuple[int, int]:
    return attention.num_kv_heads, attention.head_dim
