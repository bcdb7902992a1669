"""The native library of `csrc/`, bound with ctypes: loaded once, or a sentence that says why not.

PAGEWICK_NATIVE=0 turns it off; PAGEWICK_CPU_ISA=generic|avx2|avx512|avx512_bf16|amx|neon forces an instruction set.
Every operation is one call with a struct of numbers and addresses. Calls can be recorded on a Tape, which then runs
them all at once; what they write to is then taken from the tape's own memory.
"""

import ctypes
import functools
import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.kernels.cpu.tape import Tape

LIBRARY_PATH = Path(__file__).parent / "libpagewick_cpu.so"
ABI_VERSION = 12  # kAbiVersion in csrc/kernels.h
INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_bf16", "amx", "neon")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # DType in csrc/kernels.h
# Status in csrc/kernels.h
OK, BAD_LENGTHS, BAD_BLOCK_ID, BAD_ROW = range(4)


class NativeLibrary:
    """The loaded library."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        handle.pw_isa.restype = ctypes.c_char_p
        handle.pw_select_isa.argtypes = [ctypes.c_char_p]
        handle.pw_operation.argtypes = [ctypes.c_char_p]
        handle.pw_run.argtypes = [ctypes.c_int32, ctypes.c_void_p]
        handle.pw_replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._handle = handle
        self._run = handle.pw_run
        # Another thread may run operations of its own meanwhile: they are not this recording's.
        self._recording = threading.local()
        self.set_num_threads(torch.get_num_threads())

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self._handle.pw_isa()
        return name.decode()

    def supported_isas(self) -> list[str]:
        """The instruction sets that both this build and this processor have."""
        current = self.isa
        supported = [name for name in INSTRUCTION_SETS if not self._handle.pw_select_isa(name.encode())]
        self._handle.pw_select_isa(current.encode())
        return supported

    def select_isa(self, name: str) -> None:
        """Use another instruction set, but not while an operation runs. Raises ConfigError if it is not there."""
        if self._handle.pw_select_isa(name.encode()):
            choices = ", ".join(self.supported_isas())
            raise ConfigError(f"instruction set {name!r} is not available here; choose from: {choices}")

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of an operation, the caller included. Raises ValueError below 1."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._handle.pw_set_num_threads(num_threads)

    def operation(self, name: str) -> int:
        """The number of an operation of csrc/ops.cpp."""
        number: int = self._handle.pw_operation(name.encode())
        if number < 0:
            raise ValueError(f"the native library has no operation {name!r}")
        return number

    @property
    def _tape(self) -> Tape | None:
        tape: Tape | None = getattr(self._recording, "tape", None)
        return tape

    def run(self, operation: int, args: ctypes.Structure) -> int:
        """Run an operation now, and record it if a tape is running; returns its Status."""
        status: int = self._run(operation, ctypes.addressof(args))
        if tape := self._tape:
            tape.append(operation, args)
        return status

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a result: the tape's, if one is running."""
        tape = self._tape
        return torch.empty(shape, dtype=dtype) if tape is None else tape.empty(shape, dtype)

    def start_recording(self, tape: Tape) -> None:
        """From now on, calls of this thread are recorded as well as run, until stop_recording."""
        assert self._tape is None, "one tape at a time"
        self._recording.tape = tape

    def stop_recording(self) -> None:
        self._recording.tape = None

    def replay(self, tape: Tape, progress: int | None = None) -> int:
        """Run the recorded calls, in order; returns the first Status that is not OK, or OK.

        progress: address of a 64-bit word to be counted up after every call.
        """
        status: int = self._handle.pw_replay(*tape.calls, progress)
        return status


def library() -> NativeLibrary | None:
    """The native library, or None where it is off. Raises ConfigError for a wrong PAGEWICK_CPU_ISA."""
    return _loaded()[0]


def status() -> str:
    """One sentence: the instruction set in use, or why the library is off and what to do about it."""
    native, reason = _loaded()
    return f"native kernels: {native.isa}" if native else f"native kernels off: {reason}"


def load() -> tuple[NativeLibrary | None, str]:
    """Load the library as the environment says: the library, or None and the reason. Raises as library() does."""
    if os.environ.get("PAGEWICK_NATIVE") == "0":
        return None, "PAGEWICK_NATIVE=0"
    if not LIBRARY_PATH.exists():
        return None, f"{LIBRARY_PATH.name} not built; run `make install`"
    try:
        handle = ctypes.CDLL(str(LIBRARY_PATH))
        version = handle.pw_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY_PATH.name} does not load ({error}); run `make install`"
    if version != ABI_VERSION:
        return None, f"{LIBRARY_PATH.name} was built from other sources; run `make install`"
    native = NativeLibrary(handle)
    if isa := os.environ.get("PAGEWICK_CPU_ISA"):
        try:
            native.select_isa(isa)
        except ConfigError as error:
            raise ConfigError(f"PAGEWICK_CPU_ISA: {error}") from None
    return native, ""


_loaded = functools.cache(load)


def is_plain(x: Tensor) -> bool:
    """Whether x needs no gradient: native operations have none."""
    return not (x.requires_grad and torch.is_grad_enabled())


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x as [rows, H] with unit stride inside a row, and the elements between rows."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows, rows.shape[1]


def check_out(like: Tensor, out: Tensor) -> None:
    """Raises ValueError if `out` cannot take the place of a contiguous tensor like `like`."""
    if out.shape != like.shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {like.dtype} {list(like.shape)}")
