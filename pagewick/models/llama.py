"""Llama 1, 2, 3, 3.1, 3.2, Yi and DeepSeek-R1-Distill-Llama: the decoder as it is. Biases where the file says so.

Arcee (AFM-4.5B): the same with an MLP without a gate, whose activation is the square of a ReLU. InternLM3: the same
with other names for what says whether there are biases. IQuest-Coder: the same, in files of its own name. Idefics3 and
SmolVLM: Llama as the text part of models that read images. CWM: windows in three of four layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import NormConfig
from pagewick.models.vision.merging_siglip_entries import with_idefics3

# Where a file has no entry about rotation at all.
_CWM_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Where the text part of Idefics3 and SmolVLM stands in a file.
_IN_IDEFICS3: Final = (NameMap(parts=(("model", "model.text_model"),)),)


def read_llama(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    return _read(entries, default_eps=1e-6)


def read_idefics3(entries: Entries) -> ModelConfig:
    """Idefics3 and SmolVLM."""
    text = text_entries(entries)
    text.choice("model_type", ("llama",), "llama")
    text.demand("qk_layer_norms", False, False)
    text.demand("rope_interleaved", False, False)
    text.demand("use_resampler", False, False)
    return with_idefics3(read_text_part(entries, read_llama, places=_IN_IDEFICS3), entries)


def read_arcee(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 4096})
    return _read(entries, default_eps=1e-5, activation=reading.read_activation(entries, "relu2"), is_gated=False)


def read_internlm3(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"attention_bias": "qkv_bias", "mlp_bias": "bias"})
    entries = entries.filled({"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768})
    if entries.flag("attention_bias", False) != entries.flag("mlp_bias", False):
        raise entries.wrong("attention_bias", "the same as bias: others are not supported")
    return _read(entries, default_eps=1e-5)


def read_iquest_coder(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072})
    entries.demand("clip_qkv", None, None)
    entries.demand("use_sliding_window", False, False)
    return _read(entries, default_eps=1e-5)


def read_cwm(entries: Entries) -> ModelConfig:
    if "rope_scaling" not in entries:
        theta = entries.positive("rope_theta", _CWM_ROPE["rope_theta"])
        rope = {**_CWM_ROPE, "rope_theta": theta}
        entries = entries.without_null(("rope_parameters",)).filled({"rope_parameters": rope})
    entries = entries.filled(
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 8192}
    )
    entries.demand("attention_bias", False, False)
    windows = reading.read_windows(entries, [layer % 4 != 0 for layer in range(reading.read_num_layers(entries))])
    return _read(entries, default_eps=1e-5, default_theta=1e6, windows=windows)


def _read(
    entries: Entries,
    *,
    default_eps: float,
    default_theta: float = 1e4,
    windows: Sequence[int | None] | None = None,
    **mlp_options: Any,
) -> ModelConfig:
    """mlp_options: of reading.read_mlp."""
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False), **mlp_options)
    rope = reading.read_rope_of(entries, attention, default_theta=default_theta)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", default_eps)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope, windows),
    )
