"""An encoder of images without its decoder, on several ranks, which may be more than the decoder's heads allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewick.layers.context import LayerContext
from pagewick.models.registry import read_config
from pagewick.models.vision.building import build_encoder
from pagewick.models.vision.pixels import EncodedImage, PatchReader, PixelSettings
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.layers.ranks import on_ranks


class _Alone(torch.nn.Module):
    def __init__(self, visual: PatchReader, name_in_file: Any) -> None:
        super().__init__()
        self.visual, self.name_in_file = visual, name_in_file


def encoded_on_ranks(directory: Path, num_ranks: int, image: Tensor, settings: PixelSettings) -> Sequence[EncodedImage]:
    """Return what each rank's encoder of the checkpoint makes of an image."""

    def on_a_rank(context: LayerContext) -> EncodedImage:
        with open_source(directory) as source, torch.inference_mode():
            config = read_config(source.config())
            assert config.vision is not None
            encoder = build_encoder(context, "visual", config.vision)
            alone = _Alone(encoder, config.name_map(source.names()).in_file)
            load_weights(alone, source, ignore=[rf"(?!{config.vision.tensors}).*", *config.ignored])
            encoder.use_pixels(settings)
            return encoder(image)  # type: ignore[no-any-return]

    return on_ranks(num_ranks, on_a_rank)
