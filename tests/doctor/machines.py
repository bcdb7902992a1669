"""An invented machine without problems; each test changes one fact about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewick.doctor.facts import Cache, Facts, Hub, Kernels, Processor, System
from pagewick.doctor.gpus import Driver, Gpu, TorchView

GIB = 2**30
H200 = Gpu("NVIDIA H200", 141 * GIB, 139 * GIB, (9, 0))
DRIVER = Driver("/usr/bin/nvidia-smi", "570.86.15", (H200,), has_device_files=True)
CUDA_TORCH = TorchView("2.13.0+cu128", cuda="12.8", gpus=(H200,), architectures=((7, 5), (9, 0)))
CPU_TORCH = TorchView("2.13.0+cpu")

GOOD = Facts(
    cache=Cache(Path("/cache/hub"), free=200 * 10**9),
    hub=Hub("https://huggingface.co", has_token=True),
    processor=Processor("Some CPU", 8, 8, 8, ("AVX2",)),
    kernels=Kernels(is_on=True, status="native kernels: avx2", is_built=True, compiler="c++"),
    memory_total=64 * GIB,
    memory_available=60 * GIB,
    torch=CPU_TORCH,
    system=System("Linux 6.1", "3.12.1", shared_memory=8 * GIB, open_files=(1048576, 1048576), huge_pages="madvise"),
)


def spoilt(part: str = "", /, **changes: Any) -> Facts:
    """The good machine with changes, of one of its parts or of itself."""
    return replace(GOOD, **({part: replace(getattr(GOOD, part), **changes)} if part else changes))
