"""The machine's devices, cores and memory. Only this module queries them. Imports torch only for devices."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil

from pagewick.control_groups import read_limits
from pagewick.errors import ConfigError
from pagewick.huge_memory import num_ready_bytes

if TYPE_CHECKING:
    import torch


def choose_device(requested: str) -> str:
    """Return the device to run on; "auto" selects the best one. Raises ConfigError if it is not available."""
    import torch

    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if requested == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    kind = requested.partition(":")[0]
    have = [device for device, there in available.items() if there]
    if available["cuda"]:
        have += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if requested not in have and (kind == "cuda" or kind not in have):
        listed = ", ".join(have)
        # The driver, PyTorch, CUDA_VISIBLE_DEVICES or a container may hide a GPU.
        reason = "\n  pagewick doctor says why PyTorch sees no GPU" if kind == "cuda" and not available["cuda"] else ""
        raise ConfigError(
            f"--device {requested} is not available on this machine; it has: {listed}; give one, or none{reason}"
        )
    return requested


def torch_device(device: str, local_rank: int) -> torch.device:
    """Return the torch device of a rank; the ranks of a host use its GPUs in order.

    A process that sees one GPU uses that one, whatever its local rank: Slurm and others can show each process a GPU of
    its own, which has index 0 there. init_collectives finds out if two ranks have the same one.
    It is also selected for this thread (select_device). Raises ConfigError if there are several GPUs, but too few.
    """
    import torch

    found = torch.device(device)
    if device == "cuda":
        num_visible = torch.cuda.device_count()
        if local_rank >= num_visible > 1:
            raise ConfigError(
                f"local rank {local_rank} needs a GPU of its own, but sees {num_visible} GPUs: start at most "
                f"{num_visible} ranks on this machine (--tensor-parallel-size), or give each process its own GPU in "
                "CUDA_VISIBLE_DEVICES"
            )
        found = torch.device("cuda", 0 if num_visible == 1 else local_rank)
    select_device(found)
    return found


def check_num_gpus(device: str, num_ranks: int) -> None:
    """Raise ConfigError if `num_ranks` processes that all see the same GPUs cannot have one each."""
    import torch

    if device == "cuda" and (num_visible := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(
            f"the {num_ranks} ranks of this machine need a GPU each, and {num_visible} can be seen: lower "
            "--tensor-parallel-size, or look at CUDA_VISIBLE_DEVICES"
        )


def gpu_uuid(device: torch.device) -> str:
    """Return what tells a GPU from all others of all machines; empty for other devices.

    Also empty for GPUs of AMD, some of which have none.
    """
    import torch

    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def select_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread: Triton launches kernels there, wherever their tensors are."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def num_cores() -> int:
    """Return the number of physical cores that this process may use, at least 1. OMP_NUM_THREADS overrides it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return num_cores_of(os.environ.get("OMP_NUM_THREADS", ""), min(allowed, physical), read_limits().cores)


def num_cores_of(omp_num_threads: str, num_cores: int, quota: float | None) -> int:
    """Return the number of threads for a process that may use num_cores cores; OMP_NUM_THREADS, if set, decides.

    In a container with a CPU quota, the quota limits the number: the kernel would keep pausing additional threads, and
    the others would wait for them.
    """
    if omp_num_threads:
        return max(1, int(omp_num_threads)) if omp_num_threads.isdigit() else 1
    return max(1, num_cores if quota is None else min(num_cores, int(quota)))


def available_memory(device: str) -> int:
    """Return the bytes free for the KV cache on `device`, without a safety margin."""
    if device.startswith("cuda"):
        import torch

        # Loading leaves free memory with PyTorch's allocator; the system does not count it as free.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    limits, available = read_limits(), int(psutil.virtual_memory().available)
    if limits.memory is not None:
        available = max(0, min(available, limits.memory - (limits.memory_used or 0)))
    return available + num_ready_bytes()


def total_memory(device: str = "cpu") -> int:
    """Return the bytes of a GPU's memory, or of main memory that this process may use: its container has a limit."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[1])
    total = int(psutil.virtual_memory().total)
    limit = read_limits().memory
    return total if limit is None else min(total, limit)
