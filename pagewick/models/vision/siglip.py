"""The vision encoder of Gemma 3, SigLIP's, and the projection to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2.
"""

from __future__ import annotations

from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.embedding import WholeEmbedding
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.patches import TransposedLinear
from pagewick.models.vision.config import SiglipConfig
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import patch_order


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


class SiglipEncoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    config: SiglipConfig
    merge_entry = "the square root of mm_tokens_per_image"

    def __init__(self, context: LayerContext, prefix: str, config: SiglipConfig) -> None:
        super().__init__(context, config)
        assert config.positions_per_side is not None, "each patch has a learned position"
        self._side = config.positions_per_side
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.pos_embed = WholeEmbedding(context, f"{prefix}.pos_embed", self._side**2, config.hidden_size)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config, is_fused=False)
            for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, config.hidden_size, config.norm_eps, has_bias=True)
        self.projector = PoolingProjector(context, f"{prefix}.projector", config)

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
        x = add(self.patch_embed(self._patches(pixels, place)), self.pos_embed(place))
        for block in self.blocks:
            x = block(x, None, (0, len(x)))
        rows = self.projector(self.norm(x))
        return EncodedImage(rows, rows.new_empty(0, num_rows, rows.shape[-1]))
