"""The vision encoder of BLIP, whose rows texts attend to.

T: patches of the image, row by row; N: tokens of an image, T + 1 and some that fill up blocks of the cache. The sources
of the formulas are the classes BlipVision* of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import WholeRows
from pagewick.models.vision.config import BlipVisionConfig
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock
from pagewick.models.vision.pixels import EncodedImage, PatchReader


class BlipEncoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    def __init__(self, context: LayerContext, prefix: str, config: BlipVisionConfig) -> None:
        super().__init__(context, config)
        self.config: BlipVisionConfig = config
        assert config.positions_per_side is not None, "each patch has a learned position"
        size, self._side = config.hidden_size, config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.first = WholeRows(context, 1, size)
        self.positions = WholeRows(context, self._side**2 + 1, size)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, size, config.norm_eps, has_bias=True)

    def num_tokens(self, height: int, width: int) -> int:
        """Return N. Raises ValueError for an image of another size than the model's."""
        side = self._side * self.config.patch_size
        if (height, width) != (side, side):
            raise ValueError(f"an image of {height} x {width} pixels, and this model reads {side} x {side}")
        return self.config.fixed_tokens

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_tokens = self.num_tokens(height, width)
        patches = self.patch_embed(self._patches(pixels, self._to_device(range(self._side**2))))
        x = add(torch.cat([self.first.weight, patches]), self.positions.weight)
        for block in self.blocks:
            x = block(x, None, (0, len(x)))
        rows = nn.functional.pad(self.norm(x), (0, 0, 0, num_tokens - len(x)))
        return EncodedImage(rows, rows.new_empty(0, *rows.shape))
