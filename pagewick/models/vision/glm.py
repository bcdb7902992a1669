"""The vision encoder of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR, and the merger to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2. The sources of the
formulas are the classes Glm4vVision* and GlmOcrVision* of transformers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import Activation, add
from pagewick.layers.embedding import WholeEmbedding
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.patches import PatchProjection
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.config import GlmVisionConfig
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock, VisionMLP
from pagewick.models.vision.pixels import EncodedImage, PatchReader, stretched
from pagewick.models.vision.positions import PatchOrder, patch_order

# PyTorch's own, which no entry of the file has.
_MERGER_EPS: Final = 1e-5


class GlmMerger(VisionMLP):
    """Patches [T, hidden_size] -> [N, out_hidden_size]: each square of patches becomes a row, then an MLP follows."""

    def __init__(self, context: LayerContext, prefix: str, config: GlmVisionConfig) -> None:
        size, out_size, side = config.hidden_size, config.out_hidden_size, config.merge_size
        super().__init__(
            context,
            prefix,
            out_size,
            config.merger_size,
            out_size,
            activation=config.activation,
            inputs=("gate_proj", "up_proj"),
            bias=False,
        )
        self.downsample = PatchProjection(context, f"{prefix}.downsample", (size, side, side), out_size, bias=True)
        self.proj = ReplicatedLinear(context, f"{prefix}.proj", out_size, out_size)
        self.norm = LayerNorm(context, out_size, _MERGER_EPS, has_bias=True)
        self.first_act = Activation("gelu", is_gated=False)
        self._shape = -1, side**2, size

    def forward(self, x: Tensor) -> Tensor:
        # The file's order: all patches of the square for the first number of a patch, then all for the second one.
        squares = x.view(self._shape).transpose(1, 2).flatten(1)
        return super().forward(self.first_act(self.norm(self.proj(self.downsample(squares)))))


class GlmEncoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    def __init__(self, context: LayerContext, prefix: str, config: GlmVisionConfig) -> None:
        super().__init__(context, config)
        size, side = config.hidden_size, config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.first_norm: RMSNorm | None = None
        self.pos_embed: WholeEmbedding | None = None
        if side is not None:
            self.first_norm = RMSNorm(context, size, config.norm_eps)
            self.pos_embed = WholeEmbedding(context, f"{prefix}.pos_embed", side**2, size)
        self.blocks = nn.ModuleList(
            VisionBlock(
                context,
                f"{prefix}.blocks.{index}",
                config,
                bias=config.has_bias,
                qkv_bias=config.has_qkv_bias,
                head_norm_eps=config.norm_eps if config.is_qk_normed else None,
            )
            for index in range(config.num_blocks)
        )
        self.last_norm = RMSNorm(context, size, config.norm_eps)
        self.merger = GlmMerger(context, f"{prefix}.merger", config)
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        rows, columns = height // size, width // size
        order = patch_order(rows, columns, self.config.merge_size, None)
        place = self._to_device(order.rows * columns + order.columns)
        x = self.patch_embed(self._patches(pixels, place))
        if self.first_norm is not None:
            x = add(self.first_norm(x), self._positions(order, rows, columns))
        rotation = self._rotation(order, self._frequencies, self._frequencies)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)))
        merged = self.merger(self.last_norm(x))
        return EncodedImage(merged, merged.new_empty(0, num_rows, merged.shape[-1]))

    def _positions(self, order: PatchOrder, rows: int, columns: int) -> Tensor:
        """Return the learned positions, stretched over rows x columns patches: [T, hidden_size]."""
        side = self.config.positions_per_side
        assert self.pos_embed is not None and side is not None
        table = self.pos_embed(torch.arange(side**2, device=self._device)).view(side, side, -1)
        return stretched(table, order, rows, columns)
