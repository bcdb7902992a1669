"""The encoder of Moondream 2: the whole of an image, and crops of it that overlap, become one square of tokens.

T: patches of a crop, and rows of the output. The source of the formulas is the code of the model,
https://github.com/vikhyat/moondream, moondream/torch/vision.py and image_crops.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import WholeRows
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock
from pagewick.models.vision.merging_config import CropVisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage, PatchReader


class CropEncoder(PatchReader):
    """The encoder of one picture at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    CropVisionConfig says what a picture holds. prefix: of the names of its modules. use_pixels comes first.
    """

    def __init__(self, context: LayerContext, prefix: str, config: CropVisionConfig) -> None:
        super().__init__(context, config)
        assert config.positions_per_side is not None, "each patch has a learned position"
        self.config: CropVisionConfig = config
        size, self._side = config.hidden_size, config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.positions = WholeRows(context, config.fixed_tokens, size)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, size, config.norm_eps, has_bias=True)
        self.projector = MergingProjector(context, f"{prefix}.projector", config)

    def num_tokens(self, height: int, width: int) -> int:
        """Return T. Raises ValueError for a picture of a size that no number of crops makes."""
        if (height, width) not in self.config.picture_sizes:
            raise ValueError(
                f"a picture of {height} x {width} pixels does not consist of the whole image and its crops"
            )
        return self.config.fixed_tokens

    def forward(self, pixels: Tensor) -> EncodedImage:
        num_rows, side = self.num_tokens(*pixels.shape[:2]), self.config.crop_side
        whole, image = self._rows(pixels[:side, :side]), pixels[side:]
        starts = [range(0, length - side + 1, self.config.stride) for length in image.shape[:2]]
        lines = [
            self._joined([self._grid(image[top : top + side, left : left + side]) for left in starts[1]], 1)
            for top in starts[0]
        ]
        grid = self._joined(lines, 0).permute(2, 0, 1)
        averaged = nn.functional.adaptive_avg_pool2d(grid, (self._side, self._side)).flatten(1).t()
        projected = self.projector(torch.cat([whole, averaged], dim=-1))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))

    def _rows(self, pixels: Tensor) -> Tensor:
        """Return the rows of a square of crop_side pixels: [T, hidden_size]."""
        place = torch.arange(self.config.fixed_tokens, device=self._device)
        x = add(self.patch_embed(self._patches(pixels.contiguous(), place)), self.positions.weight)
        for block in self.blocks:
            x = block(x, None, (0, len(x)))
        return self.norm(x)  # type: ignore[no-any-return]

    def _grid(self, pixels: Tensor) -> Tensor:
        """Return the same as [rows, columns, hidden_size]."""
        return self._rows(pixels).view(self._side, self._side, -1)

    def _joined(self, grids: list[Tensor], axis: int) -> Tensor:
        """Return neighbours along an axis as one grid: those in the middle without `margin` patches at both ends."""
        margin, last = self.config.margin, len(grids) - 1
        kept = []
        for number, grid in enumerate(grids):
            start = margin if number else 0
            end = grid.shape[axis] - (margin if number < last else 0)
            kept.append(grid.narrow(axis, start, end - start))
        return torch.cat(kept, dim=axis)
