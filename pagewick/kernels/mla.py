"""HeadMatrices: what turns heads into latents and back in multi-head latent attention (reference_mla.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels.moe import Experts

# Tokens for which the ids of heads are kept ready: a step of no more of them can be recorded.
_TOKENS_READY = 64


class HeadMatrices:
    """A matrix [num_rows, num_columns] of each of num_heads heads; multiplied as experts are, each with its own rows.

    weights: what to fill, by `weights.load(head, rows, first_row)`.
    """

    def __init__(
        self, num_heads: int, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.weights = Experts.empty(num_heads, num_rows, num_columns, dtype, device)
        self._head_ids = torch.arange(num_heads, dtype=torch.int32, device=device).repeat(_TOKENS_READY, 1)

    def linear(self, x: Tensor) -> Tensor:
        """x [T, H, num_columns] times each head's matrix transposed: [T, H, num_rows] in x.dtype.

        On a CPU with the native library a row has the same bits whatever other rows x has.
        """
        num_tokens, num_heads, _ = x.shape
        head_ids = self._head_ids[:num_tokens]
        if num_tokens > len(head_ids):
            head_ids = self._head_ids[:1].repeat(num_tokens, 1)
        return self.weights.linear(x.flatten(0, 1), head_ids).view(num_tokens, num_heads, self.weights.num_rows)
