"""Builds the C++ test programs in native/, for the processor family of the library that they test."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Collection
from pathlib import Path

from pagewick.kernels.cpu.build import (
    COMPILE_FLAGS,
    SOURCE_DIR,
    VNNI_FLAGS,
    Job,
    compile_objects,
    find_compiler,
    library_jobs,
    run,
)

SOURCES = Path(__file__).parent / "native"
# A separate program, which uses the internals of the thread pool.
POOL_TEST = "test_pool.cpp"
# The other tests call its functions for every number that they compare.
SUPPORT = "testing.cpp"

TEST_FLAGS = ("-O1",)
# Not optimised: optimising instrumented code takes far longer than running it.
SANITIZE_FLAGS = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD_SANITIZE_FLAGS = ("-O1", "-g", "-fsanitize=thread")
STAND_IN_FLAGS = ("-DPW_STAND_INS", "-include", str(SOURCES / "stand_ins.h"))
# Instruction sets that others stand in for, and the flags that these need besides.
STAND_INS: dict[str, tuple[str, ...]] = {"avx_vnni": VNNI_FLAGS, "amx": ()}


def build_native_test(output: Path, library: Path, machine: str | None = None) -> None:
    """Compile the C++ test program. It loads the library from its present place."""
    compiler = find_compiler(machine)
    with tempfile.TemporaryDirectory() as directory:
        objects = compile_objects(compiler, _jobs(Path(directory), (*COMPILE_FLAGS, *TEST_FLAGS)))
        library = library.resolve()
        run((compiler, *objects, str(library), f"-Wl,-rpath,{library.parent}", "-pthread", "-o", str(output)))


def build_stand_in_library(output: Path) -> None:
    """Compile a library whose instruction sets in STAND_INS run on any processor with AVX-512 BF16.

    The kernels of other sets are not optimised: they are there because the library names them.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as directory:
        jobs = _stand_in_jobs(Path(directory), COMPILE_FLAGS)
        jobs = [
            (source, target, (*flags, *TEST_FLAGS) if _isa(flags) in STAND_INS else flags)
            for source, target, flags in jobs
        ]
        run((compiler, *compile_objects(compiler, jobs), "-shared", "-pthread", "-o", str(output)))


def build_sanitized_test(output: Path, isas: Collection[str], *, has_stand_ins: bool) -> None:
    """Compile the C++ test program and all sources of the library into one sanitized program.

    isas: the instruction sets that can run here. The library names the kernels for others too, but nothing runs them
    here: they are compiled without the sanitizers, and linked last, so that no function that several objects have is
    taken from them. has_stand_ins: as in build_stand_in_library.
    """
    compiler = find_compiler()
    flags = (*COMPILE_FLAGS, *SANITIZE_FLAGS)
    list_jobs = _stand_in_jobs if has_stand_ins else _library_jobs
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        jobs = list_jobs(path, flags) + _jobs(path, flags)
        idle = [job for job in jobs if _isa(job[2]) not in (None, *isas)]
        plain = [(source, target, (*COMPILE_FLAGS, *own[len(flags) :])) for source, target, own in idle]
        objects = compile_objects(compiler, [job for job in jobs if job not in idle])
        run((compiler, *flags, *objects, *compile_objects(compiler, plain), "-pthread", "-o", str(output)))


def build_pool_test(output: Path) -> None:
    """Compile the test program of the thread pool and of replays with the thread sanitizer."""
    flags = (*COMPILE_FLAGS, *THREAD_SANITIZE_FLAGS, f"-I{SOURCE_DIR}")
    sources = (SOURCES / POOL_TEST, SOURCE_DIR / "parallel.cpp", SOURCE_DIR / "replay.cpp")
    run((find_compiler(), *flags, *map(str, sources), "-pthread", "-o", str(output)))


def _library_jobs(directory: Path, flags: tuple[str, ...]) -> list[Job]:
    return library_jobs(directory, flags, platform.machine())


def _stand_in_jobs(directory: Path, flags: tuple[str, ...]) -> list[Job]:
    """List the compiler jobs of a library with stand-ins."""
    jobs = []
    for source, target, own in library_jobs(directory, flags, "x86_64"):
        replaced = (*own, *STAND_INS.get(_isa(own) or "", ()), *STAND_IN_FLAGS)
        jobs.append((source, target, tuple(flag for flag in replaced if flag != "-mavxvnni")))
    return jobs


def _isa(flags: tuple[str, ...]) -> str | None:
    """Return the instruction set that these flags are for, or None if there is none."""
    return next((flag.removeprefix("-DPW_ISA=") for flag in flags if flag.startswith("-DPW_ISA=")), None)


def _jobs(directory: Path, flags: tuple[str, ...]) -> list[Job]:
    """List the compiler jobs of the C++ test program, without the library."""
    sources = [source for source in sorted(SOURCES.glob("*.cpp")) if source.name != POOL_TEST]
    jobs = [(source, directory / f"{source.name}.o", (*flags, f"-I{SOURCE_DIR}")) for source in sources]
    return [(source, target, (*own, "-O2") if source.name == SUPPORT else own) for source, target, own in jobs]
