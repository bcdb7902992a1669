"""Multi-head latent attention: its operations, and the matrices of the heads that go into and out of latents.

reference_mla.py says what the operations are, and explains the dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagewick.kernels import cpu, reference_mla
from pagewick.kernels.cpu import mla as native_mla
from pagewick.kernels.moe import Experts

__all__ = ["HeadMatrices", "latent_attention", "rope_and_store_latent"]

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

        On a CPU with the native library a row has the same bits whatever other rows
        x has.
        """
        num_tokens, num_heads, _ = x.shape
        head_ids = self._head_ids[:num_tokens]
        if num_tokens > len(head_ids):
            head_ids = self._head_ids[:1].repeat(num_tokens, 1)
        return self.weights.linear(x.flatten(0, 1), head_ids).view(num_tokens, num_heads, self.weights.num_rows)


def rope_and_store_latent(
    q: Tensor,
    latents: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> Tensor:
    """Store normalised latents and rotated keys of latents [T, L + R]; return the rotated queries [T, H, R].

    See reference_mla.rope_and_store_latent.
    """
    options: dict[str, Any] = {
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "cos": cos,
        "sin": sin,
        "interleaved": interleaved,
    }
    if q.is_cpu and (native := cpu.library()) and native_mla.is_native(q, cache):
        return native_mla.rope_and_store_latent(native, q, latents, cache, slot_mapping, **options)
    return reference_mla.rope_and_store_latent(q, latents, cache, slot_mapping, **options)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
) -> Tensor:
    """Causal attention of a ragged batch over cached latents: sums of latents [T, H, L].

    See reference_mla.latent_attention.
    """
    arguments = (q_latent, q_rope, cache, block_tables, context_lens, cu_seqlens_q)
    if q_latent.is_cpu and (native := cpu.library()) and native_mla.is_native(q_latent, cache):
        return native_mla.latent_attention(native, *arguments, softmax_scale=softmax_scale)
    return reference_mla.latent_attention(*arguments, softmax_scale=softmax_scale)
