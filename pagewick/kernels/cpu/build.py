"""Compile the native library: `python -m pagewick.kernels.cpu.build`.

This needs only a C++17 compiler (CXX, else c++, g++ or clang++). Every kernel file is compiled once for each
instruction set of the processor's family, or for those that have instructions for it (PARTIAL_SETS). The library
chooses among them when it is loaded, so one library serves every machine of that family. `--target aarch64` builds for
another family, with a cross compiler.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagewick.errors import ConfigError

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_PATH = Path(__file__).parent / "libpagewick_cpu.so"

KERNEL_SOURCES = sorted(SOURCE_DIR.glob("*_kernel.cpp"))
COMMON_SOURCES = sorted(set(SOURCE_DIR.glob("*.cpp")) - set(KERNEL_SOURCES))

# With contraction the compiler would fuse a * b + c where it likes; the kernels state themselves where to fuse.
COMPILE_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall")
RELEASE_FLAGS = ("-O3",)
# These are compiled first, so that all processors finish at about the same time.
SLOW_SOURCES = (
    "attention_kernel.cpp", "matrix_kernel.cpp", "mla_kernel.cpp", "quantized_groups_kernel.cpp",
    "quantized_large_kernel.cpp", "quantized_small_kernel.cpp",
)  # fmt: skip

AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
VNNI_FLAGS = (*AVX512_FLAGS, "-mavx512vnni")
BF16_FLAGS = (*VNNI_FLAGS, "-mavx512bf16")
# Instruction set -> compiler flags
X86_SETS = {
    "generic": (),
    "avx2": AVX2_FLAGS,
    "avx_vnni": (*AVX2_FLAGS, "-mavxvnni"),
    "avx512": AVX512_FLAGS,
    "avx512_vnni": VNNI_FLAGS,
    "avx512_bf16": BF16_FLAGS,
    "amx": (*BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
ARM_SETS = {
    "generic": (),
    "neon": (),
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
# Instruction sets with instructions for some kernels only. ops.cpp takes the others from another set.
BYTE_PRODUCTS = tuple(source.name for source in KERNEL_SOURCES if source.name.startswith("quantized_"))
PARTIAL_SETS = {
    "avx_vnni": BYTE_PRODUCTS,
    "avx512_vnni": BYTE_PRODUCTS,
    "amx": ("attention_kernel.cpp", "matrix_kernel.cpp", "mla_kernel.cpp", "window_kernel.cpp", *BYTE_PRODUCTS),
    "neon_dotprod": BYTE_PRODUCTS,
    "neon_i8mm": BYTE_PRODUCTS,
}


def instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets to build for a processor family: name -> compiler flags."""
    if machine in ("x86_64", "AMD64"):
        return X86_SETS
    if machine in ("aarch64", "arm64"):
        return ARM_SETS
    return {"generic": ()}


def find_compiler(machine: str | None = None) -> str:
    """Find the C++ compiler for a processor family (default: this machine's). Raises ConfigError if there is none."""
    if machine is not None and machine != platform.machine():
        cross_compiler = f"{machine}-linux-gnu-g++"
        if shutil.which(cross_compiler):
            return cross_compiler
        raise ConfigError(
            f"no C++ compiler for {machine} found: install one (Debian: apt install g++-{machine}-linux-gnu)"
        )
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise ConfigError("no C++ compiler found: install one (Debian: apt install g++) or set CXX to its name")


Job = tuple[Path, Path, tuple[str, ...]]  # source, object, flags


def library_jobs(directory: Path, flags: tuple[str, ...], machine: str) -> list[Job]:
    """List the compiler jobs of the library, with objects in `directory`."""
    jobs = [(source, directory / f"{source.name}.o", flags) for source in COMMON_SOURCES]
    for isa, isa_flags in instruction_sets(machine).items():
        defines = (f"-DPW_ISA={isa}", f"-DPW_ISA_{isa.upper()}")
        for source in KERNEL_SOURCES:
            if source.name in PARTIAL_SETS.get(isa, (source.name,)):
                jobs.append((source, directory / f"{isa}_{source.name}.o", (*flags, *isa_flags, *defines)))
    return jobs


def compile_objects(compiler: str, jobs: list[Job]) -> list[str]:
    """Run all jobs, one per processor at a time; return the objects."""
    jobs = sorted(jobs, key=lambda job: job[0].name not in SLOW_SOURCES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: run((compiler, *job[2], "-c", str(job[0]), "-o", str(job[1]))), jobs))
    return [str(target) for _, target, _ in jobs]


def run(command: tuple[str, ...]) -> None:
    """Run one compiler command. Raises ConfigError with its messages if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(f"the C++ compiler failed: {' '.join(command)}\n{result.stderr.strip()}")


def build_library(
    output: Path = LIBRARY_PATH, machine: str | None = None, optimization: tuple[str, ...] = RELEASE_FLAGS
) -> None:
    """Compile and link the library for a processor family. An existing one is replaced in one step."""
    compiler = find_compiler(machine)
    link_flags = ["-shared", "-pthread"]
    if sys.platform == "linux":
        # The wheel must not depend on the C++ library of the machine that built it.
        link_flags += ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
    with tempfile.TemporaryDirectory() as directory:
        flags = (*COMPILE_FLAGS, *optimization)
        objects = compile_objects(compiler, library_jobs(Path(directory), flags, machine or platform.machine()))
        staged = output.with_name(f".{output.name}.{os.getpid()}")
        run((compiler, *objects, *link_flags, "-o", str(staged)))
        staged.replace(output)


def main() -> int:
    """Build the library that the command line describes; return the exit code."""
    parser = argparse.ArgumentParser(description="Build Pagewick's native CPU kernels.")
    parser.add_argument("--target", metavar="MACHINE", help="processor family to build for (default: this machine's)")
    parser.add_argument("--output", type=Path, help="path of the result")
    arguments = parser.parse_args()
    if arguments.target and arguments.output is None:
        parser.error("--target goes with --output")
    output: Path = arguments.output or LIBRARY_PATH
    try:
        build_library(output, arguments.target)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"built {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
