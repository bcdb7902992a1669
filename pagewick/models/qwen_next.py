"""Qwen3-Next, Qwen3.5 and Qwen3.5-MoE, with and without images, MiniCPM-V 4.6 and 4.7. Qwen3, except:

- Most layers have linear attention by the gated delta rule: every layer but each fourth, or as layer_types says.
- In the others, each head's output has a gate, and a quarter of each head is rotated.
- RMS norms multiply by 1 + weight, as Gemma's do.
- Qwen3-Next and Qwen3.5-MoE: experts in place of the MLP, and a shared one weighted by a sigmoid.
- Files hold a layer that predicts further tokens (mtp), for --speculative-method mtp. It sees all tokens.

In Qwen3.5 a token has three positions (mrope), which are the same within a text, and so is the rotation. MiniCPM-V 4.6
is a Qwen3.5 that has one position for each token, also of images; MiniCPM-V 4.7 has three.

Two entries are in no config.json, but come from other programs' files: linear_in_proj_fused is false where Qwen3-Next's
queries, keys and values are apart from the gates of outputs, and linear_value_heads_tiled is true where value heads are
in llama.cpp's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.layers.state_config import DeltaConfig
from pagewick.models import delta_entries, reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mtp_offers import offer, qwen_mtp
from pagewick.models.multimodal import read_alone, read_text_part, text_entries
from pagewick.models.parts import HeadNormConfig, LayerConfig, MlpConfig, NormConfig
from pagewick.models.qwen import sparse_layers
from pagewick.models.vision.entries import read_qwen3_5_vision, with_vision
from pagewick.models.vision.minicpm_entries import with_minicpm, with_minicpm_canvas

_SIZES: Final = {"head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_HEADS: Final = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_MTP: Final = r"(model\.)?mtp\..*"
_OF_IMAGES: Final = frozenset({"mrope_section", "mrope_interleaved"})


def read_qwen3_next(entries: Entries) -> ModelConfig:
    entries = entries.filled({**_SIZES, "num_key_value_heads": 2, "norm_topk_prob": True})
    shared = entries.size("shared_expert_intermediate_size", 512)
    mlps = sparse_layers(entries, default_top_k=10, default_num_experts=512, shared=shared)
    return _read(entries, mlps, is_fused=True)


def read_qwen3_5(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_qwen3_5)


def read_qwen3_5_moe(entries: Entries) -> ModelConfig:
    return read_alone(entries, _read_qwen3_5_moe)


def read_qwen3_5_multimodal(entries: Entries) -> ModelConfig:
    return _with_vision(read_text_part(entries, _read_qwen3_5, is_tied=False), entries)


def read_qwen3_5_moe_multimodal(entries: Entries) -> ModelConfig:
    return _with_vision(read_text_part(entries, _read_qwen3_5_moe, is_tied=False), entries)


def read_minicpm_v4_6(entries: Entries) -> ModelConfig:
    return with_minicpm(_read_minicpm_text(entries), entries)


def read_minicpm_v4_7(entries: Entries) -> ModelConfig:
    return with_minicpm_canvas(_read_minicpm_text(entries), entries)


def _read_minicpm_text(entries: Entries) -> ModelConfig:
    text_entries(entries).choice("model_type", ("qwen3_5_text",), "qwen3_5_text")
    return read_text_part(entries, _read_qwen3_5, is_tied=False)


def _with_vision(config: ModelConfig, entries: Entries) -> ModelConfig:
    return with_vision(config, entries, read_qwen3_5_vision, image_token_id=248056, sections=(11, 11, 10))


def _read_qwen3_5(entries: Entries) -> ModelConfig:
    entries = without_axes(entries.filled({**_SIZES, "num_key_value_heads": 4}))
    return _read(entries, [reading.read_mlp(entries)] * reading.read_num_layers(entries))


def _read_qwen3_5_moe(entries: Entries) -> ModelConfig:
    entries = without_axes(entries.filled({**_SIZES, "num_key_value_heads": 2, "norm_topk_prob": True}))
    shared = entries.size("shared_expert_intermediate_size", 512)
    mlps = sparse_layers(entries, default_top_k=8, default_num_experts=256, shared=shared)
    return _read(entries, mlps)


def _read(entries: Entries, mlps: Sequence[MlpConfig | MoeConfig], *, is_fused: bool = False) -> ModelConfig:
    eps, has_bias = entries.positive("rms_norm_eps"), entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norm=HeadNormConfig(eps=eps, offset=1.0),
        has_gate=True,
    )
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.25)
    linear = read_linear_attention(entries, eps, has_fused_gates=is_fused)
    layers = [
        LayerConfig(attention=linear, mlp=mlp, rope=None)
        if is_linear
        else LayerConfig(attention=attention, mlp=mlp, rope=rope)
        for is_linear, mlp in zip(_linear_layers(entries), mlps, strict=True)
    ]
    norm = NormConfig(eps=eps, offset=1.0)
    config = reading.model_config(entries, norm=norm, layers=tuple(layers), ignored=(_MTP,))
    like = max((idx for idx, layer in enumerate(layers) if layer.attention is attention), default=None)
    return config if like is None else offer(config, qwen_mtp(like))


def read_linear_attention(
    entries: Entries, eps: float, *, has_fused_gates: bool = False, has_sigmoid_gate: bool = False
) -> DeltaConfig:
    """Read the sizes of a layer with linear attention. eps: of its norm. The flags are fields of DeltaConfig."""
    delta = delta_entries.read_delta(
        entries, _HEADS, norm_eps=eps, has_fused_gates=has_fused_gates, has_sigmoid_gate=has_sigmoid_gate
    )
    is_fused = has_fused_gates and entries.flag("linear_in_proj_fused", True)
    has_order = delta.num_value_heads > delta.num_key_heads
    return replace(delta, is_fused=is_fused, is_tiled=has_order and entries.flag("linear_value_heads_tiled", False))


def _linear_layers(entries: Entries) -> list[bool]:
    """Return which layers have linear attention. Raises ModelLoadError unless some layer has the other kind."""
    num_layers, interval = reading.read_num_layers(entries), entries.size("full_attention_interval", 4)
    default = [(idx + 1) % interval != 0 for idx in range(num_layers)]
    if "layer_types" not in entries and all(default):
        raise entries.wrong("full_attention_interval", f"at most num_hidden_layers ({num_layers})")
    return delta_entries.linear_layers(entries, default)


def without_axes(entries: Entries) -> Entries:
    """Return the entries without those that divide a rotation among the axes of images."""
    filled = {}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(scaling := entries.values.get(name), dict):
            filled[name] = {key: value for key, value in scaling.items() if key not in _OF_IMAGES}
    return entries.replaced(filled)
