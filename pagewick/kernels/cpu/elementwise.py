"""Sums, products with a number and soft caps by the native library."""

from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import DTYPES, Operation, address, as_rows, empty, is_plain
from pagewick.kernels.cpu.structs import Elementwise, ElementwiseArgs

_ELEMENTWISE = Operation("elementwise", ElementwiseArgs)
_KINDS = {kind.name.lower(): kind.value for kind in Elementwise}


def add(a: Tensor, b: Tensor) -> Tensor:
    """reference.add for a, b [..., H]. Raises ValueError for tensors that do not fit together."""
    if not _is_served(a) or b.dtype != a.dtype or not is_plain(b):
        return reference.add(a, b)
    return _run("add", a, b, 0.0)


def scale(x: Tensor, factor: float) -> Tensor:
    """reference.scale for x [..., H]. Raises ValueError for another dtype than the library's."""
    return _run("scale", x, None, factor) if _is_served(x) else reference.scale(x, factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """reference.soft_cap for x [..., H]; relative error below 2^-20.

    Raises ValueError for another dtype than the library's.
    """
    return _run("soft_cap", x, None, cap) if _is_served(x) else reference.soft_cap(x, cap)


OPERATIONS = dict.fromkeys((add, scale, soft_cap), DTYPES)


def _is_served(x: Tensor) -> bool:
    return x.numel() > 0 and is_plain(x)


def _run(kind: str, x: Tensor, other: Tensor | None, factor: float) -> Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"no native {kind} of {x.dtype}")
    if other is not None and other.shape != x.shape:
        raise ValueError(f"{list(x.shape)} and {list(other.shape)} do not fit together")
    out = empty(x.shape, x.dtype)
    rows, stride = as_rows(x)
    other_rows, other_stride = (None, 0) if other is None else as_rows(other)
    args = ElementwiseArgs(
        x=rows.data_ptr(), other=address(other_rows), out=out.data_ptr(), num_rows=rows.shape[0], size=rows.shape[1],
        x_stride=stride, other_stride=other_stride, factor=factor, dtype=DTYPES[x.dtype], kind=_KINDS[kind],
    )  # fmt: skip
    _ELEMENTWISE.run(args)
    return out
