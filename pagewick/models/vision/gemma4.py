"""The vision encoder of Gemma 4, and the projection to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2. The sources of the
formulas are the classes Gemma4Vision* and Gemma4MultimodalEmbedder of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pagewick.layers.clipped import ClippedLinear
from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import Activation, add, multiply
from pagewick.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from pagewick.layers.norm import PlainRMSNorm, RMSNorm
from pagewick.layers.patches import AxisPositions, NormedPatchAttention, PatchProjection, Rotation, Standardizer
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.config import Gemma4VisionConfig
from pagewick.models.vision.pixels import EncodedImage, PatchReader, PixelSettings
from pagewick.models.vision.positions import PatchOrder, patch_order


class Gemma4MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with limits around each product: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size, inner, is_clipped = config.hidden_size, config.intermediate_size, config.is_clipped
        gate, up = (
            ColumnParallelLinear(context, f"{prefix}.{name}.linear", size, inner) for name in ("gate_proj", "up_proj")
        )
        down = RowParallelLinear(context, f"{prefix}.down_proj.linear", inner, size)
        self.gate_proj, self.up_proj = (ClippedLinear(context, linear, is_clipped=is_clipped) for linear in (gate, up))
        self.down_proj = ClippedLinear(context, down, is_clipped=is_clipped)
        self.act = Activation(config.activation, is_gated=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(multiply(self.act(self.gate_proj(x)), self.up_proj(x)))  # type: ignore[no-any-return]


class Gemma4VisionBlock(nn.Module):
    """h += norm(attention(norm(h))); h += norm(mlp(norm(h))): [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.norm1 = RMSNorm(context, size, eps)
        self.attn = NormedPatchAttention(
            context, f"{prefix}.attn", size, config.num_heads, eps, is_clipped=config.is_clipped
        )
        self.post_attention_layernorm = RMSNorm(context, size, eps)
        self.pre_feedforward_layernorm = RMSNorm(context, size, eps)
        self.mlp = Gemma4MLP(context, f"{prefix}.mlp", config)
        self.post_feedforward_layernorm = RMSNorm(context, size, eps)

    def forward(self, x: Tensor, rotation: Rotation, cu_seqlens: Sequence[int]) -> Tensor:
        attended = self.post_attention_layernorm(self.attn(self.norm1(x), rotation, cu_seqlens))
        normed, x = self.pre_feedforward_layernorm.add_and_norm(attended, x)
        return add(self.post_feedforward_layernorm(self.mlp(normed)), x)


class PositionedPatches(nn.Module):
    """Patches [T, numbers of a patch] and their columns and rows [T] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: Gemma4VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.proj = PatchProjection(context, f"{prefix}.proj", config.patch_shape, size, bias=False)
        self.positions = AxisPositions(context, config.num_positions, size)

    def forward(self, patches: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        return add(self.proj(patches), self.positions(columns, rows))


class Gemma4Encoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    config: Gemma4VisionConfig
    merge_entry = "vision_config.pooling_kernel_size"

    def __init__(self, context: LayerContext, prefix: str, config: Gemma4VisionConfig) -> None:
        super().__init__(context, config)
        size = config.hidden_size
        self.patch_embed = PositionedPatches(context, f"{prefix}.patch_embed", config)
        self.blocks = nn.ModuleList(
            Gemma4VisionBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        self.standard = Standardizer(context, size) if config.is_standardized else None
        self.norm = PlainRMSNorm(context, size, config.norm_eps)
        self.projector = ReplicatedLinear(context, f"{prefix}.projector", size, config.out_hidden_size)
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

    def use_pixels(self, settings: PixelSettings) -> None:
        """Read images as `settings` says. Raises ModelLoadError if the files of the model disagree."""
        super().use_pixels(settings)
        assert self._pixels is not None, "use_pixels has set them"
        # The encoder doubles the distance of the processor's numbers from 0.5.
        factor, mean, std = self._pixels
        self._pixels = factor, mean + std / 2, std / 2

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, patch_size = self.num_tokens(height, width), self.config.patch_size
        num_columns = width // patch_size
        order = patch_order(height // patch_size, num_columns, self.config.merge_size, None)
        columns, rows = self._to_device(order.columns), self._to_device(order.rows)
        x = self.patch_embed(self._patches(pixels, rows * num_columns + columns), columns, rows)
        rotation = self._column_first(order)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)))
        projected = self.projector(self.norm(self._pooled(x)))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))

    def _patches(self, pixels: Tensor, place: Tensor) -> Tensor:
        """As PatchReader's, with the colours of each pixel side by side."""
        return self._with_colours_last(super()._patches(pixels, place))

    def _column_first(self, order: PatchOrder) -> Rotation:
        """Return the rotation of heads: the first half of the pairs by a patch's column, the second by its row."""
        turned = order._replace(rows=order.columns, columns=order.rows)
        return self._rotation(turned, self._frequencies, self._frequencies)

    def _pooled(self, x: Tensor) -> Tensor:
        """Return the mean of each square of patches, [N, hidden_size] in x.dtype.

        It is rounded to x.dtype, then scaled and standardised in float32, as in transformers.
        """
        means = x.view(-1, self.config.merge_size**2, x.shape[-1]).float().mean(1).to(x.dtype)
        scaled: Tensor = means.float() * float(self.config.hidden_size) ** 0.5
        if self.standard is not None:
            scaled = self.standard(scaled)
        return scaled.to(x.dtype)
