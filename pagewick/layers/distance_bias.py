"""Numbers that are added to the scores of attention by the distance of two tokens, as in T5 (arXiv:1910.10683)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.attention import AttentionBatch
from pagewick.layers.context import LayerContext
from pagewick.quantization.share import check_floats

# All larger distances share the last number of their direction.
_MAX_DISTANCE = 128


class DistanceBias(nn.Module):
    """A learned table [num_buckets, heads], for all layers of an encoder, and the attention that reads it.

    heads: ids of this rank's heads.
    """

    def __init__(self, context: LayerContext, num_buckets: int, heads: Sequence[int], total_num_heads: int) -> None:
        super().__init__()
        empty = torch.empty(num_buckets, len(heads), dtype=torch.float32, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._heads, self._total_num_heads = list(heads), total_num_heads
        # For the longest sequence so far: [heads, length, length]. Its beginning is that of shorter ones.
        self._longest = torch.empty(len(heads), 0, 0, dtype=context.dtype, device=context.device)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, (self.weight.shape[0], self._total_num_heads))
        self.weight.copy_(tensor[:, self._heads])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        """Let the tokens of each sequence, which the batch has as a whole, see each other: [T, heads, D] in q.dtype.

        q, k, v: [T, heads, D].
        """
        bounds: list[int] = batch.cu_seqlens_q.tolist()
        longest = max(stop - start for start, stop in pairwise(bounds))
        if self._longest.shape[1] < longest:
            self._longest = self._compute(longest)
        return kernels.full_attention(q, k, v, bounds, scale, self._longest)

    def _compute(self, length: int) -> Tensor:
        places = torch.arange(length, device=self.weight.device)
        buckets = bucket_of(places[None, :] - places[:, None], self.weight.shape[0])
        return self.weight[buckets].permute(2, 0, 1).to(self._longest.dtype).contiguous()


def bucket_of(distances: Tensor, num_buckets: int) -> Tensor:
    """Return the row of the table for each distance, a key's position minus that of the query.

    Half of the rows are for keys behind the query. Half of these are for one distance each, and the others for ranges
    that grow with the distance.
    """
    in_direction = num_buckets // 2
    exact = in_direction // 2
    size = distances.abs()
    growth = torch.log(size.clamp(min=1).float() / exact) / math.log(_MAX_DISTANCE / exact)
    far = (exact + (growth * (in_direction - exact)).long()).clamp(max=in_direction - 1)
    return torch.where(distances > 0, in_direction, 0) + torch.where(size < exact, size, far)
