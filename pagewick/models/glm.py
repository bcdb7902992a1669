"""GLM-4-9B-chat-hf (Glm), GLM-4 0414 (Glm4); GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, which read images. Llama, except:

- Half of each head is rotated, in pairs of neighbours; queries, keys and values have biases; gate and up are one.
- Glm4 has norms after attention and MLP as well.
- GLM-4.1V, GLM-4.6V and GLM-OCR: as Glm4, with three positions of a token, which are equal within a text.
- GLM-OCR has no biases. A further layer of a file, which predicts later tokens, is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import later_layers
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import Block, NormConfig
from pagewick.models.vision.entries import ReadVision, with_vision
from pagewick.models.vision.glm_entries import read_glm_ocr_vision, read_glm_vision

# Glm4 files call the norm before the MLP post_attention_layernorm, and have names of their own for the others.
_GLM4_NAMES = NameMap(
    parts=(
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    )
)


def read_glm(entries: Entries) -> ModelConfig:
    return _read(entries, "sequential", NameMap())


def read_glm4(entries: Entries) -> ModelConfig:
    return _read(entries, "sandwich", _GLM4_NAMES)


def read_glm4v(entries: Entries) -> ModelConfig:
    return with_images(tied_as_in_text(entries), _read_glm4v_text, "glm4v_text", image_token_id=151343)


def read_glm46v(entries: Entries) -> ModelConfig:
    """GLM-4.6V-Flash. GLM-4.6V with experts has another name."""
    return with_images(entries, _read_glm4v_text, "glm4v_text", image_token_id=151343)


def read_glm_ocr(entries: Entries) -> ModelConfig:
    return with_images(
        tied_as_in_text(entries),
        _read_glm_ocr_text,
        "glm_ocr_text",
        image_token_id=59280,
        read_encoder=read_glm_ocr_vision,
    )


def tied_as_in_text(entries: Entries) -> Entries:
    """Return entries by which the head is tied if the file or its text part says so."""
    is_tied = text_entries(entries).flag("tie_word_embeddings", False)
    return entries.replaced({"tie_word_embeddings": True}) if is_tied else entries


def with_images(
    entries: Entries,
    read_text: Callable[[Entries], ModelConfig],
    kind: str,
    *,
    image_token_id: int,
    read_encoder: ReadVision = read_glm_vision,
) -> ModelConfig:
    """Read a model with three positions of a token. kind: model_type of the text part. image_token_id: the default."""
    text_entries(entries).choice("model_type", (kind,), kind)
    config = read_text_part(entries, read_text)
    return with_vision(
        config, entries, read_encoder, image_token_id=image_token_id, sections=(8, 12, 12), is_interleaved=False
    )


def _read_glm4v_text(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 2, "max_position_embeddings": 32768})
    head_dim = entries.size("hidden_size") // entries.size("num_attention_heads")
    entries.demand("head_dim", head_dim, head_dim, "hidden_size / num_attention_heads")
    entries.demand("attention_bias", True, True, "queries, keys and values have biases")
    return _layers(entries, "sandwich", _GLM4_NAMES, default_eps=1e-5, default_part=1.0, is_mrope=True)


def _read_glm_ocr_text(entries: Entries) -> ModelConfig:
    entries.demand("attention_bias", False, False, "queries, keys and values have no biases")
    entries = entries.filled({
        "attention_bias": False, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 1,
    })  # fmt: skip
    config = _layers(entries, "sandwich", _GLM4_NAMES, default_eps=1e-5, default_part=1.0, is_mrope=True)
    return replace(config, ignored=later_layers(entries))


def _read(entries: Entries, block: Block, names: NameMap) -> ModelConfig:
    entries = entries.filled({"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072})
    return _layers(entries, block, names, default_eps=1.5625e-7, default_part=0.5)


def _layers(
    entries: Entries, block: Block, names: NameMap, *, default_eps: float, default_part: float, is_mrope: bool = False
) -> ModelConfig:
    """default_part: of a head, that is rotated. is_mrope: see reading.read_rope_of."""
    attention = reading.read_attention(entries, qkv_bias=entries.flag("attention_bias", True))
    rope = reading.read_rope_of(
        entries, attention, interleaved=True, default_partial_rotary_factor=default_part, is_mrope=is_mrope
    )
    mlp = reading.read_mlp(entries, is_fused=True)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", default_eps)),
        block=block,
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        names=(names,),
    )
