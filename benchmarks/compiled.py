"""C programs of the benchmarks, compiled at run time for this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pagewick.errors import ConfigError


def compile_program(source: Path, program: Path, options: Sequence[str], purpose: str) -> Path:
    """Compile a C file to `program`, and return that. Raises ConfigError without a compiler, or if it fails.

    options: of the compiler, after the source. purpose: what needs the program, for the error without a compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ConfigError(f"{purpose} needs a C compiler; install gcc, or set CC to one")
    built = subprocess.run([compiler, "-O3", source, *options, "-o", program], capture_output=True, text=True)
    if built.returncode:
        raise ConfigError(f"{compiler} cannot build {source.name}: {built.stderr.strip()[-400:]}")
    return program
