"""Chooses the implementation of an operation, once for each device and dtype, and logs the choice.

An operation is defined in `reference`, in plain PyTorch. A backend is a package with faster functions of the same names
and signatures. An operation's first argument is a tensor, given by position; its device and dtype decide. A backend's
function itself calls the reference for arguments that it cannot serve for other reasons (they need a gradient, say).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from pagewick.log import get_logger

_logger = get_logger(__name__)
_CPU = torch.device("cpu")

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]


@dataclass(frozen=True)
class WeightLayout:
    """The layout in memory that a backend wants for the weights of its products.

    packed_shape(num_rows, num_columns, dtype): the shape of a packed weight, which is created with zeros.
    pack_rows(rows, weight, first_row): stores rows [n, num_columns] of the same dtype in such a weight.
    """

    packed_shape: Callable[[int, int, torch.dtype], tuple[int, ...]]
    pack_rows: Callable[[Tensor, Tensor, int], None]


@dataclass(frozen=True)
class QuantizedLayout:
    """The layout in memory that a backend wants for quantized weights of a format.

    packed_shape(num_rows, num_columns): the shape of a packed weight, bytes that are created as zeros.
    pack_rows(rows, weight, first_row): stores rows of blocks [n, bytes] in such a weight.
    row_scales(weight, num_columns): the scales [num_rows] of a packed weight in FP8 whose rows have one each, if
    products want to know it. None: they do not.
    """

    packed_shape: Callable[[int, int], tuple[int, ...]]
    pack_rows: Callable[[Tensor, Tensor, int], None]
    row_scales: Callable[[Tensor, int], Tensor | None] | None = None


@dataclass(frozen=True)
class Backend:
    """A package of faster operations.

    operations: by name. supports(operation, device_kind, dtype): whether it serves such tensors here and now;
    device_kind is a torch.device.type. weights: the layout that `linear` and `grouped_linear` want, unless that is
    [num_rows, num_columns]. quantized_weights: by format, the layout that `quantized_linear` wants, unless that is the
    file's.
    """

    name: str
    operations: Mapping[str, Function]
    supports: Callable[[str, str, torch.dtype], bool]
    weights: WeightLayout | None = None
    quantized_weights: Mapping[str, QuantizedLayout] = field(default_factory=dict)


class Table:
    """The operations, each dispatched to the first of `backends` that supports it, or else to its definition."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self._choices: dict[str, _Choices] = {}
        self._logged: set[tuple[str, torch.dtype]] = set()

    def operation(self, definition: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls the implementation for the device and dtype of its first argument."""
        choices = self._choices[definition.__name__] = _Choices(self, definition)

        @functools.wraps(definition)
        def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
            x: Any = args[0]
            # Making a torch.device takes longer than asking whether it is the CPU.
            function = choices[x.dtype if x.is_cpu else (x.device, x.dtype)]
            return function(*args, **kwargs)  # type: ignore[no-any-return]

        return dispatched

    def backend(self, operation: str, device_kind: str, dtype: torch.dtype) -> Backend | None:
        """Return the backend that serves an operation; None: the reference does."""
        for backend in self.backends:
            if operation in backend.operations and backend.supports(operation, device_kind, dtype):
                return backend
        return None

    def choose(self, definition: Function, device_kind: str, dtype: torch.dtype) -> Function:
        """Return the implementation of a definition. The first call for a device and dtype logs all choices for it."""
        if (device_kind, dtype) not in self._logged:
            self._logged.add((device_kind, dtype))
            _logger.debug("%s", self._sentence(device_kind, dtype))
        backend = self.backend(definition.__name__, device_kind, dtype)
        return definition if backend is None else backend.operations[definition.__name__]

    def choose_again(self) -> None:
        """Forget all choices. To be called after switching a backend on or off."""
        for choices in self._choices.values():
            choices.clear()
        self._logged.clear()

    def _sentence(self, device_kind: str, dtype: torch.dtype) -> str:
        served: dict[str, list[str]] = {}
        for name in sorted(self._choices):
            backend = self.backend(name, device_kind, dtype)
            served.setdefault("the reference" if backend is None else backend.name, []).append(name)
        if len(served) == 1:
            return f"kernels for {dtype} on {device_kind}: {next(iter(served))} serves everything"
        parts = [f"{backend} serves {', '.join(names)}" for backend, names in served.items()]
        return f"kernels for {dtype} on {device_kind}: " + "; ".join(parts)


class _Choices(dict[Any, Function]):
    """Functions by dtype for tensors on the CPU, and by device and dtype for others. Missing ones are chosen."""

    def __init__(self, table: Table, definition: Function) -> None:
        super().__init__()
        self._table = table
        self._definition = definition

    def __missing__(self, key: Any) -> Function:
        device, dtype = key if isinstance(key, tuple) else (_CPU, key)
        function = self[key] = self._table.choose(self._definition, device.type, dtype)
        return function
