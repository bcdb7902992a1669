"""The vision encoder of Kimi K2.5 and K2.6 (MoonViT), with the projector to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2. The sources of the
formulas are the classes Kimi_K25Vision* and Kimi_K25MultimodalProjection of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import Rotation, WholeRows, rotary_angles
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock
from pagewick.models.vision.merging_config import MoonVisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage, PatchReader, stretched
from pagewick.models.vision.positions import PatchOrder, patch_order


class MoonEncoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    merge_entry = "vision_config.merge_kernel_size"

    def __init__(self, context: LayerContext, prefix: str, config: MoonVisionConfig) -> None:
        super().__init__(context, config)
        size, side = config.hidden_size, config.positions_per_side
        assert side is not None, "patches have learned positions"
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.positions = WholeRows(context, side**2, size, shape=(side, side, size))
        self._side = side
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, size, config.norm_eps, has_bias=True)
        self.projector = MergingProjector(context, f"{prefix}.projector", config)
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        rows, columns = height // size, width // size
        order = patch_order(rows, columns, self.config.merge_size, None)
        place = self._to_device(order.rows * columns + order.columns)
        positions = stretched(self.positions.weight.view(self._side, self._side, -1), order, rows, columns)
        x = add(self.patch_embed(self._patches(pixels, place)), positions)
        rotation = self._in_turn(order)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)))
        projected = self.projector(self.norm(x))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))

    def _in_turn(self, order: PatchOrder) -> Rotation:
        """Return the rotation of neighbours in a head: a pair by the column, the next one by the row, and so on.

        Both have the same frequency.
        """
        by_column = rotary_angles(self._to_device(order.columns), self._frequencies)
        by_row = rotary_angles(self._to_device(order.rows), self._frequencies)
        cos, sin = (torch.stack(parts, dim=-1).flatten(1) for parts in zip(by_column, by_row, strict=True))
        return Rotation(cos, sin, interleaved=True)
