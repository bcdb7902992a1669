"""The vision encoder of InternVL, InternViT, and the projection to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2. The sources of the
formulas are the classes InternVLVision* of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import VectorScale, add
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import PatchAttention, WholeRows, WideNormedPatchAttention
from pagewick.models.vision.encoder import PatchEmbedding, VisionMLP, make_norm
from pagewick.models.vision.merging_config import InternVisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import patch_order

# The eps of the norms of queries and keys, which has no entry in the file.
_HEADS_EPS: Final = 1e-6


class InternBlock(nn.Module):
    """h += scale1(attention(norm1(h))); h += scale2(mlp(norm2(h))): [T + 1, hidden_size] -> [T + 1, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: InternVisionConfig) -> None:
        super().__init__()
        size, num_heads, bias = config.hidden_size, config.num_heads, config.has_qkv_bias
        self.norm1, self.norm2 = make_norm(context, config, size), make_norm(context, config, size)
        name = f"{prefix}.attn"
        self.attn: nn.Module
        if config.is_qk_normed:
            self.attn = WideNormedPatchAttention(context, name, size, num_heads, _HEADS_EPS, qkv_bias=bias)
        else:
            self.attn = PatchAttention(context, name, size, num_heads, qkv_bias=bias, is_fused=False)
        self.mlp = VisionMLP(
            context, f"{prefix}.mlp", size, config.intermediate_size, size, activation=config.activation
        )
        self.scale1, self.scale2 = VectorScale(context, size), VectorScale(context, size)

    def forward(self, x: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
        attended = self.scale1(self.attn(self.norm1(x), None, cu_seqlens))
        normed, x = self.norm2.add_and_norm(attended, x)
        return add(self.scale2(self.mlp(normed)), x)


class InternEncoder(PatchReader):
    """The encoder of one tile at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    merge_entry = "1 / downsample_ratio"

    def __init__(self, context: LayerContext, prefix: str, config: InternVisionConfig) -> None:
        super().__init__(context, config)
        assert config.positions_per_side is not None, "each patch has a learned position"
        size, self._side = config.hidden_size, config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.first = WholeRows(context, 1, size)
        self.positions = WholeRows(context, self._side**2 + 1, size)
        self.blocks = nn.ModuleList(
            InternBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, size, config.norm_eps, has_bias=True) if config.has_norm else None
        self.projector = MergingProjector(context, f"{prefix}.projector", config)

    def num_tokens(self, height: int, width: int) -> int:
        """Return N. Raises ValueError for an image of another size than the model's."""
        side = self._side * self.config.patch_size
        if (height, width) != (side, side):
            raise ValueError(f"an image of {height} x {width} pixels, and this model reads {side} x {side}")
        return super().num_tokens(height, width)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows = self.num_tokens(height, width)
        order = patch_order(self._side, self._side, self.config.merge_size, None)
        place = self._to_device(order.rows * self._side + order.columns)
        positions = self.positions.weight
        patches = add(self.patch_embed(self._patches(pixels, place)), positions[1 + place])
        x = torch.cat([add(self.first.weight, positions[:1]), patches])
        for block in self.blocks:
            x = block(x, (0, len(x)))
        x = x[1:]
        projected = self.projector(x if self.norm is None else self.norm(x))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))
