"""Bamba. Llama, except that most layers have Mamba-2 in place of attention, and that a half of each head is rotated."""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mamba_entries import read_mamba
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig

_NAMES: Final = NameMap(
    parts=(
        ("mlp", "feed_forward"),
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
    )
)
_DEFAULTS: Final = {"num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}


def read_bamba(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    eps, has_bias = entries.positive("rms_norm_eps"), entries.flag("attention_bias", False)
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.5)
    mamba = read_mamba(entries, norm_eps=eps)
    full = _layers_with_attention(entries)
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=rope)
        if idx in full
        else LayerConfig(attention=mamba, mlp=mlp, rope=None)
        for idx in range(reading.read_num_layers(entries))
    ]
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), names=(_NAMES,))


def _layers_with_attention(entries: Entries) -> tuple[int, ...]:
    full, num_layers = entries.sizes("attn_layer_indices", least=0) or (), reading.read_num_layers(entries)
    if not full or max(full) >= num_layers:
        raise entries.wrong("attn_layer_indices", f"a list of layers from 0 to {num_layers - 1}, at least one")
    return full
