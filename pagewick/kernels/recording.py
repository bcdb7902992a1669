"""Recording of native operations: run a function once, then repeat what it did with one call.

As with CUDA graphs, a repetition reads and writes the same memory as the first run: what changes from one to the next
has to lie in tensors that stay where they are. Unlike there, what cannot be recorded is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewick.kernels import cpu
from pagewick.kernels.cpu.binding import NativeLibrary
from pagewick.kernels.cpu.tape import Tape, TapeMemory, start_recording, stop_recording

# They give another shape to memory, and compute nothing.
_VIEWS = frozenset({
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
})  # fmt: skip
# They do the same where they can, and copy where they must.
_VIEWS_OR_COPIES = frozenset({"contiguous", "flatten", "reshape", "to"})


__all__ = ["Recording", "TapeMemory", "can_record", "record"]


class Recording:
    """What a function did, to be repeated; see record()."""

    def __init__(self, native: NativeLibrary, tape: Tape) -> None:
        self._native = native
        self._tape = tape

    def replay(self, progress: int | None = None) -> None:
        """Do it again; the results lie where the first ones did.

        progress: address of a 64-bit word to be counted up after every operation. Raises RuntimeError
        if an operation refuses what it finds.
        """
        if status := self._native.replay(self._tape, progress):
            raise RuntimeError(f"a recorded operation failed with status {status}")


def can_record(device: torch.device) -> bool:
    """Whether anything can be recorded on this device."""
    return device.type == "cpu" and cpu.library() is not None


def record(function: Callable[[], Sequence[Tensor]], memory: TapeMemory) -> tuple[Sequence[Tensor], Recording | str]:
    """Call `function` and record its native operations; results lie in `memory`, until others overwrite them.

    Returns its results, and the recording, or the name of a PyTorch operation that kept it from being one: only views
    and native operations can be recorded. To keep the results takes up no memory: later recordings use it, too.
    """
    native = cpu.library()
    assert native is not None, "ask can_record first"
    tape, observer = Tape(memory), _Observer()
    start_recording(tape)
    try:
        with observer:
            results = function()
    finally:
        stop_recording()
    if observer.foreign:
        return results, observer.foreign
    return [memory.give_back(result) for result in results], Recording(native, tape)


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the first PyTorch operation that computes something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign = ""


def _observe(self: _Observer, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    result = func(*args, **(kwargs or {}))
    if not self.foreign and not _is_view(name := func.overloadpacket.__name__, args, result):
        self.foreign = name
    return result


# Within the class, PyTorch would wrap it in something that imports its compiler: two seconds at the first token.
_Observer.__torch_dispatch__ = _observe  # type: ignore[method-assign, assignment]


def _is_view(name: str, args: Any, result: Any) -> bool:
    if name in _VIEWS_OR_COPIES:
        return bool(result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())
    return name in _VIEWS
