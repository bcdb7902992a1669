"""ImageEncoder: runs the part of a model that sees, within a time limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewick.engine.device_copies import Array
from pagewick.engine.image_slots import EncodedRows, ImageSlots, pixels_of
from pagewick.engine.messages import ImageInput
from pagewick.engine.model_loading import num_parameters
from pagewick.engine.progress import Progress
from pagewick.engine.step_time_limits import StepTimeLimits
from pagewick.engine.whole_parts import sees_images_whole
from pagewick.kernels import recorded_steps
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.models.vision.canvas import Place, canvas_positions
from pagewick.models.vision.config import VisionConfig
from pagewick.models.vision.merging_config import MiniCPMVisionConfig
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import image_positions


class ImageEncoder:
    """Encodes one image at a time on this rank; every rank must encode the same ones in the same order.

    progress: is told how long a block of the encoder may take.
    """

    def __init__(
        self, encoder: PatchReader, config: VisionConfig, device: torch.device, num_ranks: int, progress: Progress
    ) -> None:
        self._encoder = encoder
        self._config = config
        self._device = device
        self._progress = progress
        self._limits = StepTimeLimits(
            # Images may be read ahead of all blocks.
            layer_size=max(map(num_parameters, encoder.blocks), default=0),
            head_size=0,
            attention_width=config.hidden_size,
            num_layers=len(encoder.blocks),
            device=device.type,
            num_ranks=num_ranks,
        )

    def __call__(self, image: ImageInput) -> EncodedRows:
        # A step that runs ahead uses the same threads.
        recorded_steps.stop_ahead()
        num_patches = image.height * image.width // self._config.patch_size**2
        limit = self._limits.of_tokens(num_patches, num_patches**2)
        self._progress.expect(limit.seconds, limit.cpu_seconds)
        pixels = pixels_of(image, self._device)
        if image.edges is not None:
            return self._encoder(pixels, image.edges)  # type: ignore[no-any-return]
        if image.has_end:
            return self._encoder(pixels, None, has_end=True)  # type: ignore[no-any-return]
        return self._encoder(pixels)  # type: ignore[no-any-return]


class UnseenImages:
    """Stands in for the encoder where another rank has it: rows of 0, which no layer here reads."""

    def __init__(self, row: Tensor) -> None:
        """row: [1, hidden_size], zeros of the model's dtype."""
        self._row = row

    def __call__(self, image: ImageInput) -> EncodedRows:
        num_rows = sum(last - first for first, last in image.runs())
        return EncodedImage(self._row.expand(num_rows, -1), self._row.new_zeros(0, num_rows, self._row.shape[1]))


def image_slots(
    model: Decoder, config: ModelConfig, max_num_seqs: int, device: torch.device, num_ranks: int, progress: Progress
) -> ImageSlots | None:
    """Return the ImageSlots for a model; None if it reads no images."""
    if model.visual is None or config.vision is None:
        return None
    encode: ImageEncoder | UnseenImages = ImageEncoder(model.visual, config.vision, device, num_ranks, progress)
    if model.is_blind:
        encode = UnseenImages(model.model.unknown)
    side = config.vision.side
    marks = config.vision.canvas if isinstance(config.vision, MiniCPMVisionConfig) else None

    def axes_of(token_ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[Array, int, int]:
        places = [Place(image.start, image.height // side, image.width // side) for image in images]
        if marks is not None:
            return canvas_positions(token_ids, places, marks)
        return *image_positions(len(token_ids), places), images[-1].end

    has_axes = any(layer.rope is not None and layer.rope.mrope_section for layer in config.layers)
    return ImageSlots(
        max_num_seqs,
        encode,
        axes_of if has_axes else None,
        sees_whole=sees_images_whole(config),
        num_leading=config.vision.num_leading,
        restarts=config.image_attention is not None,
    )
