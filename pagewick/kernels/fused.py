"""Operations by PyTorch's own fused kernels, where these are exact and their order of additions is fixed.

Full attention on a CPU: PyTorch gives each block of a head's queries to one thread, which adds over the keys in order,
so that the result does not depend on the number of threads. On a GPU: the fused kernels for 16 bits; those for float32
may be missing, and without them all scores would exist at once.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels.dispatch import Backend
from pagewick.kernels.reference_full import check_sequences

_DTYPES = {
    "cpu": (torch.bfloat16, torch.float16, torch.float32),
    "cuda": (torch.bfloat16, torch.float16),
}


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float, bias: Tensor | None = None
) -> Tensor:
    """reference.full_attention, whose scores exist for some keys at a time.

    With 16 bits, the probabilities that weigh the values are rounded to them. Raises ValueError as it does.
    """
    check_sequences(cu_seqlens, len(q))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start, number, length in _runs(cu_seqlens):
        stop = start + number * length
        # [number, H, length, D]: neighbouring sequences of one length are computed at once.
        queries, keys, values = (x[start:stop].reshape(number, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = None if bias is None else bias[None, :, :length, :length]
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        out[start:stop] = attended.transpose(1, 2).flatten(0, 1)
    return out


def _runs(cu_seqlens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, number, length) of each run of neighbouring sequences of one length above 0."""
    start = 0
    for length, run in groupby(stop - start for start, stop in pairwise(cu_seqlens)):
        number = len(list(run))
        if length:
            yield start, number, length
        start += number * length


def supports(operation: str, device_kind: str, dtype: torch.dtype) -> bool:
    """Whether PyTorch has such a kernel here for tensors of this device and dtype."""
    if operation != "full_attention" or dtype not in _DTYPES.get(device_kind, ()):
        return False
    return device_kind == "cpu" or torch.cuda.is_available()


BACKEND = Backend("PyTorch's fused kernels", {"full_attention": full_attention}, supports)
