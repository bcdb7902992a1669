"""Values of heads that are smaller than the keys (MiMo-V2), for attention whose keys and values have one size."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.layers.context import LayerContext


class NarrowValues:
    """Repeats the first numbers of each value until it is as large as a key, and drops what attention makes of them.

    An output's numbers are sums of the same number of each value, so that the others stay as they are. All numbers of a
    value have the scale of its largest one, in caches that have scales, which repeating does not change.
    num_heads, num_kv_heads: of this rank.
    """

    def __init__(self, context: LayerContext, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int) -> None:
        first_value = (num_heads + num_kv_heads) * head_dim
        starts = first_value + value_dim * torch.arange(num_kv_heads)
        values = starts[:, None] + torch.arange(head_dim) % value_dim
        self._wide = torch.cat((torch.arange(first_value), values.flatten())).to(context.device)
        kept = head_dim * torch.arange(num_heads)[:, None] + torch.arange(value_dim)
        self._kept = kept.flatten().to(context.device)

    def widened(self, qkv: Tensor) -> Tensor:
        """Return [T, (num_heads + 2 * num_kv_heads) * head_dim] for queries, keys and smaller values."""
        return kernels.gather_columns(qkv, self._wide)

    def narrowed(self, attended: Tensor) -> Tensor:
        """Return [T, num_heads * value_dim] for attention's output [T, num_heads * head_dim]."""
        return kernels.gather_columns(attended, self._kept)
