"""Fields of ModelInfo about the labels of a model, and about the images that it reads."""

from __future__ import annotations

from typing import Any

from pagewick.config import EngineConfig
from pagewick.engine.whole_parts import max_image_tokens
from pagewick.models.config import ModelConfig


def labels_of(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of ModelInfo about labels; none if the model has none."""
    head = model.labels
    if head is None:
        return {}
    return {
        "num_labels": head.num_labels,
        "label_activation": head.activation,
        "label_names": list(head.names),
        "problem_type": head.problem_type,
    }


def images_of(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the fields of ModelInfo about images; none if the model reads none."""
    if (vision := model.vision) is None:
        return {}
    return {
        "image_token_id": vision.image_token_id,
        "image_side": vision.side,
        "image_step": vision.step,
        "image_tile": vision.tile_side,
        "image_most_tiles": vision.most_tiles,
        "has_row_breaks": vision.has_row_breaks,
        "writes_captions": model.image_attention is not None,
        "max_image_tokens": max_image_tokens(config, model),
        "image_num_leading": vision.num_leading,
        "image_fixed_tokens": vision.fixed_tokens,
        "image_sizes": list(vision.picture_sizes),
    }
