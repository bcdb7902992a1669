"""The native library of `csrc/`, bound with ctypes: loaded once, or a sentence that says why not.

PAGEWICK_NATIVE=0 turns it off; PAGEWICK_CPU_ISA forces one of INSTRUCTION_SETS that the processor has.
Every operation is one call with a struct of numbers and addresses. Calls can be recorded (recorded_calls.py) and then
repeated all at once; results of calls that are being recorded lie in the memory of the recorded step.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.kernels.cpu.recorded_calls import current
from pagewick.kernels.cpu.structs import ABI_VERSION, OPERATIONS, DType, Status
from pagewick.kernels.kv_cache import INT4
from pagewick.kernels.options import AttentionMetadata
from pagewick.kernels.switches import is_switched_on

LIBRARY_PATH = Path(__file__).parent / "libpagewick_cpu.so"
# The best come last.
INSTRUCTION_SETS = (
    "generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "neon_dotprod", "neon_i8mm",
)  # fmt: skip
DTYPES = {torch.float32: DType.FLOAT32.value, torch.bfloat16: DType.BFLOAT16.value, torch.float16: DType.FLOAT16.value}
# Dtypes that only a KV cache may have; they come with scales.
SCALED_DTYPES = {
    torch.int8: DType.INT8.value,
    torch.float8_e4m3fn: DType.FP8_E4M3.value,
    torch.float8_e5m2: DType.FP8_E5M2.value,
    INT4: DType.INT4.value,
}
CACHE_DTYPES = DTYPES | SCALED_DTYPES
# Plain numbers: comparing the number that an operation returns is faster than looking up a member of an enum.
BAD_LENGTHS, BAD_BLOCK_ID, BAD_ROW = Status.BAD_LENGTHS.value, Status.BAD_BLOCK_ID.value, Status.BAD_ROW.value


class NativeLibrary:
    """The loaded library."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        handle.pw_isa.restype = ctypes.c_char_p
        handle.pw_select_isa.argtypes = [ctypes.c_char_p]
        handle.pw_operation.argtypes = [ctypes.c_char_p]
        handle.pw_run.argtypes = [ctypes.c_int32, ctypes.c_void_p]
        handle.pw_replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        handle.pw_resume.argtypes = handle.pw_replay.argtypes
        handle.pw_stop_ahead.restype = None
        self._handle = handle
        # Takes the number of an operation and the address of its arguments.
        self.run: Callable[[int, int], int] = handle.pw_run
        self.set_num_threads(torch.get_num_threads())

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self._handle.pw_isa()
        return name.decode()

    def supported_isas(self) -> list[str]:
        """List the instruction sets that both this build and this processor have."""
        current = self.isa
        supported = [name for name in INSTRUCTION_SETS if not self._handle.pw_select_isa(name.encode())]
        self._handle.pw_select_isa(current.encode())
        return supported

    def select_isa(self, name: str) -> None:
        """Use another instruction set. No operation may run meanwhile. Raises ConfigError if it is not available."""
        if self._handle.pw_select_isa(name.encode()):
            choices = ", ".join(self.supported_isas())
            raise ConfigError(f"instruction set {name!r} is not available here; choose from: {choices}")

    def set_num_threads(self, num_threads: int) -> None:
        """Use this many threads for an operation, the caller included. Raises ValueError below 1."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._handle.pw_set_num_threads(num_threads)

    def operation(self, name: str) -> int:
        """Return the number of an operation of csrc/ops.cpp."""
        number: int = self._handle.pw_operation(name.encode())
        if number < 0:
            raise ValueError(f"the native library has no operation {name!r}")
        return number

    def replay(self, calls: int, num_calls: int, progress: int | None = None, next_inputs: int | None = None) -> int:
        """Run recorded calls, in order; return the first Status that is not OK, or OK.

        calls: address of an array of them. progress: address of a 64-bit word that each call increases by one.
        next_inputs: address of the struct in NextInputs. If given, a worker then begins to run the calls once more, for
        a few milliseconds at most. Until this process runs, replays or resumes something, or calls stop_ahead, the
        caller must neither change what the calls read nor use what they write.
        """
        status: int = self._handle.pw_replay(calls, num_calls, progress, next_inputs)
        return status

    def resume(self, calls: int, num_calls: int, progress: int | None = None, next_inputs: int | None = None) -> int:
        """Do as `replay` does, but leave out the calls that have run ahead, if these were the last to run ahead."""
        status: int = self._handle.pw_resume(calls, num_calls, progress, next_inputs)
        return status

    def stop_ahead(self) -> None:
        """Stop the calls that run ahead, after the one that is running. They cannot be resumed."""
        self._handle.pw_stop_ahead()


Args = TypeVar("Args", bound=ctypes.Structure)


class Operation(Generic[Args]):
    """An operation of csrc/ops.cpp and the struct that it takes. It is looked up in the library when it first runs."""

    def __init__(self, name: str, args: type[Args]) -> None:
        assert OPERATIONS[name] is args, f"{name} takes {OPERATIONS[name].__name__}"
        self._name = name

    def run(self, args: Args) -> int:
        """Run it, and record it if this thread's calls are being recorded; return a Status."""
        number, run = self._bound
        status = run(number, ctypes.addressof(args))
        if calls := current.calls:
            calls.append(number, args)
        return status

    @functools.cached_property
    def _bound(self) -> tuple[int, Callable[[int, int], int]]:
        native = library()
        assert native is not None, "without it, nothing is dispatched to it"
        return native.operation(self._name), native.run


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory for a result: that of the recorded step if this thread's calls are being recorded."""
    calls = current.calls
    return torch.empty(shape, dtype=dtype) if calls is None else calls.memory.empty(shape, dtype)


def library() -> NativeLibrary | None:
    """Return the native library, or None if it is off. Raises ConfigError for a wrong environment variable."""
    return _loaded()[0]


def status() -> str:
    """Say in one sentence which instruction set is in use, or why the library is off and what to do about it."""
    native, reason = _loaded()
    return f"native kernels: {native.isa}" if native else f"native kernels off: {reason}"


def load() -> tuple[NativeLibrary | None, str]:
    """Load the library as the environment says; return it, or None and the reason. Raises as library() does."""
    if not is_switched_on("PAGEWICK_NATIVE"):
        return None, f"PAGEWICK_NATIVE={os.environ['PAGEWICK_NATIVE']}"
    if not LIBRARY_PATH.exists():
        return None, f"{LIBRARY_PATH.name} not built; run `make install`"
    try:
        handle = ctypes.CDLL(str(LIBRARY_PATH))
        is_ours = _is_of_these_sources(handle)
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY_PATH.name} does not load ({error}); run `make install`"
    if not is_ours:
        return None, f"{LIBRARY_PATH.name} was built from other sources; run `make install`"
    native = NativeLibrary(handle)
    if isa := os.environ.get("PAGEWICK_CPU_ISA"):
        try:
            native.select_isa(isa)
        except ConfigError as error:
            raise ConfigError(f"PAGEWICK_CPU_ISA: {error}") from None
    return native, ""


_loaded = functools.cache(load)


def _is_of_these_sources(handle: ctypes.CDLL) -> bool:
    """Whether the library has all operations of structs.py, with arguments of the same sizes."""
    if handle.pw_abi_version() != ABI_VERSION:
        return False
    numbers = {name: handle.pw_operation(name.encode()) for name in OPERATIONS}
    return min(numbers.values()) >= 0 and all(
        handle.pw_args_size(number) == ctypes.sizeof(OPERATIONS[name]) for name, number in numbers.items()
    )


def is_plain(x: Tensor) -> bool:
    """Whether x needs no gradient, which native operations cannot compute."""
    return not (x.requires_grad and torch.is_grad_enabled())


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first number, or None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x as [rows, H] with unit stride inside a row, and the number of elements from one row to the next."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows, rows.shape[1]


def check_metadata(metadata: AttentionMetadata) -> None:
    """Raise ValueError for tensors that do not fit together or that the library cannot read."""
    block_tables, context_lens, cu_seqlens_q, *_ = metadata
    num_seqs = context_lens.shape[0]
    if block_tables.dim() != 2 or len(block_tables) != num_seqs or cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError("expected block_tables [B, max_blocks], context_lens [B] and cu_seqlens_q [B + 1]")
    tensors = {"block_tables": block_tables, "context_lens": context_lens, "cu_seqlens_q": cu_seqlens_q}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1 or not tensor.is_cpu:
            raise ValueError(f"{name} must be int32 on the CPU with adjacent elements")


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Raise ValueError unless sinks are [num_heads] as the library reads them."""
    if sinks is not None and (
        sinks.shape != (num_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous() or not sinks.is_cpu
    ):
        raise ValueError("sinks must be float32 [H] on the CPU with adjacent elements")
