"""Activation functions by the native library."""

from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import DTYPES, Operation, as_rows, empty, is_plain
from pagewick.kernels.cpu.structs import Activation, ActivationArgs

KINDS = {kind.name.lower(): kind.value for kind in Activation}

_ACTIVATION = Operation("activation", ActivationArgs)


def activation(x: Tensor, kind: str) -> Tensor:
    """reference.activation for x [..., I]. Raises ValueError for another dtype than the library's."""
    if not _is_served(x):
        return reference.activation(x, kind)
    return _run(x, kind, x.shape[-1], is_gated=False)


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """reference.gated_activation for x [..., 2 * I]: [..., I].

    Raises ValueError for another dtype than the library's and for an x that has no two halves.
    """
    if not _is_served(x):
        return reference.gated_activation(x, kind)
    if x.shape[-1] % 2:
        raise ValueError(f"x {list(x.shape)} has no two halves")
    return _run(x, kind, x.shape[-1] // 2, is_gated=True)


OPERATIONS = dict.fromkeys((activation, gated_activation), DTYPES)


def _is_served(x: Tensor) -> bool:
    return x.numel() > 0 and is_plain(x)


def _run(x: Tensor, kind: str, size: int, *, is_gated: bool) -> Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"no native activation of {x.dtype}")
    out = empty((*x.shape[:-1], size), x.dtype)
    rows, stride = as_rows(x)
    args = ActivationArgs(
        x=rows.data_ptr(), out=out.data_ptr(), num_rows=len(rows), size=size, x_stride=stride, dtype=DTYPES[x.dtype],
        kind=KINDS[kind], is_gated=is_gated,
    )  # fmt: skip
    _ACTIVATION.run(args)
    return out
