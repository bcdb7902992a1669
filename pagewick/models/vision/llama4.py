"""The vision encoder of Llama 4, and the projector to the decoder's width.

T: patches of the image, in the order of PatchOrder; N: rows of the output, T / merge_size ** 2. The sources of the
formulas are the classes Llama4Vision* and Llama4MultiModalProjector of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import Activation, add
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import LayerNorm
from pagewick.layers.patches import Rotation, WholeRows, rotary_angles
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.encoder import PatchEmbedding, VisionBlock, VisionMLP
from pagewick.models.vision.merging_config import Llama4VisionConfig
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import PatchOrder, patch_order


class Llama4Projector(VisionMLP):
    """Patches [T, hidden_size] -> [N, out_hidden_size]: each square of patches, side by side, through three products.

    An activation follows each of the first two.
    """

    def __init__(self, context: LayerContext, prefix: str, config: Llama4VisionConfig) -> None:
        width, size = config.projector_size, config.merged_size
        assert width is not None, "an MLP is behind merged patches"
        super().__init__(context, prefix, size, width, width, activation="gelu", bias=False)
        self.last_act = Activation("gelu", is_gated=False)
        self.linear = ReplicatedLinear(context, f"{prefix}.linear", width, config.out_hidden_size)
        self._shape = -1, size

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.last_act(super().forward(x.view(self._shape))))  # type: ignore[no-any-return]


class Llama4Encoder(PatchReader):
    """The encoder of one tile at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    prefix: of the names of its modules. use_pixels comes first.
    """

    merge_entry = "1 / vision_config.pixel_shuffle_ratio"
    # The model was trained with pixels that were rounded so, and its processor rounds them whatever the model's dtype.
    pixel_dtype = torch.bfloat16

    def __init__(self, context: LayerContext, prefix: str, config: Llama4VisionConfig) -> None:
        super().__init__(context, config)
        assert config.positions_per_side is not None, "each patch has a learned position"
        size, self._side = config.hidden_size, config.positions_per_side
        num_positions = self._side**2 + 1
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.last = WholeRows(context, 1, size, shape=(size,))
        self.positions = WholeRows(context, num_positions, size, shape=(num_positions, size))
        self.first_norm = LayerNorm(context, size, config.norm_eps, has_bias=True)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config, is_fused=False)
            for index in range(config.num_blocks)
        )
        self.norm = LayerNorm(context, size, config.norm_eps, has_bias=True)
        self.projector = Llama4Projector(context, f"{prefix}.projector", config)
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

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
        patches = torch.cat([self.patch_embed(self._patches(pixels, place)), self.last.weight])
        positions = self.positions.weight
        x = self.first_norm(add(patches, torch.cat([positions[place], positions[-1:]])))
        rotation = self._rotation_of_all(order)
        for block in self.blocks:
            x = block(x, rotation, (0, len(x)))
        projected = self.projector(self.norm(x[:-1]))
        return EncodedImage(projected, projected.new_empty(0, num_rows, projected.shape[-1]))

    def _rotation_of_all(self, order: PatchOrder) -> Rotation:
        """Return the rotation of neighbours in a head, for the patches and the row behind them, which does not turn."""
        by_column = rotary_angles(self._to_device(order.columns + 1), self._frequencies)
        by_row = rotary_angles(self._to_device(order.rows + 1), self._frequencies)
        cos, sin = (torch.cat(parts, dim=-1) for parts in zip(by_column, by_row, strict=True))
        still = cos.new_ones(1, cos.shape[1])
        return Rotation(torch.cat([cos, still]), torch.cat([sin, 0 * still]), interleaved=True)
