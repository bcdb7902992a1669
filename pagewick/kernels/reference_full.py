"""Attention without a cache and the rotation of its heads in plain PyTorch; a part of reference.py.

T: rows of all sequences, one sequence after the other. H heads of D numbers, of which each has a query, a key and a
value. R: the part of a head that is rotated.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pagewick.kernels.options import Rotation
from pagewick.kernels.reference_rope import turn_heads

# Limits of what exists at once: scores of a slice of queries, and rows of heads in float32.
_MAX_SCORES = 2**25
_ROTATED_ROWS = 128


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float, bias: Tensor | None = None
) -> Tensor:
    """Let each row of q, k, v [T, H, D] attend to all rows of its sequence: [T, H, D] in q.dtype.

    cu_seqlens: on the host; sequence i has the rows from cu_seqlens[i] up to cu_seqlens[i + 1]. scale: factor of the
    scores. bias: [H, L, L] in q.dtype, of which bias[:, :n, :n] is added to the scores of n rows; n is at most L.
    Everything is computed in float32 and rounded once. A sequence's result does not depend on the other
    sequences. Raises ValueError for sequences that do not cover the rows.
    """
    check_sequences(cu_seqlens, len(q))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(q.dtype, torch.float32)
    for start, stop in pairwise(cu_seqlens):
        keys = k[start:stop].to(dtype).permute(1, 2, 0)
        values = v[start:stop].to(dtype).transpose(0, 1)
        step = max(1, _MAX_SCORES // max(1, q.shape[1] * (stop - start)))
        for first in range(start, stop, step):
            rows = slice(first, min(first + step, stop))
            scores = (q[rows].to(dtype).transpose(0, 1) @ keys) * scale
            if bias is not None:
                scores += bias[:, rows.start - start : rows.stop - start, : stop - start]
            out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out


def check_sequences(cu_seqlens: Sequence[int], num_rows: int) -> None:
    """Raise ValueError unless the sequences follow each other and cover the rows."""
    if not cu_seqlens or cu_seqlens[0] != 0 or cu_seqlens[-1] != num_rows or list(cu_seqlens) != sorted(cu_seqlens):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of rows, {num_rows}, not {list(cu_seqlens)[:9]}")


def rotate_heads(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first R numbers of each head of x [T, H, D], in float32: a copy, rounded once to x.dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    cos, sin, interleaved = rotation
    for first in range(0, len(x), _ROTATED_ROWS):
        rows = slice(first, first + _ROTATED_ROWS)
        out[rows] = turn_heads(x[rows], None, Rotation(cos[rows], sin[rows], interleaved))
    return out
