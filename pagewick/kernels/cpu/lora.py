"""Adapters of linear layers by the native library."""

from __future__ import annotations

from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, Operation, as_rows, empty
from pagewick.kernels.cpu.moe import linear_args
from pagewick.kernels.cpu.recorded_calls import current
from pagewick.kernels.cpu.structs import AddLowRankArgs
from pagewick.kernels.options import StoredExperts

_ADD_LOW_RANK = Operation("add_low_rank", AddLowRankArgs)


def add_low_rank(y: Tensor, x: Tensor, down: StoredExperts, up: StoredExperts, adapter_ids: Tensor) -> Tensor:
    """reference.add_low_rank with packed weights: a row has the same bits whatever other rows there are.

    y is overwritten, except in a recorded step, whose operations must not change what they read: they may run twice.
    Raises ValueError as it does, and IndexError for an id that is no adapter's.
    """
    if not (down.is_packed and up.is_packed):
        return reference.add_low_rank(y, x, down, up, adapter_ids)
    if y.shape != (len(x), up.num_rows) or y.dtype != x.dtype or up.num_experts != down.num_experts:
        raise ValueError(f"y {y.dtype} {list(y.shape)} must be {x.dtype} {[len(x), up.num_rows]}")
    ids = adapter_ids.unsqueeze(1)
    inner, change = empty((len(x), down.num_rows), x.dtype), empty((len(x), up.num_rows), x.dtype)
    x, _ = as_rows(x)
    y, _ = as_rows(y)
    out = y if current.calls is None and y.is_contiguous() else empty((len(x), up.num_rows), x.dtype)
    args = AddLowRankArgs(
        down=linear_args(x, down, None, ids, inner, None), up=linear_args(inner, up, None, ids, change, None),
        y=y.data_ptr(), out=out.data_ptr(), y_stride=y.stride(0),
    )  # fmt: skip
    if _ADD_LOW_RANK.run(args) == BAD_ROW:
        raise IndexError(f"an adapter id is outside 0 .. {down.num_experts - 1}")
    return out


OPERATIONS = {add_low_rank: DTYPES}
