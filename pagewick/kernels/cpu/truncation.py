"""Filters over rows of logits, by the native library.

Weights of tokens are computed in float32 here and in float64 by the definitions, so a filter whose limit lies within
about 1e-7 of a token may keep it in one of the two only.
"""

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, Operation, empty, is_plain
from pagewick.kernels.cpu.logits import check_columns, is_served
from pagewick.kernels.cpu.structs import SurpriseArgs, TruncateArgs, Truncation

_TRUNCATE_ROWS = Operation("truncate_rows", TruncateArgs)
_SURPRISE = Operation("surprise", SurpriseArgs)


def mask_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """reference.mask_min_p for logits [N, V] float32."""
    if not is_served(logits):
        return reference.mask_min_p(logits, temperature, min_p)
    return _truncated(Truncation.MIN_P, logits, temperature, min_p)


def mask_top_n_sigma(logits: Tensor, num_sigmas: Tensor) -> Tensor:
    """reference.mask_top_n_sigma for logits [N, V] float32."""
    if not is_served(logits):
        return reference.mask_top_n_sigma(logits, num_sigmas)
    return _truncated(Truncation.SIGMAS, logits, torch.ones(len(logits)), num_sigmas)


def mask_typical_p(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> Tensor:
    """reference.mask_typical_p for logits [N, V] float32."""
    if not is_served(logits):
        return reference.mask_typical_p(logits, temperature, typical_p)
    return _truncated(Truncation.TYPICAL_P, logits, temperature, typical_p)


def mask_top_k_top_p(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """reference.mask_top_k_top_p for logits [N, V] float32."""
    if not is_served(logits):
        return reference.mask_top_k_top_p(logits, temperature, top_k, top_p)
    return _truncated(Truncation.TOP_P, logits, temperature, top_p, top_k.to(torch.int64).contiguous())


def mask_xtc(logits: Tensor, temperature: Tensor, threshold: Tensor) -> Tensor:
    """reference.mask_xtc for logits [N, V] float32."""
    if not is_served(logits):
        return reference.mask_xtc(logits, temperature, threshold)
    return _truncated(Truncation.XTC, logits, temperature, threshold)


def mask_surprise(logits: Tensor, temperature: Tensor, mu: Tensor) -> Tensor:
    """reference.mask_surprise for logits [N, V] float32."""
    if not is_served(logits):
        return reference.mask_surprise(logits, temperature, mu)
    return _truncated(Truncation.SURPRISE, logits, temperature, mu)


def surprise(logits: Tensor, token_ids: Tensor, temperature: Tensor) -> Tensor:
    """reference.surprise for logits [N, V] float32. Raises IndexError for a token outside the vocabulary."""
    if not (is_served(logits) and is_plain(token_ids)):
        return reference.surprise(logits, token_ids, temperature)
    bits = empty(logits.shape[:1], torch.float64)
    temperature, token_ids = temperature.double().contiguous(), token_ids.long().contiguous()
    check_columns(logits, temperature, token_ids)
    args = SurpriseArgs(
        logits=logits.data_ptr(), temperature=temperature.data_ptr(), token_ids=token_ids.data_ptr(),
        bits=bits.data_ptr(), num_rows=logits.shape[0], vocab_size=logits.shape[1], stride=logits.stride(0),
    )  # fmt: skip
    if _SURPRISE.run(args) == BAD_ROW:
        raise IndexError(f"a token is outside 0 .. {logits.shape[1] - 1}")
    return bits


OPERATIONS = dict.fromkeys(
    (mask_min_p, mask_surprise, mask_top_k_top_p, mask_top_n_sigma, mask_typical_p, mask_xtc, surprise),
    (torch.float32,),
)


def _truncated(
    kind: Truncation, logits: Tensor, temperature: Tensor, limits: Tensor, top_k: Tensor | None = None
) -> Tensor:
    temperature, limits = temperature.double().contiguous(), limits.double().contiguous()
    check_columns(logits, temperature, limits, *(() if top_k is None else (top_k,)))
    masked = empty(logits.shape, torch.float32)
    args = TruncateArgs(
        logits=logits.data_ptr(), temperature=temperature.data_ptr(), limits=limits.data_ptr(),
        top_k=0 if top_k is None else top_k.data_ptr(), masked=masked.data_ptr(), num_rows=logits.shape[0],
        vocab_size=logits.shape[1], stride=logits.stride(0), filter=kind,
    )  # fmt: skip
    _TRUNCATE_ROWS.run(args)
    return masked
