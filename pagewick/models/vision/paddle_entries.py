"""Reads the vision part of PaddleOCR-VL's config.json, and how three positions turn the heads of its text part.

No torch. transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names
the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.vision.entries import MAX_MERGED, check_heads, read_axial_theta, with_axes
from pagewick.models.vision.merging_config import PaddleVisionConfig
from pagewick.models.vision.siglip_entries import IN_TOWER, MAX_SIDE, tower_fields
from pagewick.models.vision.tensor_names import PADDLE_TENSORS, without_encoders

# Not in the file.
_PROJECTOR_EPS: Final = 1e-5
_DEFAULTS: Final = {
    "hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304, "num_hidden_layers": 27,
    "patch_size": 14,
}  # fmt: skip
# The encoder and the projector, as transformers writes them, and in the files that are published.
_PLACES: Final = (("model.visual", "model.projector"), ("visual", "mlp_AR"))
# Parts that published files hold and that no image needs: one that makes one vector of an image, and positions of
# images of any shape, in whose place those of a square are stretched.
_UNUSED: Final = r"(model\.)?visual\.vision_model\.(head\..*|embeddings\.(packing_position_embedding\..*|position_ids))"


def with_paddle(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id", 100295)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    text = entries.child("text_config") or entries
    return replace(
        config,
        vision=_read(given, token, config.hidden_size),
        layers=with_axes(config, text, (16, 24, 24), is_interleaved=False),
        names=tuple(NameMap(parts=(*names.parts, *_names_in(*place))) for names in config.names for place in _PLACES),
        ignored=(*without_encoders(config.ignored), _UNUSED),
    )


def _read(entries: Entries, image_token_id: int, text_size: int) -> PaddleVisionConfig:
    # The first files have the type of the whole model.
    entries.choice("model_type", ("paddleocr_vl_vision", "paddleocr_vl"), "paddleocr_vl_vision")
    fields = tower_fields(entries.filled(_DEFAULTS))
    width, num_heads = fields["hidden_size"], fields["num_heads"]
    check_heads(entries, "num_attention_heads", width, num_heads)
    entries.demand("head_dim", width // num_heads, width // num_heads, "heads share out the width of a patch")
    side = entries.size("image_size", 384, most=MAX_SIDE) // fields["patch_size"]
    if not side:
        raise entries.wrong("image_size", f"at least patch_size ({fields['patch_size']})")
    merge_size = entries.size("spatial_merge_size", 2, most=MAX_MERGED)
    return PaddleVisionConfig(
        **{**fields, "tensors": PADDLE_TENSORS},
        image_token_id=image_token_id,
        out_hidden_size=text_size,
        merge_size=merge_size,
        positions_per_side=side,
        rope_theta=read_axial_theta(entries, 10000.0),
        projector_eps=_PROJECTOR_EPS,
        is_norm_merged=False,
        projector_size=width * merge_size**2,
        projector_bias=True,
    )


def _names_in(tower: str, projector: str) -> tuple[tuple[str, str], ...]:
    return (
        ("visual.projector.norm", f"{projector}.pre_norm"),
        ("visual.projector.projection.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector.projection", projector),
        ("visual", f"{tower}.vision_model"),
        ("vision_model.norm", "vision_model.post_layernorm"),
        *IN_TOWER,
    )
