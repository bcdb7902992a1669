"""The vision encoder of MiniCPM-V 4.6, within which squares of patches become one patch.

T: patches of the image, in the order of `nested_order`; N: rows of the output. The sources of the formulas are the
classes MiniCPMV4_6Vision* of transformers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import PatchAttention
from pagewick.models.vision.encoder import VisionMLP
from pagewick.models.vision.merging_config import MiniCPMVisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage
from pagewick.models.vision.positions import Integers, patch_order
from pagewick.models.vision.siglip import SiglipTower

_IN_SQUARE = 4


class WindowMerger(nn.Module):
    """Attention within each square of 2 x 2 patches, which then become one: [T, hidden_size] -> [T / 4, hidden_size].

    The patches of a square follow each other. Their mean is added to what the MLP makes of all four.
    """

    def __init__(self, context: LayerContext, prefix: str, config: MiniCPMVisionConfig) -> None:
        super().__init__()
        size, merged_size, eps = config.hidden_size, config.merged_size, config.norm_eps
        self.norm1 = LayerNorm(context, size, eps, has_bias=True)
        self.attn = PatchAttention(context, f"{prefix}.attn", size, config.num_heads, is_fused=False)
        self.norm2 = LayerNorm(context, merged_size, eps, has_bias=True)
        self.mlp = VisionMLP(
            context,
            f"{prefix}.mlp",
            merged_size,
            _IN_SQUARE * config.intermediate_size,
            size,
            activation="gelu_tanh",
            inputs=("linear_1",),
        )
        self._shapes = (-1, _IN_SQUARE, size), (-1, merged_size)

    def forward(self, x: Tensor) -> Tensor:
        each, merged = self._shapes
        x = add(self.attn(self.norm1(x), None, range(0, len(x) + 1, _IN_SQUARE)), x)
        return add(self.mlp(self.norm2(x.view(merged))), x.view(each).mean(1))


class MiniCPMEncoder(SiglipTower):
    """The encoder of one picture at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    merge_entry = "downsample_mode"

    def __init__(self, context: LayerContext, prefix: str, config: MiniCPMVisionConfig) -> None:
        super().__init__(context, prefix, config)
        self._window_block = config.window_block
        if config.window_block is not None:
            self.window_merger = WindowMerger(context, f"{prefix}.window_merger", config)
        self.projector = MergingProjector(context, f"{prefix}.projector", config)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        rows, columns = height // size, width // size
        row, column = nested_order(rows, columns, self.config.merge_size)
        patches = self.patch_embed(self._patches(pixels, self._to_device(row * columns + column)))
        nearest = nearest_places(rows, self._side)[row] * self._side + nearest_places(columns, self._side)[column]
        x = add(patches, self.pos_embed(self._to_device(nearest)))
        for index, block in enumerate(self.blocks):
            x = block(x, None, (0, len(x)))
            if index == self._window_block:
                x = self.window_merger(x)
        projected = self.projector(self.norm(x))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))


def nested_order(rows: int, columns: int, merge_size: int) -> tuple[Integers, Integers]:
    """Return the row and the column of each of rows * columns patches, in an order in which they can be merged.

    merge_size: 2 or 4. The four patches of a square follow each other, and so do four such squares, if it is 4.
    """
    if merge_size == 2:
        order = patch_order(rows, columns, 2, None)
        return order.rows, order.columns
    outer = patch_order(rows // 2, columns // 2, 2, None)
    inner_row, inner_column = np.divmod(np.arange(_IN_SQUARE), 2)
    return (outer.rows[:, None] * 2 + inner_row).ravel(), (outer.columns[:, None] * 2 + inner_column).ravel()


def nearest_places(length: int, side: int) -> Integers:
    """Return which of `side` learned positions in a line each of `length` patches has: [length].

    As in transformers, they are found by the fraction of the line at which a patch begins, in float32.
    """
    begins = torch.arange(length) / length
    return torch.bucketize(begins, torch.arange(1 / side, 1.0, 1 / side), right=True).numpy()
