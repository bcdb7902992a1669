"""The encoders of LLaVA's models, CLIP's and SigLIP's, whose rows are outputs of blocks, and projectors behind them.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2. The sources of the
formulas are the classes CLIPVision*, SiglipVision* and LlavaModel of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.embedding import WholeEmbedding
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import WholeRows
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock
from pagewick.models.vision.merging_config import ClipVisionConfig
from pagewick.models.vision.merging_projector import MergingProjector
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import patch_order
from pagewick.models.vision.shrinking import shrunk


class ClipEncoder(PatchReader):
    """The encoder of one picture at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    merge_entry = "downsample_factor"

    def __init__(self, context: LayerContext, prefix: str, config: ClipVisionConfig) -> None:
        super().__init__(context, config)
        assert config.positions_per_side is not None, "each patch has a learned position"
        self.config: ClipVisionConfig = config
        size, self._side = config.hidden_size, config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.pos_embed = WholeEmbedding(context, f"{prefix}.pos_embed", self._side**2 + config.num_firsts, size)
        if config.has_first:
            self.first = WholeRows(context, 1, size, shape=(size,))
            self.first_norm = LayerNorm(context, size, config.norm_eps, has_bias=True)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config, is_fused=False)
            for index in range(config.num_blocks)
        )
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
        projected = self._rows(pixels)
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))

    def _rows(self, pixels: Tensor) -> Tensor:
        """Return the rows of a square of pixels: [N, out_hidden_size]."""
        order = patch_order(self._side, self._side, self.config.merge_size, None)
        place = self._to_device(order.rows * self._side + order.columns)
        x = self.patch_embed(self._patches(pixels, place))
        if self.config.has_first:
            # The learned row has the first position.
            place = torch.cat([place.new_zeros(1), place + 1])
            x = self.first_norm(add(torch.cat([self.first.weight, x]), self.pos_embed(place)))
        else:
            x = add(x, self.pos_embed(place))
        outputs = {0: x}
        for number, block in enumerate(self.blocks, start=1):
            x = block(x, None, (0, len(x)))
            if number in self.config.features:
                outputs[number] = x
        features = [outputs[number][self.config.num_firsts :] for number in self.config.features]
        found = features[0].contiguous() if len(features) == 1 else torch.cat(features, dim=-1)
        return self.projector(found)  # type: ignore[no-any-return]


class JoiningClipEncoder(ClipEncoder):
    """The encoder of LLaVA-NeXT and LLaVA-OneVision: pictures of one tile, or of several with tokens in common rows."""

    def __init__(self, context: LayerContext, prefix: str, config: ClipVisionConfig) -> None:
        super().__init__(context, prefix, config)
        self.newline = WholeRows(context, 1, config.out_hidden_size, shape=(config.out_hidden_size,))

    def forward(self, pixels: Tensor, edges: tuple[int, int] | None = None, *, has_end: bool = False) -> EncodedImage:
        """Encode a picture. edges, has_end: see ImageInput."""
        if edges is None:
            whole = super().forward(pixels)
            if not has_end:
                return whole
            ended = torch.cat([whole.rows, self.newline.weight])
            return EncodedImage(ended, ended.new_empty(0, *ended.shape))
        side, seen, of_tile = self.config.image_size, self._side * self.config.patch_size, self._side
        height, width = (length // side for length in pixels.shape[:2])
        tiles = pixels.view(height, side, width, side, 3)[:, :seen, :, :seen].permute(0, 2, 1, 3, 4)
        rows = torch.stack([self._rows(tile) for tile in tiles.flatten(0, 1)])
        grid = rows.view(height, width, of_tile, of_tile, -1).transpose(1, 2).flatten(0, 1).flatten(1, 2)
        down, across = edges
        grid = grid[down : len(grid) - down, across : grid.shape[1] - across]
        grid = self._shrunk(grid)
        lines = self.newline.weight.expand(len(grid), 1, -1)
        found = torch.cat([grid, lines], dim=1).flatten(0, 1)
        return EncodedImage(found, found.new_empty(0, *found.shape))

    def _shrunk(self, grid: Tensor) -> Tensor:
        """Return rows [rows, columns, out_hidden_size], shrunk by a bilinear filter if there are too many."""
        rows, columns, _ = grid.shape
        size = shrunk(rows, columns, self._side, self.config.most_tiles)
        if size == (rows, columns):
            return grid
        whole = grid.permute(2, 0, 1).unsqueeze(0)
        return nn.functional.interpolate(whole, size=size, mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
