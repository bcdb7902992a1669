"""Launches compiled kernels on tensors in host memory: Triton compiles them for a target, and the PTX is emulated.

PAGEWICK_EMULATE_PTX names the target: sm_80 (also by 1), sm_89 or sm_90.

Triton's own launcher is used as far as the driver, so that a kernel is compiled for the arguments that it gets: for
numbers that are 1 or multiples of 16, and for aligned addresses. Only the assembler is left out.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.triton.ptx.device_memory import DeviceMemory
from tests.kernels.triton.ptx.machine import Launch, run_launch
from tests.kernels.triton.ptx.parsing import Program, parse
from tests.kernels.triton.ptx.sums import check_sums
from tests.kernels.triton.ptx.values import Array, Faulty, width_of

_NAMES = {"1": "sm_80", "sm_80": "sm_80", "sm_89": "sm_89", "sm_90": "sm_90"}
TARGET_NAME = _NAMES[os.environ.get("PAGEWICK_EMULATE_PTX", "1")]
TARGET = GPUTarget("cuda", int(TARGET_NAME.removeprefix("sm_")), 32)
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
_NUMPY_TYPES = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16}
# Tensors that kernels find by addresses in other tensors.
_found_by_address: list[Tensor] = []
# The kernels that were run: each with the number of its launches.
launched: dict[str, int] = {}


class Compiled:
    """A kernel as Triton's launcher calls it. num_specialized: its arguments that are no constants of the compiler."""

    function = None
    packed_metadata = None

    def __init__(self, name: str, text: str, shared_bytes: int, names: Sequence[str], kinds: Sequence[str]) -> None:
        self.name, self.names, self.kinds, self.shared_bytes = name, names, kinds, shared_bytes
        self.program = parse(text)
        check_sums(self.program)
        self.units = {space: _smallest_access(self.program, space) for space in ("global", "shared")}

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.run(*grid, 0, None, None, None, None, None, *arguments)

    def run(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """Run the kernel. The first arguments after the grid are Triton's: a stream, handles and hooks."""
        values = arguments[6:]
        if any(size > most for size, most in zip((x, y, z), _MOST_PROGRAMS, strict=True)):
            raise Faulty(f"no GPU launches {x} x {y} x {z} programs")
        launched[self.name] = launched.get(self.name, 0) + 1
        pairs = [
            (name, kind, value)
            for name, kind, value in zip(self.names, self.kinds, values, strict=True)
            if kind != "constexpr"
        ]
        parameters = [_parameter_bits(kind, value) for _, kind, value in pairs]
        # Triton's own two arguments, which point to memory that no kernel of ours asks for.
        parameters += [np.zeros(1, np.uint64)] * 2
        names = [name for name, _ in self.program.parameters]
        tensors = [(name, value) for name, _, value in pairs if isinstance(value, Tensor)]
        tensors += [("a tensor found by its address", tensor) for tensor in _found_by_address]
        memory = DeviceMemory(tensors, self.units["global"])
        bits = dict(zip(names, parameters, strict=True))
        run_launch(Launch(self.program, (x, y, z), bits, memory, self.shared_bytes, self.units))


def _parameter_bits(kind: str, value: Any) -> Array:
    if isinstance(value, Tensor):
        return np.array([value.data_ptr()], np.uint64)
    if kind in _NUMPY_TYPES:
        number = np.array([value], _NUMPY_TYPES[kind])
        return number.view(f"u{number.dtype.itemsize}")
    return np.array([int(value) & 0xFFFFFFFFFFFFFFFF], np.uint64)


def _smallest_access(program: Program, space: str) -> int:
    """Return the bytes of the smallest access to a kind of memory."""
    widths = [8]
    for each in program.instructions:
        if each.name in ("ld", "st", "atom", "red") and space in each.parts:
            widths.append(width_of(each.type) // 8)
        elif each.name in ("ldmatrix", "stmatrix") and space == "shared":
            widths.append(2)
        elif each.name == "cp" and each.parts[2] in ("ca", "cg"):
            widths.append(4)
    return min(widths)


def compile_kernel(source: ASTSource, options: dict[str, Any]) -> Compiled:
    compiled = triton.compile(source, target=TARGET, options=options)
    return _prepared(compiled.asm["ptx"], compiled.metadata.shared, source)


def _prepared(text: str, shared_bytes: int, source: ASTSource) -> Compiled:
    names = source.fn.arg_names
    return Compiled(source.fn.__name__, text, shared_bytes, names, [source.signature[name] for name in names])


def _compile_for_emulator(self: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
    """In place of JITFunction._do_compile."""
    constants, options, attributes, _ = others
    kernel = compile_kernel(ASTSource(self, signature, constants, attributes), options.__dict__)
    self.device_caches[device][0][key] = kernel
    return kernel


def _without_assembler(*arguments: Any) -> tuple[str, str] | None:
    """Triton asks this hook for a key of what it changes, and calls it to change the stages of a compilation."""
    if not arguments:
        key = "emulated"
        return key, hashlib.sha256(key.encode()).hexdigest()
    stages = arguments[1]
    stages["cubin"] = lambda source, metadata: b""
    return None


def emulate_gpu(patch: Any) -> None:
    """Make Triton launch kernels in the emulator: for tensors on the CPU, which stand for tensors on a GPU.

    patch: pytest's MonkeyPatch.
    """
    gpu = SimpleNamespace(
        get_current_target=lambda: TARGET, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    patch.setattr(driver, "_active", gpu)
    patch.setattr(JITFunction, "_do_compile", _compile_for_emulator)
    patch.setattr(knobs.runtime, "add_stages_inspection_hook", _without_assembler)


@contextmanager
def reachable(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let kernels access tensors whose addresses they read from other tensors."""
    _found_by_address.extend(tensors)
    try:
        yield
    finally:
        del _found_by_address[-len(tensors) :]


def emulate_package(patch: Any) -> None:
    """Make the package choose its kernels for the emulated GPU. patch: pytest's MonkeyPatch."""
    from pagewick.kernels.triton import MODULES, blocks, chunk_launches

    modules = [import_module(f"pagewick.kernels.triton.{name}") for name in MODULES]
    for module in (chunk_launches, *modules):
        if hasattr(module, "target_of"):
            patch.setattr(module, "target_of", lambda device: TARGET_NAME)
    run = blocks._run

    @functools.wraps(run)
    def run_with_layers(variant: Any, block_ids: Tensor, caches: Sequence[Tensor], content: Tensor) -> None:
        with reachable(caches):
            run(variant, block_ids, caches, content)

    patch.setattr(blocks, "_run", run_with_layers)
