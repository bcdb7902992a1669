"""Builds the native library into the package and names the wheel after the platform it was built for.

The library is loaded with ctypes and links neither Python nor torch: one wheel serves every Python 3 of a platform.
Without a C++ compiler Pagewick installs all the same, as pure Python; it then computes with its reference kernels.
PAGEWICK_REQUIRE_NATIVE=1 makes that an error.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
CPU_KERNELS = ROOT / "pagewick" / "kernels" / "cpu"
LIBRARY = CPU_KERNELS / "libpagewick_cpu.so"


def build_library() -> None:
    """Compile LIBRARY unless it is newer than everything it is made of."""
    sources = [CPU_KERNELS / "build.py", *(CPU_KERNELS / "csrc").iterdir()]
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return
    # By path and in a process of its own: as a module it would import pagewick.kernels, which needs torch.
    command = [sys.executable, str(CPU_KERNELS / "build.py")]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    if result.returncode == 0:
        return
    if os.environ.get("PAGEWICK_REQUIRE_NATIVE") == "1":
        raise SystemExit("error: the native library did not compile (PAGEWICK_REQUIRE_NATIVE=1)")
    LIBRARY.unlink(missing_ok=True)  # One of older sources would be taken for the current one.
    print("warning: the native library did not compile; Pagewick will use its reference kernels", file=sys.stderr)


class BuildPackage(build_py):
    def run(self) -> None:
        build_library()
        super().run()


class BuildWheel(bdist_wheel):
    def finalize_options(self) -> None:
        # First of all: whether there is a library decides what the wheel is called and where its files go.
        build_library()
        self.distribution.has_ext_modules = LIBRARY.exists
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel})
