"""Recorded steps: run a function once and record its native operations, then repeat them with a single call.

As with CUDA graphs, a repetition reads and writes the same memory as the first run, so inputs that change from step to
step have to lie in tensors that stay where they are. Unlike a CUDA graph, `record` notices what cannot be recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewick.kernels import cpu
from pagewick.kernels.cpu.binding import NativeLibrary
from pagewick.kernels.cpu.recorded_calls import NextInputs, RecordedCalls, StepMemory, recording

__all__ = ["NextInputs", "RecordedStep", "StepMemory", "can_record", "record", "stop_ahead"]

# These give memory another shape and compute nothing.
_VIEWS = frozenset({
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
})  # fmt: skip
# These return a view where they can, and a copy where they must.
_VIEWS_OR_COPIES = frozenset({"contiguous", "flatten", "reshape", "to"})


class RecordedStep:
    """The native calls of a function, ready to be repeated; see record()."""

    def __init__(self, native: NativeLibrary, calls: RecordedCalls) -> None:
        self._native = native
        self._calls = calls
        self._array = calls.array()
        self._address = ctypes.addressof(self._array)

    def replay(self, progress: int | None = None, next_inputs: NextInputs | None = None) -> None:
        """Repeat the calls; the results lie where the first ones did.

        progress: address of a 64-bit word that is increased by one after every call. next_inputs: if given, the inputs
        are then set to the next ones, and the calls begin to run once more, beside the caller. Until `resume`, `replay`
        of any step, another native operation or `stop_ahead`, the inputs must stay as they are, the results must not be
        read, and the tensors that the calls use must exist. Raises RuntimeError if an operation rejects its arguments.
        """
        self._check(self._native.replay(self._address, len(self._array), progress, _address(next_inputs)))

    def resume(self, progress: int | None = None, next_inputs: NextInputs | None = None) -> None:
        """Do as `replay` does, but only with the calls that have not run ahead; with all if another step came between.

        The inputs must be those that the last `replay` or `resume` of this step has set.
        """
        self._check(self._native.resume(self._address, len(self._array), progress, _address(next_inputs)))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"a recorded operation failed with status {status}")


def _address(next_inputs: NextInputs | None) -> int | None:
    return None if next_inputs is None else next_inputs.address


def stop_ahead() -> None:
    """Stop the step that runs ahead, if any."""
    if (native := cpu.library()) is not None:
        native.stop_ahead()


def can_record(device: torch.device) -> bool:
    """Whether steps can be recorded on this device."""
    return device.type == "cpu" and cpu.library() is not None


def record(function: Callable[[], Sequence[Tensor]], memory: StepMemory) -> tuple[Sequence[Tensor], RecordedStep | str]:
    """Call `function` and record its native operations; its results lie in `memory` until others overwrite them.

    Returns the results, and the recorded step, or the name of the PyTorch operation that prevented it: only views and
    native operations can be recorded. Keeping the results takes up no memory, since later steps may reuse it.
    """
    native = cpu.library()
    assert native is not None, "ask can_record first"
    observer = _Observer()
    with recording(memory) as calls, observer:
        results = function()
    if observer.foreign:
        return results, observer.foreign
    return [memory.give_back(result) for result in results], RecordedStep(native, calls)


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the first PyTorch operation that computes something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign = ""


def _observe(self: _Observer, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    result = func(*args, **(kwargs or {}))
    name = func.overloadpacket.__name__
    if not self.foreign and name not in _VIEWS:
        is_copy = name not in _VIEWS_OR_COPIES
        if is_copy or result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            self.foreign = name
    return result


# If this were a method, PyTorch would wrap it in something that imports its compiler: two seconds at the first token.
_Observer.__torch_dispatch__ = _observe  # type: ignore[method-assign, assignment]
