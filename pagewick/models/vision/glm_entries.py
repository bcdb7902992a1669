"""Reads the vision part of the config.json of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models.entries import Entries
from pagewick.models.reading import read_activation
from pagewick.models.vision.config import GlmVisionConfig
from pagewick.models.vision.entries import common_fields
from pagewick.models.vision.siglip_entries import MAX_SIDE

_KINDS: Final = ("glm4v_vision", "glm4v", "glm4v_moe_vision", "glm4v_moe")
_NAMES: Final = (
    ("mlp.linear_fc2", "mlp.down_proj"), ("merger.linear_fc2", "merger.down_proj"),
    ("merger.norm", "merger.post_projection_norm"), ("merger.downsample", "downsample"),
    ("pos_embed", "embeddings.position_embedding"), ("first_norm", "post_conv_layernorm"),
    ("last_norm", "post_layernorm"),
)  # fmt: skip


def read_glm_vision(entries: Entries, image_token_id: int, text_size: int) -> GlmVisionConfig:
    """Read vision_config, given the id of the image token and the decoder's hidden size."""
    entries.choice("model_type", _KINDS, "glm4v_vision")
    defaults = {"hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096, "attention_bias": False}
    fields = _fields(entries.filled(defaults), image_token_id, text_size)
    side = entries.size("image_size", 336, most=MAX_SIDE) // fields["patch_size"]
    if not side:
        raise entries.wrong("image_size", f"at least patch_size ({fields['patch_size']})")
    return GlmVisionConfig(
        **fields,
        # Blocks have MLPs of the decoder's width, and the merger has one of the width that the file names.
        intermediate_size=text_size,
        merger_size=entries.size("intermediate_size", 13696),
        positions_per_side=side,
    )


def read_glm_ocr_vision(entries: Entries, image_token_id: int, text_size: int) -> GlmVisionConfig:
    """As read_glm_vision: GLM-OCR's encoder has no learned positions, and it normalises queries and keys."""
    entries.choice("model_type", ("glm_ocr_vision", "glm_ocr"), "glm_ocr_vision")
    defaults = {"hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "attention_bias": True}
    fields = _fields(entries.filled(defaults), image_token_id, text_size)
    return GlmVisionConfig(
        **fields,
        intermediate_size=entries.size("intermediate_size", 4096),
        # Three is the number of colours in the source of the formula; no entry gives this width.
        merger_size=3 * text_size,
        has_bias=fields["has_qkv_bias"],
        is_qk_normed=True,
    )


def _fields(entries: Entries, image_token_id: int, text_size: int) -> dict[str, Any]:
    """Return the fields that both kinds read alike; each fills in its own defaults before."""
    width = entries.size("hidden_size")
    return {
        **common_fields(
            entries, image_token_id, text_size, width=width, out="out_hidden_size", patch_size=14, num_blocks=24
        ),
        "activation": read_activation(entries, "silu"),
        "is_gated": True,
        "is_rms": True,
        "norm_eps": entries.positive("rms_norm_eps", 1e-5),
        "patch_bias": True,
        "has_qkv_bias": entries.flag("attention_bias"),
        "names": _NAMES,
    }
