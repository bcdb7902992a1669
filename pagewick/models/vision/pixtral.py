"""The vision encoder of Mistral's models and LightOnOCR, Pixtral's, and the projectors to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, one for each square of merge_size ** 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import RMSNorm
from pagewick.layers.patches import PatchAttention, PatchProjection, Rotation
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.config import PixtralConfig
from pagewick.models.vision.encoder import VisionMLP
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import patch_order


class PixtralBlock(nn.Module):
    """h += attention(norm1(h)); h += feed_forward(norm2(h)), without biases: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: PixtralConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = RMSNorm(context, size, config.norm_eps)
        self.attn = PatchAttention(context, f"{prefix}.attn", size, config.num_heads, bias=False, is_fused=False)
        self.norm2 = RMSNorm(context, size, config.norm_eps)
        self.feed_forward = VisionMLP(
            context,
            f"{prefix}.feed_forward",
            size,
            config.intermediate_size,
            size,
            activation=config.activation,
            inputs=config.mlp_inputs,
            bias=False,
        )

    def forward(self, x: Tensor, rotation: Rotation, cu_seqlens: Sequence[int]) -> Tensor:
        normed, x = self.norm2.add_and_norm(self.attn(self.norm1(x), rotation, cu_seqlens), x)
        return add(self.feed_forward(normed), x)


class Projector(VisionMLP):
    """Patches [T, hidden_size] -> [T, out_hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: PixtralConfig) -> None:
        size, out_size = config.hidden_size, config.out_hidden_size
        super().__init__(
            context,
            prefix,
            size,
            out_size,
            out_size,
            activation=config.projector_activation,
            inputs=("linear_1",),
            bias=config.projector_bias,
        )


class MergingProjector(Projector):
    """Patches [T, hidden_size] -> [N, out_hidden_size]: each square of patches becomes one, and that the output.

    Every rank holds the whole product that merges patches. eps: of the norm before it.
    """

    def __init__(self, context: LayerContext, prefix: str, config: PixtralConfig, eps: float) -> None:
        super().__init__(context, prefix, config)
        size = config.hidden_size
        self.norm = RMSNorm(context, size, eps)
        self.merging_layer = ReplicatedLinear(context, f"{prefix}.merging_layer", config.merged_size, size)
        self._shape = -1, config.merge_size**2, size

    def forward(self, x: Tensor) -> Tensor:
        # The file's order: all patches of the square for the first number of a patch, then all for the second one.
        squares = self.norm(x).view(self._shape).transpose(1, 2).flatten(1)
        return super().forward(self.merging_layer(squares))


class PixtralEncoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    config: PixtralConfig
    merge_entry = "spatial_merge_size"

    def __init__(self, context: LayerContext, prefix: str, config: PixtralConfig) -> None:
        super().__init__(context, config)
        self.patch_conv = PatchProjection(
            context, f"{prefix}.patch_conv", config.patch_shape, config.hidden_size, bias=False
        )
        self.ln_pre = RMSNorm(context, config.hidden_size, config.norm_eps)
        self.blocks = nn.ModuleList(
            PixtralBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        name, eps = f"{prefix}.projector", config.projector_eps
        self.projector = (
            Projector(context, name, config) if eps is None else MergingProjector(context, name, config, eps)
        )
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim)
        frequencies = inverse_frequencies(rope).to(context.device)
        self._of_rows, self._of_columns = frequencies[0::2].contiguous(), frequencies[1::2].contiguous()

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        columns = width // size
        order = patch_order(height // size, columns, self.config.merge_size, None)
        patches = self._patches(pixels, self._to_device(order.rows * columns + order.columns))
        x = self.ln_pre(self.patch_conv(patches))
        rotation = self._rotation(order, self._of_rows, self._of_columns)
        rotation = rotation._replace(interleaved=self.config.is_interleaved)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)))
        rows = self.projector(x[: num_rows * self.config.merge_size**2])
        return EncodedImage(rows, rows.new_empty(0, num_rows, rows.shape[-1]))
