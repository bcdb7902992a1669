"""Images that transformers reads as whole pictures, neither cut into patches nor padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewick.models.vision.pixels import PatchReader
from tests.layers.ranks import single_context
from tests.models.test_vision import Pixels, build


def encoder_of(directory: Path, pixels: Pixels) -> PatchReader:
    """Return the encoder of the checkpoint in a directory."""
    model = build(directory, single_context())
    assert model.visual is not None
    model.visual.use_pixels(pixels)
    return model.visual


def by_transformers(reference: Any, image: Tensor, pixels: Pixels) -> Tensor:
    """Return the rows that transformers' model makes of an image [height, width, 3]."""
    normed = (image.double() / 255 - torch.tensor(pixels.mean)) / torch.tensor(pixels.std)
    whole = normed.permute(2, 0, 1).unsqueeze(0).to(reference.dtype)
    return reference.model.get_image_features(whole).pooler_output[0]  # type: ignore[no-any-return]
