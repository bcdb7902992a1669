"""Compiles the Triton kernels for GPUs that are not here, and shows the resources that each variant needs there.

    python -m benchmarks.gpu_kernels                       a table of all variants
    python -m benchmarks.gpu_kernels --module norm --sample --json    those that every test run compiles, as JSON;
                                                                      each of them for one of its targets
    python -m benchmarks.gpu_kernels --write               writes the tables of docs/gpu.md

Needs Triton, but no GPU: its wheel contains the assemblers. triton.compile is no stable interface; only compile_variant
calls it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewick.kernels.triton import MODULES
from pagewick.kernels.triton.variant import SHARED_BYTES, Variant, Workload


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


# NVIDIA's assembler spills a few registers of its own accord where that makes room for more warps.
TOLERATED_SPILLS = 16


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
        if self.num_spills > TOLERATED_SPILLS:
            found.append(f"{self.variant} spills registers ({self.num_spills}) on {self.target}")
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
    gpu = GPUTarget("hip" if is_amd else "cuda", processor.arch, processor.warp_size)
    compiled = triton.compile(source, target=gpu, options=variant.options_on(gpu))
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
    """Return the vector registers of a lane, accumulators included, and how many of them are spilled.

    Scalar registers are spilled to lanes of vector registers, not to memory, and are not counted.
    """
    fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly))
    return int(fields["vgpr_count"]), int(fields["vgpr_spill_count"])


def compile_all(modules: tuple[str, ...], *, sample_only: bool, in_turn: bool) -> Iterator[tuple[Resources, list[str]]]:
    """Yield the resources of each variant of some modules on each of its targets, and the limits that it breaks.

    in_turn: take one target for each variant, the first, the second, and so on.
    """
    number = itertools.count()
    for module in modules:
        for variant in variants_of(module, sample_only=sample_only):
            for target in (variant.targets[next(number) % len(variant.targets)],) if in_turn else variant.targets:
                resources = compile_variant(module, variant, target)
                yield resources, resources.faults(variant)


# Bytes and operations (dense, bfloat16) a second, from the data sheets of the SXM modules and of the RTX 4090.
GPUS = {
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "A100": (2.039e12, 312e12),
    "RTX 4090": (1.008e12, 165.2e12),
}
DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"


def workloads_of(module: str) -> tuple[Workload, ...]:
    """Return the calls whose limits are shown. Imports Triton."""
    found: tuple[Workload, ...] = getattr(importlib.import_module(f"pagewick.kernels.triton.{module}"), "WORKLOADS", ())
    return found


def limit_seconds(work: Workload, gpu: str) -> float:
    """Return the least time of a call on a GPU; without tensor cores, only its bytes count."""
    bandwidth, rate = GPUS[gpu]
    return max(work.num_bytes / bandwidth, work.num_operations / rate if work.on_tensor_cores else 0.0)


def resources_table(found: Sequence[Resources]) -> str:
    """Return the resources as a Markdown table: one line for each variant and target."""
    lines = ["| module | variant | target | registers | shared memory | occupancy |", "|---|---|---|---|---|---|"]
    for each in found:
        name = each.variant.removesuffix(f" {each.target}")
        numbers = f"{each.num_registers} | {each.shared_bytes / 1024:.1f} KiB | {each.occupancy:.0%}"
        lines.append(f"| {each.module} | {name} | {each.target} | {numbers} |")
    return "\n".join(lines)


def limits_table(works: Sequence[Workload]) -> str:
    """Return the limits of calls as a Markdown table."""
    lines = [f"| operation | call | MB | GFLOP | {' | '.join(GPUS)} |", "|---|---|---|---|" + "---|" * len(GPUS)]
    for work in works:
        amounts = f"{work.num_bytes / 1e6:,.1f} | {work.num_operations / 1e9:,.2f}"
        times = " | ".join(f"{1e6 * limit_seconds(work, gpu):,.1f} µs" for gpu in GPUS)
        lines.append(f"| {work.operation} | {work.shape} | {amounts} | {times} |")
    return "\n".join(lines)


def with_table(document: str, name: str, table: str) -> str:
    """Return a document with a table between its marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document lacks {begin} and {end}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def write_document(found: Sequence[Resources]) -> None:
    """Write the tables of docs/gpu.md."""
    works = [work for module in MODULES for work in workloads_of(module)]
    text = with_table(DOCUMENT.read_text(encoding="utf-8"), "resources", resources_table(found))
    DOCUMENT.write_text(with_table(text, "limits", limits_table(works)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=MODULES, help="only this module; repeatable")
    parser.add_argument("--sample", action="store_true", help="only the variants that every run of the tests compiles")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/gpu.md, of the sample")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    # The interpreter's functions cannot be compiled; and nothing is left behind.
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        found_faults, found = False, []
        sample_only = arguments.sample or arguments.write
        for resources, faults in compile_all(
            tuple(arguments.module or MODULES), sample_only=sample_only, in_turn=arguments.sample
        ):
            found_faults |= bool(faults)
            found.append(resources)
            if arguments.json:
                print(json.dumps({**asdict(resources), "faults": faults}), flush=True)
            else:
                print(resources, *faults, flush=True)
        if arguments.write:
            write_document(found)
    sys.exit(1 if found_faults and not arguments.json else 0)


if __name__ == "__main__":
    main()
