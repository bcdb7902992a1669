"""The native library for CPUs: `library` loads it, one module for each family of its operations."""

from pagewick.kernels.cpu.library import NativeLibrary, library, status

__all__ = ["NativeLibrary", "library", "status"]
