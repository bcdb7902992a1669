"""EXAONE 4, EXAONE 4.5, which reads images, and K-EXAONE (ExaoneMoe). Llama, except:

- Queries and keys are normalised per head.
- With a sliding_window (not 4.0 1.2B), three of four layers have one, and only these are rotated.
- EXAONE 4 and 4.5: the norms of a layer come after attention and MLP, not before them.
- K-EXAONE: all layers but the first have experts and a shared one, which are chosen as in DeepSeek-V3.
- K-EXAONE: a further layer of a file, which predicts later tokens, serves --speculative-method mtp. It has an MLP, sees
  everything, and is not rotated. That of EXAONE 4.5 is not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, layers_by_kind, read_experts, sigmoid_routing
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.mtp_offers import offer, qwen_mtp
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, MlpConfig, NormConfig
from pagewick.models.vision.entries import read_exaone_vision, with_vision

_DEFAULTS: Final = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
_MOE_DEFAULTS: Final = {**_DEFAULTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
# Published files have the second place of the bias, files of transformers the first one.
_MOE_NAMES: Final = tuple(
    NameMap(parts=(*SHARED_EXPERTS.parts, *bias))
    for bias in ((), (("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),))
)
_LATER_TOKENS: Final = r"mtp\..*"


def read_exaone4(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    return _read(entries, [reading.read_mlp(entries)] * reading.read_num_layers(entries), block="post_norm")


def read_exaone4_5(entries: Entries) -> ModelConfig:
    text_entries(entries).choice("model_type", ("exaone4", "exaone4_5_text"), "exaone4")
    config = read_text_part(entries, _read_exaone4_5_text)
    return with_vision(config, entries, read_exaone_vision, image_token_id=67, has_axes=False)


def _read_exaone4_5_text(entries: Entries) -> ModelConfig:
    num_layers, kinds = reading.read_num_layers(entries), entries.texts("layer_types")
    num_later = entries.count("num_nextn_predict_layers", 1, most=MAX_LAYERS)
    if kinds is not None and len(kinds) == num_layers + num_later:
        # Published files also list the layer that predicts later tokens.
        entries = entries.replaced({"layer_types": list(kinds[:num_layers])})
    return replace(read_exaone4(entries), ignored=(_LATER_TOKENS,))


def read_exaone_moe(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"n_shared_experts": "num_shared_experts"}).filled(_MOE_DEFAULTS)
    num_experts = entries.size("num_experts", 64)
    routing = sigmoid_routing(entries, num_experts, default_scaling=2.5)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    config = _read(entries, layers_by_kind(entries, moe, default_dense=1), names=_MOE_NAMES, ignored=(_LATER_TOKENS,))
    return _with_later_layer(entries, config)


def _with_later_layer(entries: Entries, config: ModelConfig) -> ModelConfig:
    """Return the config with the layer that predicts later tokens, unless it is of another kind than published ones."""
    like = next((layer for layer in config.layers if layer.window is None), None)
    kinds = entries.texts("mtp_layer_types") or (reading.FULL,)
    if like is None or kinds[0] != reading.FULL or "swiglu_limits" in entries:
        return config
    return offer(config, qwen_mtp(own=replace(like, mlp=reading.read_mlp(entries))))


def _read(entries: Entries, mlps: Sequence[MlpConfig | MoeConfig], **fields: Any) -> ModelConfig:
    eps = entries.positive("rms_norm_eps", 1e-5)
    attention = reading.read_attention(entries, head_norm=HeadNormConfig(eps=eps))
    rope, num_layers = reading.read_rope_of(entries, attention), len(mlps)
    if "sliding_window" in entries:
        pattern = _pattern(entries)
        windows = reading.read_windows(entries, [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)])
        layers = [
            LayerConfig(attention=attention, mlp=mlp, rope=None if window is None else rope, window=window)
            for mlp, window in zip(mlps, windows, strict=True)
        ]
    else:
        layers = list(reading.same_layers(num_layers, attention, mlps, rope))
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), **fields)


def _pattern(entries: Entries) -> int:
    """Every how many layers one sees everything: a number, or a string such as LLLG."""
    pattern = entries.get("sliding_window_pattern")
    if isinstance(pattern, str) and re.fullmatch("L*G", pattern):
        return len(pattern)
    return entries.size("sliding_window_pattern")
