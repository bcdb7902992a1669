"""A convolution over the rows and columns of an image's patches, with gates. T: patches, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from pagewick.layers.norm import empty_parameter
from pagewick.parallel.sharding import shard_bounds
from pagewick.quantization.share import check_floats

# Patches that are convolved at once, which limits the memory for numbers in float32.
_MAX_PATCHES: Final = 1024


class PatchFilter(nn.Module):
    """Each channel of a patch becomes the weighted sum of that channel in a square of patches, whose middle it is.

    The square has conv_size patches along a side, an odd number; patches beyond the edges of the image count as zeros.
    The file has the weights as [channels, 1, conv_size, conv_size], row by row; a rank keeps those of its channels.
    """

    def __init__(self, context: LayerContext, num_channels: int, conv_size: int) -> None:
        super().__init__()
        self._shape = (num_channels, 1, conv_size, conv_size)
        self._kept = shard_bounds(num_channels, context.tp_rank, context.tp_size)
        self.weight = empty_parameter(context, conv_size, conv_size, self._kept[1] - self._kept[0])

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, "weight")]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Raises ModelLoadError for a tensor of another shape or of whole numbers."""
        check_floats(tensor, self._shape)
        self.weight.copy_(tensor[slice(*self._kept), 0].permute(1, 2, 0))

    def forward(self, x: Tensor, num_columns: int) -> Tensor:
        """[T, this rank's channels] -> the same, summed in float32 in one order, and rounded once."""
        grid = x.view(-1, num_columns, x.shape[-1])
        margin, num_rows = self._shape[-1] // 2, len(grid)
        step, weight, found = max(1, _MAX_PATCHES // num_columns), self.weight.float(), []
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            above, below = min(margin, first), min(margin, num_rows - last)
            seen = grid[first - above : last + below].float()
            edges = (0, 0, margin, margin, margin - above, margin - below)
            found.append(_weighed(nn.functional.pad(seen, edges), weight).to(x.dtype))
        return torch.cat(found).flatten(0, 1)


def _weighed(padded: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of squares in [rows + size - 1, columns + size - 1, channels]: [rows, columns, channels]."""
    size = len(weight)
    num_rows, num_columns = padded.shape[0] - size + 1, padded.shape[1] - size + 1
    total = padded.new_zeros(num_rows, num_columns, padded.shape[2])
    for row in range(size):
        for column in range(size):
            total.addcmul_(padded[row : row + num_rows, column : column + num_columns], weight[row, column])
    return total


class GatedPatchConvolution(nn.Module):
    """out_gate * filter(in_gate * x), between two products: [T, size] -> [T, size]. Each rank has some channels."""

    def __init__(self, context: LayerContext, prefix: str, size: int, conv_size: int) -> None:
        super().__init__()
        parts = dict.fromkeys(("in_gate", "out_gate", "x"), size)
        self.in_proj = MergedColumnParallelLinear(context, prefix, size, parts, fused_name="in_proj")
        self.filter = PatchFilter(context, size, conv_size)
        self.proj = RowParallelLinear(context, f"{prefix}.proj", size, size)

    def forward(self, x: Tensor, num_columns: int) -> Tensor:
        """num_columns: patches in a row of the image."""
        in_gate, out_gate, x = self.in_proj(x).chunk(3, dim=-1)
        return self.proj(out_gate * self.filter(in_gate * x, num_columns))  # type: ignore[no-any-return]
