"""Compiles the Triton kernels for GPUs that are not here, and shows the resources that each variant needs there.

    python -m benchmarks.gpu_kernels                       a table of all variants
    python -m benchmarks.gpu_kernels --module norm --sample --json    those that every test run compiles, as JSON
    python -m benchmarks.gpu_kernels --write               writes the tables of docs/gpu.md

Needs Triton, but no GPU: its wheel contains the assemblers. triton.compile is no stable interface; only compile_variant
calls it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewick.kernels.triton import MODULES
from pagewick.kernels.triton.variant import SHARED_BYTES, Variant


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of a GPU's multiprocessor (a compute unit of AMD's) that decide how many programs run on it at once.

    num_registers: of 32 bits, in the whole; they are given to a warp in multiples of register_unit per thread.
    """

    arch: Any
    warp_size: int
    num_warps: int
    num_registers: int
    register_unit: int
    shared_bytes: int
    tensor_instructions: tuple[str, ...]


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; a program's shared memory costs 1 KiB
# more than it asks for. AMD CDNA 3 ISA guide: 512 vector registers a lane for each of the 4 SIMD units, 8 waves each.
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(80, 32, 64, 65536, 8, 164 * 1024, ("mma.sync",)),
    "sm_89": Multiprocessor(89, 32, 48, 65536, 8, 100 * 1024, ("mma.sync",)),
    "sm_90": Multiprocessor(90, 32, 64, 65536, 8, 228 * 1024, ("wgmma.mma_async", "mma.sync")),
    "gfx942": Multiprocessor("gfx942", 64, 32, 131072, 8, 64 * 1024, ("v_mfma",)),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Needs of a compiled variant. num_spills: bytes of a thread's stack (NVIDIA), or spilled registers (AMD).

    occupancy: the share of a multiprocessor's warps that can be resident at once.
    """

    module: str
    variant: str
    target: str
    num_registers: int
    num_spills: int
    shared_bytes: int
    num_warps: int
    uses_tensor_cores: bool
    occupancy: float

    def faults(self, variant: Variant) -> list[str]:
        """Say in sentences which limits the variant breaks on this target."""
        found = []
        if self.num_spills:
            found.append(f"{self.variant} spills registers on {self.target}")
        if self.shared_bytes > SHARED_BYTES[self.target]:
            found.append(f"{self.variant} needs {self.shared_bytes} bytes of shared memory on {self.target}")
        if variant.uses_tensor_cores and not self.uses_tensor_cores:
            found.append(f"{self.variant} does not use tensor cores on {self.target}")
        return found


def variants_of(module: str, *, sample_only: bool) -> list[Variant]:
    """Return the variants of a module of kernels. Imports Triton."""
    found = importlib.import_module(f"pagewick.kernels.triton.{module}").VARIANTS
    return [variant for variant in found if variant.in_sample or not sample_only]


def compile_variant(module: str, variant: Variant, target: str) -> Resources:
    """Compile a variant for a target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    processor = MULTIPROCESSORS[target]
    is_amd = target.startswith("gfx")
    names = variant.kernel.arg_names
    signature = dict.fromkeys(names, "constexpr")
    attributes = {}
    for name, kind in variant.signature.items():
        signature[name], _, divisor = kind.partition(":")
        if divisor or kind.startswith("*"):
            attributes[(names.index(name),)] = [["tt.divisibility", 16]]
    missing = set(names) - set(variant.signature) - set(variant.constexprs)
    if missing:
        raise ValueError(f"{variant.name} lacks {', '.join(sorted(missing))}")
    source = ASTSource(variant.kernel, signature, dict(variant.constexprs), attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    gpu = GPUTarget("hip" if is_amd else "cuda", processor.arch, processor.warp_size)
    compiled = triton.compile(source, target=gpu, options=options)
    assembly: str = compiled.asm["amdgcn" if is_amd else "ptx"]
    registers, spills = _amd_registers(assembly) if is_amd else _nvidia_registers(compiled.asm["cubin"])
    shared = int(compiled.metadata.shared)
    return Resources(
        module=module,
        variant=variant.name,
        target=target,
        num_registers=registers,
        num_spills=spills,
        shared_bytes=shared,
        num_warps=variant.num_warps,
        uses_tensor_cores=any(name in assembly for name in processor.tensor_instructions),
        occupancy=occupancy(processor, registers, shared, variant.num_warps),
    )


def occupancy(processor: Multiprocessor, num_registers: int, shared_bytes: int, num_warps: int) -> float:
    """Return the share of a multiprocessor's warps that are resident if nothing but its size limits a kernel."""
    rounded = -(-max(1, num_registers) // processor.register_unit) * processor.register_unit
    by_registers = processor.num_registers // (rounded * processor.warp_size * num_warps)
    extra = 0 if isinstance(processor.arch, str) else 1024
    by_shared = processor.shared_bytes // max(1, shared_bytes + extra)
    return num_warps * min(by_registers, by_shared, processor.num_warps // num_warps) / processor.num_warps


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of its stack, to which registers are spilled."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    fields = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown))
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])


def _amd_registers(assembly: str) -> tuple[int, int]:
    """Return the vector registers of a lane, accumulators included, and the registers that are spilled."""
    fields = dict(re.findall(r"\.(vgpr_count|agpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", assembly))
    return int(fields["vgpr_count"]), int(fields["vgpr_spill_count"]) + int(fields["sgpr_spill_count"])


def compile_all(modules: tuple[str, ...], *, sample_only: bool) -> Iterator[tuple[Resources, list[str]]]:
    """Yield the resources of each variant of some modules on each of its targets, and the limits that it breaks."""
    for module in modules:
        for variant in variants_of(module, sample_only=sample_only):
            for target in variant.targets:
                resources = compile_variant(module, variant, target)
                yield resources, resources.faults(variant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=MODULES, help="only this module; repeatable")
    parser.add_argument("--sample", action="store_true", help="only the variants that every run of the tests compiles")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    # The interpreter's functions cannot be compiled; and nothing is left behind.
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        found_faults = False
        for resources, faults in compile_all(tuple(arguments.module or MODULES), sample_only=arguments.sample):
            found_faults |= bool(faults)
            if arguments.json:
                print(json.dumps({**asdict(resources), "faults": faults}), flush=True)
            else:
                print(resources, *faults, flush=True)
    sys.exit(1 if found_faults and not arguments.json else 0)


if __name__ == "__main__":
    main()
