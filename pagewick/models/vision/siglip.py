"""SigLIP's encoders, of Gemma 3, LFM2-VL, Idefics3, Command A Vision and PaddleOCR-VL, and projectors behind them.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.embedding import WholeEmbedding
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.patches import Rotation, TransposedLinear
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.config import SiglipConfig, VisionConfig
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock
from pagewick.models.vision.merging_config import MergingSiglipConfig, PaddleVisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import PatchOrder, patch_order


class PoolingProjector(nn.Module):
    """Patches [T, hidden_size] -> [N, out_hidden_size]: the mean of each square of patches, normed and projected."""

    def __init__(self, context: LayerContext, prefix: str, config: SiglipConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(context, config.hidden_size, config.norm_eps, offset=1.0)
        self.linear = TransposedLinear(context, f"{prefix}.linear", config.hidden_size, config.out_hidden_size)
        self._square = config.merge_size**2

    def forward(self, x: Tensor) -> Tensor:
        means = x.view(-1, self._square, x.shape[-1]).mean(1)
        return self.linear(self.norm(means))  # type: ignore[no-any-return]


class SiglipTower(PatchReader):
    """The blocks of SigLIP, and a projector that a derived class sets."""

    projector: nn.Module

    def __init__(self, context: LayerContext, prefix: str, config: VisionConfig) -> None:
        super().__init__(context, config)
        assert config.positions_per_side is not None, "patches have learned positions"
        self._side = config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.pos_embed = WholeEmbedding(context, f"{prefix}.pos_embed", self._side**2, config.hidden_size)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config, is_fused=False)
            for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, config.hidden_size, config.norm_eps, has_bias=True)

    def num_tokens(self, height: int, width: int) -> int:
        """Return N. Raises ValueError for an image of another size than the model's, if that is fixed."""
        side = self._side * self.config.patch_size
        if self.config.fixed_pixels is not None and (height, width) != (side, side):
            raise ValueError(f"an image of {height} x {width} pixels, and this model reads {side} x {side}")
        return super().num_tokens(height, width)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        rows, columns = height // size, width // size
        order = patch_order(rows, columns, self.config.merge_size, None)
        place = self._to_device(order.rows * columns + order.columns)
        x = add(self.patch_embed(self._patches(pixels, place)), self._positions(place, rows, columns))
        rotation = self._turned(order)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)))
        projected = self.projector(self.norm(x))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))

    def _positions(self, place: Tensor, rows: int, columns: int) -> Tensor:
        """Return the learned positions of the patches at `place` [T] among rows x columns: [T, hidden_size]."""
        raise NotImplementedError

    def _turned(self, order: PatchOrder) -> Rotation | None:
        """Return the rotation of heads; None if positions are learned alone."""
        return None

    def _stretched(self, place: Tensor, rows: int, columns: int, *, is_smoothed: bool) -> Tensor:
        """Return what `_positions` does, the square of positions stretched over the image by a bilinear filter.

        is_smoothed: the filter is as wide as the steps between patches.
        """
        table = self.pos_embed(torch.arange(self._side**2, device=self._device))
        grid = table.view(self._side, self._side, -1).permute(2, 0, 1).unsqueeze(0).to(torch.float32)
        stretched = nn.functional.interpolate(
            grid, size=(rows, columns), mode="bilinear", align_corners=False, antialias=is_smoothed
        )
        return stretched[0].flatten(1).t()[place].to(self._dtype)


class SiglipEncoder(SiglipTower):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    merge_entry = "the square root of mm_tokens_per_image"

    def __init__(self, context: LayerContext, prefix: str, config: SiglipConfig) -> None:
        super().__init__(context, prefix, config)
        self.projector = PoolingProjector(context, f"{prefix}.projector", config)

    def _positions(self, place: Tensor, rows: int, columns: int) -> Tensor:
        return self.pos_embed(place)  # type: ignore[no-any-return]


class SquareSiglipEncoder(SiglipTower):
    """The encoder of one tile at a time, of Command A Vision; see SiglipEncoder."""

    merge_entry = "downsample_factor"

    def __init__(self, context: LayerContext, prefix: str, config: MergingSiglipConfig) -> None:
        super().__init__(context, prefix, config)
        self.projector = MergingProjector(context, f"{prefix}.projector", config)

    def _positions(self, place: Tensor, rows: int, columns: int) -> Tensor:
        return self.pos_embed(place)  # type: ignore[no-any-return]


class RoundingSiglipEncoder(SquareSiglipEncoder):
    """The encoder of one tile at a time, of Idefics3 and SmolVLM; see SiglipEncoder."""

    merge_entry = "scale_factor"

    def __init__(self, context: LayerContext, prefix: str, config: MergingSiglipConfig) -> None:
        super().__init__(context, prefix, config)
        self._place = _rounded_places(self._side).to(context.device)

    def _positions(self, place: Tensor, rows: int, columns: int) -> Tensor:
        row, column = self._place[place // columns], self._place[place % columns]
        return self.pos_embed(row * self._side + column)  # type: ignore[no-any-return]


def _rounded_places(side: int) -> Tensor:
    """Return the learned position of each of `side` patches in a line: [side].

    transformers finds it by the fraction of the line at which a patch begins, in float32. With some numbers of patches
    the rounding gives a few of them their neighbour's; not with those of published models.
    """
    begins = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(begins.clamp(max=1.0 - 1e-6), torch.arange(1 / side, 1.0, 1 / side), right=True)


class StretchingSiglipEncoder(SiglipTower):
    """The encoder of one image of any shape at a time; see SiglipEncoder."""

    merge_entry = "downsample_factor"

    def __init__(self, context: LayerContext, prefix: str, config: MergingSiglipConfig) -> None:
        super().__init__(context, prefix, config)
        self.projector = MergingProjector(context, f"{prefix}.projector", config)

    def _patches(self, pixels: Tensor, place: Tensor) -> Tensor:
        """As PatchReader's, with the colours of each pixel side by side."""
        return self._with_colours_last(super()._patches(pixels, place))

    def _positions(self, place: Tensor, rows: int, columns: int) -> Tensor:
        return self._stretched(place, rows, columns, is_smoothed=True)


class TurningSiglipEncoder(SiglipTower):
    """The encoder of PaddleOCR-VL, whose heads turn by a patch's row and column; see SiglipEncoder."""

    def __init__(self, context: LayerContext, prefix: str, config: PaddleVisionConfig) -> None:
        super().__init__(context, prefix, config)
        self.projector = MergingProjector(context, f"{prefix}.projector", config)
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

    def _positions(self, place: Tensor, rows: int, columns: int) -> Tensor:
        return self._stretched(place, rows, columns, is_smoothed=False)

    def _turned(self, order: PatchOrder) -> Rotation:
        return self._rotation(order, self._frequencies, self._frequencies)
