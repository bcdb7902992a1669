"""Builds the C++ test programs in native/, for the processor family of the library that they test."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from pagewick.kernels.cpu.build import (
    COMPILE_FLAGS,
    SOURCE_DIR,
    VNNI_FLAGS,
    Job,
    compile_objects,
    find_compiler,
    instruction_sets,
    library_jobs,
    run,
)

SOURCES = Path(__file__).parent / "native"
# A separate program, which uses the internals of the thread pool.
POOL_TEST = "test_pool.cpp"
# Takes the place of the kernels of an instruction set.
NO_KERNELS = "no_kernels.cpp"
# The other tests call its functions for every number that they compare.
SUPPORT = "testing.cpp"

# -Og takes a third less time to compile than -O1, and the tests of most kernels run nearly as fast.
TEST_FLAGS = ("-Og",)
# Not optimised: optimising instrumented code takes far longer than running it.
SANITIZE_FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
UNDEFINED_FLAGS = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
THREAD_SANITIZE_FLAGS = ("-O1", "-g", "-fsanitize=thread")
STAND_IN_FLAGS = ("-DPW_STAND_INS", "-include", str(SOURCES / "stand_ins.h"))
# Instruction sets that others stand in for, and the flags that these need besides.
STAND_INS: dict[str, tuple[str, ...]] = {"avx_vnni": VNNI_FLAGS, "amx": ()}
# An Intel processor with AVX-512 BF16 takes the kernels for quantized weights from here (csrc/ops.cpp).
BESIDE_AVX512_BF16 = ("avx512_vnni",)
# The kernels of other sets that experts' products with those in STAND_INS need besides.
BESIDE_STAND_INS = {
    "avx2": ("activation_kernel.cpp", "elementwise_kernel.cpp", "matrix_kernel.cpp", "moe_kernel.cpp"),
    "avx512_bf16": ("activation_kernel.cpp", "elementwise_kernel.cpp", "moe_kernel.cpp"),
}


def build_native_test(output: Path, library: Path, machine: str | None = None) -> None:
    """Compile the C++ test program. It loads the library from its present place."""
    compiler = find_compiler(machine)
    with tempfile.TemporaryDirectory() as directory:
        objects = compile_objects(compiler, _jobs(Path(directory), (*COMPILE_FLAGS, *TEST_FLAGS)))
        library = library.resolve()
        run((compiler, *objects, str(library), f"-Wl,-rpath,{library.parent}", "-pthread", "-o", str(output)))


def build_library_of(output: Path, isas: Collection[str], machine: str) -> None:
    """Compile the library for a processor family with kernels for `isas` only, hardly optimised."""
    compiler = find_compiler(machine)
    with tempfile.TemporaryDirectory() as directory:
        jobs = _jobs_of_library(Path(directory), (*COMPILE_FLAGS, *TEST_FLAGS), isas, machine=machine)
        run((compiler, *compile_objects(compiler, jobs), "-shared", "-pthread", "-o", str(output)))


def build_stand_in_library(output: Path) -> None:
    """Compile a library whose instruction sets in STAND_INS run on any processor with AVX-512 BF16.

    Their kernels are checked for undefined behaviour. Of the others, only those in BESIDE_STAND_INS are there.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as directory:
        jobs = []
        for source, target, flags in _jobs_of_library(Path(directory), COMPILE_FLAGS, STAND_INS, BESIDE_STAND_INS):
            isa = next((isa for isa in STAND_INS if f"-DPW_ISA={isa}" in flags), None)
            own = (*TEST_FLAGS, *UNDEFINED_FLAGS, *STAND_INS[isa]) if isa else ()
            kept = tuple(flag for flag in flags if flag != "-mavxvnni")
            jobs.append((source, target, (*kept, *own, *STAND_IN_FLAGS)))
        objects = compile_objects(compiler, jobs)
        run((compiler, *UNDEFINED_FLAGS, *objects, "-shared", "-pthread", "-o", str(output)))


def build_sanitized_test(output: Path, isas: Collection[str]) -> None:
    """Compile the C++ test program and the library's kernels for `isas` into one sanitized program."""
    compiler = find_compiler()
    flags = (*COMPILE_FLAGS, *SANITIZE_FLAGS)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        objects = compile_objects(compiler, _jobs_of_library(path, flags, isas) + _jobs(path, flags))
        run((compiler, *flags, *objects, "-pthread", "-o", str(output)))


def build_pool_test(output: Path) -> None:
    """Compile the test program of the thread pool and of replays with the thread sanitizer."""
    flags = (*COMPILE_FLAGS, *THREAD_SANITIZE_FLAGS, f"-I{SOURCE_DIR}")
    sources = (SOURCES / POOL_TEST, SOURCE_DIR / "parallel.cpp", SOURCE_DIR / "replay.cpp")
    run((find_compiler(), *flags, *map(str, sources), "-pthread", "-o", str(output)))


def _jobs_of_library(
    directory: Path,
    flags: tuple[str, ...],
    isas: Collection[str],
    others: Mapping[str, Collection[str]] = MappingProxyType({}),
    machine: str = platform.machine(),
) -> list[Job]:
    """List the compiler jobs of a library with all kernels for `isas`, and those in the files `others[isa]` for others.

    The other kernels for the machine's other sets are missing.
    """
    jobs = []
    for job in library_jobs(directory, flags, machine):
        isa = next((flag.partition("=")[2] for flag in job[2] if flag.startswith("-DPW_ISA=")), None)
        if isa is None or isa in isas or job[0].name in others.get(isa, ()):
            jobs.append(job)
    own = (*flags, f"-I{SOURCE_DIR}")
    partial = [isa for isa in instruction_sets(machine) if isa not in isas]
    return jobs + [(SOURCES / NO_KERNELS, directory / f"{isa}.o", (*own, f"-DPW_ISA={isa}")) for isa in partial]


def _jobs(directory: Path, flags: tuple[str, ...]) -> list[Job]:
    """List the compiler jobs of the C++ test program, without the library."""
    sources = [source for source in sorted(SOURCES.glob("*.cpp")) if source.name not in (POOL_TEST, NO_KERNELS)]
    jobs = [(source, directory / f"{source.name}.o", (*flags, f"-I{SOURCE_DIR}")) for source in sources]
    return [(source, target, (*own, "-O2") if source.name == SUPPORT else own) for source, target, own in jobs]
