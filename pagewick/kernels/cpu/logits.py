"""Whole rows of logits, by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, Operation, empty, is_plain
from pagewick.kernels.cpu.structs import AllowedArgs, ArgmaxArgs, LogSoftmaxArgs, MaskArgs, RankArgs, SampleArgs
from pagewick.kernels.options import DrawOptions

_ARGMAX_ALLOWED = Operation("argmax_allowed", AllowedArgs)
_ARGMAX_ROWS = Operation("argmax_rows", ArgmaxArgs)
_LOG_SOFTMAX_STATS = Operation("log_softmax_stats", LogSoftmaxArgs)
_MASK_ROWS = Operation("mask_rows", MaskArgs)
_RANK_TOKENS = Operation("rank_tokens", RankArgs)
_SAMPLE_TOKENS = Operation("sample_tokens", SampleArgs)
# The dtypes of the columns of DrawOptions.
_DRAW_DTYPES = (torch.float32, torch.float64, torch.int64, torch.float64, torch.float64)


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """reference.argmax_rows for logits [N, V] float32."""
    if not is_served(logits):
        return reference.argmax_rows(logits)
    token_ids, values = empty(logits.shape[:1], torch.int64), empty(logits.shape[:1], torch.float32)
    args = ArgmaxArgs(
        logits=logits.data_ptr(), token_ids=token_ids.data_ptr(), values=values.data_ptr(), num_rows=logits.shape[0],
        vocab_size=logits.shape[1], stride=logits.stride(0),
    )  # fmt: skip
    _ARGMAX_ROWS.run(args)
    return token_ids, values


def argmax_allowed(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """reference.argmax_allowed for logits [N, V] float32. Raises ValueError for masks of another shape."""
    if not (is_served(logits) and _is_mask(masks)):
        return reference.argmax_allowed(logits, masks)
    _check_shape(masks, logits)
    masks, token_ids = masks.contiguous(), empty(logits.shape[:1], torch.int64)
    values, highest = empty(logits.shape[:1], torch.float32), empty(logits.shape[:1], torch.float32)
    args = AllowedArgs(
        logits=logits.data_ptr(), masks=masks.data_ptr(), token_ids=token_ids.data_ptr(), values=values.data_ptr(),
        highest=highest.data_ptr(), num_rows=logits.shape[0], vocab_size=logits.shape[1], stride=logits.stride(0),
        mask_bytes=masks.shape[1],
    )  # fmt: skip
    _ARGMAX_ALLOWED.run(args)
    return token_ids, values, highest


def log_softmax_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """reference.log_softmax_stats for logits [N, V] float32. The order of summation depends on V alone."""
    if not is_served(logits):
        return reference.log_softmax_stats(logits)
    highest, log_sum = empty(logits.shape[:1], torch.float32), empty(logits.shape[:1], torch.float32)
    args = LogSoftmaxArgs(
        logits=logits.data_ptr(), max=highest.data_ptr(), log_sum=log_sum.data_ptr(), num_rows=logits.shape[0],
        vocab_size=logits.shape[1], stride=logits.stride(0),
    )  # fmt: skip
    _LOG_SOFTMAX_STATS.run(args)
    return highest, log_sum


def mask_rows(logits: Tensor, masks: Tensor) -> Tensor:
    """reference.mask_rows for logits [N, V] float32. Raises ValueError for masks of another shape."""
    if not (is_served(logits) and _is_mask(masks)):
        return reference.mask_rows(logits, masks)
    _check_shape(masks, logits)
    masks, masked = masks.contiguous(), empty(logits.shape, torch.float32)
    args = MaskArgs(
        logits=logits.data_ptr(), masks=masks.data_ptr(), masked=masked.data_ptr(), num_rows=logits.shape[0],
        vocab_size=logits.shape[1], stride=logits.stride(0), mask_bytes=masks.shape[1],
    )  # fmt: skip
    _MASK_ROWS.run(args)
    return masked


def sample_tokens(logits: Tensor, draw: DrawOptions, masks: Tensor | None = None) -> Tensor:
    """reference.sample_tokens for logits [N, V] float32, with columns and masks on the CPU.

    The order of summation depends on the row alone. Raises ValueError for columns or masks that do not fit.
    """
    if not (is_served(logits) and (masks is None or _is_mask(masks))):
        return reference.sample_tokens(logits, draw, masks)
    columns = [values.to(dtype).contiguous() for values, dtype in zip(draw, _DRAW_DTYPES, strict=True)]
    check_columns(logits, *columns)
    if masks is not None:
        _check_shape(masks, logits)
        masks = masks.contiguous()
    token_ids = empty(logits.shape[:1], torch.int64)
    temperature, min_p, top_k, top_p, uniform = (values.data_ptr() for values in columns)
    args = SampleArgs(
        logits=logits.data_ptr(), temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, uniform=uniform,
        masks=0 if masks is None else masks.data_ptr(), token_ids=token_ids.data_ptr(), num_rows=logits.shape[0],
        vocab_size=logits.shape[1], stride=logits.stride(0), mask_bytes=0 if masks is None else masks.shape[1],
    )  # fmt: skip
    _SAMPLE_TOKENS.run(args)
    return token_ids


def rank_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """reference.rank_tokens for logits [N, V] float32.

    Raises IndexError for a token outside the vocabulary, ValueError for arguments that do not fit.
    """
    if not (is_served(logits) and is_plain(token_ids)):
        return reference.rank_tokens(logits, token_ids, num_top)
    if token_ids.shape != logits.shape[:1] or not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"no {num_top} tokens beside {list(token_ids.shape)} for logits {list(logits.shape)}")
    token_ids, ranks = token_ids.to(torch.int64).contiguous(), empty(logits.shape[:1], torch.int64)
    top_ids, top_logits = (empty((len(logits), num_top), dtype) for dtype in (torch.int64, torch.float32))
    args = RankArgs(
        logits=logits.data_ptr(), token_ids=token_ids.data_ptr(), ranks=ranks.data_ptr(), top_ids=top_ids.data_ptr(),
        top_logits=top_logits.data_ptr(), num_rows=logits.shape[0], vocab_size=logits.shape[1],
        stride=logits.stride(0), num_top=num_top,
    )  # fmt: skip
    if _RANK_TOKENS.run(args) == BAD_ROW:
        raise IndexError(f"a token is outside 0 .. {logits.shape[1] - 1}")
    return ranks, top_ids, top_logits


OPERATIONS = dict.fromkeys(
    (argmax_allowed, argmax_rows, log_softmax_stats, mask_rows, rank_tokens, sample_tokens), (torch.float32,)
)


def is_served(logits: Tensor) -> bool:
    """Whether the native library reads these logits [N, V]."""
    is_matrix = logits.dim() == 2 and logits.shape[1] > 0 and logits.stride(1) == 1
    return is_matrix and logits.dtype == torch.float32 and is_plain(logits)


def check_columns(logits: Tensor, *columns: Tensor) -> None:
    """Raise ValueError unless each column has a number for each row of logits [N, V]."""
    if any(values.shape != logits.shape[:1] for values in columns):
        raise ValueError(f"parameters must be [{len(logits)}], not {[list(values.shape) for values in columns]}")


def _is_mask(masks: Tensor) -> bool:
    return masks.dtype == torch.uint8 and is_plain(masks)


def _check_shape(masks: Tensor, logits: Tensor) -> None:
    wanted = [len(logits), -(-logits.shape[1] // 8)]
    if list(masks.shape) != wanted:
        raise ValueError(f"masks must be {wanted}, not {list(masks.shape)}")
