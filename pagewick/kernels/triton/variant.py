"""Variant: one way in which a kernel is compiled. All variants of a module can be compiled ahead, without a GPU.

A target is a family of GPUs that share an instruction set and the size of shared memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from pagewick.kernels.triton.launcher import Launcher

TARGETS = ("sm_80", "sm_89", "sm_90", "gfx942")
# Bytes of shared memory that a program may use on each target.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
# Triton's names of dtypes; fp8 is read as bytes' own types, which every target can convert.
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
# The first version of Triton that has a fence wherever products need one: see lacks_fences.
_FENCES_SINCE = (3, 7, 1)


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments and its constants.

    signature: Triton's type of every argument that is no constant, in the kernel's order: "*bf16", "i32", "fp32". Such
    pointers are multiples of 16 bytes; ":16" after "i32" says that a number is one of 16. num_stages: how many
    iterations of a loop may load at once. uses_tensor_cores: whether its products must be instructions of tensor cores.
    in_sample: whether every run of the tests compiles it. targets: those on which it is chosen. fuses: whether the
    compiler may fuse a multiplication and an addition. Then a sum's bits depend on the code around it; and a thread
    that adds its own product to another one's rounds only the other's, so that threads get different sums of a row.
    max_registers: of a thread, which the assembler must keep to; 0: it chooses. Only for targets of NVIDIA.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    uses_tensor_cores: bool = False
    in_sample: bool = False
    targets: tuple[str, ...] = TARGETS
    fuses: bool = True
    max_registers: int = 0

    def launch(self, grid: tuple[int, ...], **arguments: Any) -> None:
        """Run the kernel. grid: the number of programs in one to three dimensions; arguments: those of signature."""
        if 0 in grid:
            return
        try:
            self._launcher.launch(grid, arguments)
        except Exception as error:
            # Triton raises exceptions of many kinds, and none of them names our switch.
            error.add_note(
                f"Triton could not compile or start Pagewick's kernel {self.name!r} on this GPU. PAGEWICK_TRITON=0 "
                "leaves out all such kernels; please report it (docs/gpu.md)."
            )
            raise

    @functools.cached_property
    def _launcher(self) -> Launcher:
        options = self.options
        # A kernel that is interpreted has no parameters, and no target.
        if self.uses_tensor_cores and hasattr(self.kernel, "params"):
            options = self.options_on(import_module("triton.runtime").driver.active.get_current_target())
        return Launcher(self.kernel, self.signature, self.constexprs, options)

    @property
    def options(self) -> dict[str, Any]:
        """How Triton is to compile the kernel."""
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fuses, **limit}

    def options_on(self, target: Any) -> dict[str, Any]:
        """Return how Triton is to compile the kernel for a GPUTarget of its own."""
        has_one_stage = self.uses_tensor_cores and lacks_fences(target, import_module("triton").__version__)
        return {**self.options, "num_stages": 1} if has_one_stage else self.options


@dataclass(frozen=True)
class Workload:
    """A call of an operation in a real model, for its limit on paper.

    num_bytes: read and written, each once. num_operations: additions and multiplications; on_tensor_cores: whether
    tensor cores do them.
    """

    operation: str
    shape: str
    num_bytes: int
    num_operations: int
    on_tensor_cores: bool = True


def lacks_fences(target: Any, version: str) -> bool:
    """Whether products may read stale numbers on a GPUTarget if a version of Triton lets loops load ahead.

    From compute capability 9 on, tensor cores read shared memory by a path of their own, PTX's async proxy; those of 12
    do not. A loop that loads ahead copies there by cp.async, which takes the other path, so that a fence must come
    before the product. Triton 3.7.0 and older leave it out (https://github.com/triton-lang/triton/pull/9610). With one
    stage, numbers go through registers, and these versions have a fence behind that.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    is_old = found is not None and tuple(map(int, found.groups())) < _FENCES_SINCE
    return is_old and target.backend == "cuda" and 90 <= target.arch < 120


@functools.cache
def target_of(device: torch.device) -> str:
    """Return the target whose variants run on a device; on a CPU, where kernels are interpreted, that is sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    capability = torch.cuda.get_device_capability(device)
    # GPUs of capability 8.6 and 12.0 have as much shared memory as those of 8.9.
    if capability == (8, 0):
        return "sm_80"
    return "sm_90" if capability[0] in (9, 10) else "sm_89"
