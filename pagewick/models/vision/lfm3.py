"""The vision encoder of LFM3-VL, most of whose blocks have a convolution in place of attention.

T: patches of the image, row by row; N: rows of the output, T / merge_size ** 2. The sources of the formulas are the
classes Lfm3VlVision* of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.norm import RMSNorm
from pagewick.layers.patch_convolution import GatedPatchConvolution
from pagewick.layers.patches import GroupedPatchAttention, Rotation
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.encoder import PatchEmbedding, VisionMLP
from pagewick.models.vision.merging_config import Lfm3VisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import patch_order


class Lfm3Block(nn.Module):
    """h += mixer(norm1(h)); h += mlp(norm2(h)): [T, hidden_size] -> [T, hidden_size].

    has_attention: whether attention mixes patches, else a convolution.
    """

    def __init__(self, context: LayerContext, prefix: str, config: Lfm3VisionConfig, *, has_attention: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.norm1, self.norm2 = RMSNorm(context, size, eps), RMSNorm(context, size, eps)
        if has_attention:
            self.attn = GroupedPatchAttention(
                context, f"{prefix}.attn", size, config.num_heads, config.num_kv_heads, eps
            )
        else:
            self.conv = GatedPatchConvolution(context, f"{prefix}.conv", size, config.conv_size)
        self.mlp = VisionMLP(
            context,
            f"{prefix}.mlp",
            size,
            config.intermediate_size,
            size,
            activation=config.activation,
            inputs=config.mlp_inputs,
            bias=False,
        )
        self._has_attention = has_attention

    def forward(self, x: Tensor, rotation: Rotation, cu_seqlens: Sequence[int], num_columns: int) -> Tensor:
        normed = self.norm1(x)
        mixed = self.attn(normed, rotation, cu_seqlens) if self._has_attention else self.conv(normed, num_columns)
        normed, x = self.norm2.add_and_norm(mixed, x)
        return add(self.mlp(normed), x)


class Lfm3Encoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    def __init__(self, context: LayerContext, prefix: str, config: Lfm3VisionConfig) -> None:
        super().__init__(context, config)
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.first_norm = RMSNorm(context, config.hidden_size, config.norm_eps)
        self.blocks = nn.ModuleList(
            Lfm3Block(context, f"{prefix}.blocks.{index}", config, has_attention=index in config.attention_blocks)
            for index in range(config.num_blocks)
        )
        self.projector = MergingProjector(context, f"{prefix}.projector", config)
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        rows, columns = height // size, width // size
        # Convolutions want the patches row by row; only the projector wants those of a square together.
        order = patch_order(rows, columns, 1, None)
        x = self.first_norm(self.patch_embed(self._patches(pixels, self._to_device(order.tokens))))
        rotation = self._rotation(order, self._frequencies, self._frequencies)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)), columns)
        merged = patch_order(rows, columns, self.config.merge_size, None)
        projected = self.projector(x[self._to_device(merged.rows * columns + merged.columns)])
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))
