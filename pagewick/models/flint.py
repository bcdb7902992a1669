"""Flint. Llama, except:

- Queries and keys are normalised per head. Most layers have a window, and only these are rotated. A head's softmax has
  a sink.
- All layers but the first two have experts, chosen by sigmoid, with normalised weights, and a shared one.
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, NormConfig
from pagewick.models.qwen import sparse_layers

_DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "max_position_embeddings": 262144,
    "sliding_window": 513,
    "mlp_only_layers": [0, 1],
    "norm_topk_prob": True,
}
_NAMES: Final = (
    NameMap(parts=(("sinks.weight", "softmax_offset"),)),
    # These are in files that transformers writes as it computes.
    NameMap(parts=(("sinks.weight", "sinks"),)),
)


def read_flint(entries: Entries) -> ModelConfig:
    entries = entries.without_null(("mlp_only_layers",)).filled(_DEFAULTS)
    eps, has_bias = entries.positive("rms_norm_eps", 1e-6), entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=HeadNormConfig(eps=eps), has_sinks=True
    )
    mlps = sparse_layers(
        entries,
        default_top_k=6,
        default_num_experts=256,
        shared=entries.size("shared_expert_intermediate_size", 1024),
        has_shared_gate=False,
        scoring="sigmoid",
    )
    num_layers = len(mlps)
    last = num_layers - 1
    windows = reading.read_windows(
        entries, [layer_idx > 1 and layer_idx % 4 != 1 and layer_idx != last for layer_idx in range(num_layers)]
    )
    rope = reading.read_rope_of(entries, attention)
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=None if window is None else rope, window=window)
        for mlp, window in zip(mlps, windows, strict=True)
    ]
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), names=_NAMES)
