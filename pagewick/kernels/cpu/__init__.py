"""The native library for CPUs: `binding` loads it, one module for each family of its operations."""

from pagewick.kernels.cpu.binding import LIBRARY_PATH, NativeLibrary, library, status

__all__ = ["LIBRARY_PATH", "NativeLibrary", "library", "status"]
