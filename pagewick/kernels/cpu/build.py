"""Compile the native library: `python -m pagewick.kernels.cpu.build`.

Needs only a C++17 compiler (CXX, else c++, g++ or clang++). Every kernel file is compiled once for each
instruction set of the processor's family; which of them runs is decided when the library is loaded, so
one library serves every machine of that family. `--sanitize` builds the C++ test program instead, with
the address and undefined-behaviour sanitizers.
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
NATIVE_TEST = Path(__file__).parents[3] / "tests" / "kernels" / "native" / "test_ops.cpp"

COMMON_SOURCES = (
    "ops.cpp",
    "activation.cpp",
    "attention.cpp",
    "logits.cpp",
    "matrix.cpp",
    "norm.cpp",
    "parallel.cpp",
    "token.cpp",
)
KERNEL_SOURCES = (
    "activation_kernel.cpp",
    "attention_kernel.cpp",
    "logits_kernel.cpp",
    "matrix_kernel.cpp",
    "norm_kernel.cpp",
    "token_kernel.cpp",
)

# Contraction would fuse a * b + c wherever the compiler likes; the kernels say themselves where to fuse.
COMPILE_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
)
RELEASE_FLAGS = ("-O3",)
# Unoptimised: to optimise instrumented code takes far longer than to run it.
SANITIZE_FLAGS = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
AVX512_BF16_FLAGS = (*AVX512_FLAGS, "-mavx512bf16")
AMX_FLAGS = (*AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16")


def instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """Name -> compiler flags of the instruction sets to build for a processor family."""
    if machine in ("x86_64", "AMD64"):
        return {
            "generic": (),
            "avx2": AVX2_FLAGS,
            "avx512": AVX512_FLAGS,
            "avx512_bf16": AVX512_BF16_FLAGS,
            "amx": AMX_FLAGS,
        }
    if machine in ("aarch64", "arm64"):
        return {"generic": (), "neon": ()}
    return {"generic": ()}


def find_compiler() -> str:
    """The C++ compiler to use. Raises ConfigError if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise ConfigError("no C++ compiler found: install one (Debian: apt install g++) or set CXX to its name")


def compile_objects(compiler: str, directory: Path, flags: tuple[str, ...]) -> list[Path]:
    """Compile all sources into `directory`, as many at a time as there are processors."""
    jobs = [(SOURCE_DIR / name, directory / f"{name}.o", flags) for name in COMMON_SOURCES]
    for isa, isa_flags in instruction_sets(platform.machine()).items():
        defines = (f"-DPW_ISA={isa}", f"-DPW_ISA_{isa.upper()}")
        for name in KERNEL_SOURCES:
            jobs.append((SOURCE_DIR / name, directory / f"{isa}_{name}.o", (*flags, *isa_flags, *defines)))
    jobs.sort(key=lambda job: "attention_kernel" not in job[0].name)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: run((compiler, *job[2], "-c", str(job[0]), "-o", str(job[1]))), jobs))
    return [target for _, target, _ in jobs]


def run(command: tuple[str, ...]) -> None:
    """Run one compiler command. Raises ConfigError with its messages if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(f"the C++ compiler failed: {' '.join(command)}\n{result.stderr.strip()}")


def build_library(output: Path = LIBRARY_PATH) -> None:
    """Compile and link the library; an existing one is replaced in one step."""
    compiler = find_compiler()
    link_flags = ["-shared", "-pthread"]
    if sys.platform == "linux":
        # The wheel must not depend on the C++ library of the machine that built it.
        link_flags += ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
    with tempfile.TemporaryDirectory() as directory:
        objects = compile_objects(compiler, Path(directory), (*COMPILE_FLAGS, *RELEASE_FLAGS))
        staged = output.with_name(f".{output.name}.{os.getpid()}")
        run((compiler, *map(str, objects), *link_flags, "-o", str(staged)))
        staged.replace(output)


def build_native_test(output: Path) -> None:
    """Compile the sources and their C++ test into one sanitized program."""
    compiler = find_compiler()
    flags = (*COMPILE_FLAGS, *SANITIZE_FLAGS)
    with tempfile.TemporaryDirectory() as directory:
        objects = compile_objects(compiler, Path(directory), flags)
        sources = (str(NATIVE_TEST), *map(str, objects))
        run((compiler, *flags, f"-I{SOURCE_DIR}", *sources, "-pthread", "-o", str(output)))


def main() -> int:
    """Build what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build Pagewick's native CPU kernels.")
    parser.add_argument("--sanitize", action="store_true", help="build the sanitized C++ test program instead")
    parser.add_argument("--output", type=Path, help="path of the result")
    arguments = parser.parse_args()
    output: Path = arguments.output or (Path("test_ops") if arguments.sanitize else LIBRARY_PATH)
    try:
        if arguments.sanitize:
            build_native_test(output)
        else:
            build_library(output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"built {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
