"""What this machine has: devices, cores, memory. Only this module asks. Imports torch when a device is needed."""

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
    """The device to run on: `requested`, or for "auto" the best one here. Raises ConfigError if it is not there."""
    import torch

    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if requested == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    kind = requested.partition(":")[0]
    if not available.get(kind, False):
        have = ", ".join(device for device, there in available.items() if there)
        raise ConfigError(f"--device {requested} is not available on this machine; it has: {have}")
    return requested


def torch_device(device: str, local_rank: int) -> torch.device:
    """The torch device of one rank: ranks of a host take its GPUs in order."""
    import torch

    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local_rank} of this host needs a GPU of its own, and there are {torch.cuda.device_count()}; "
                "lower --tensor-parallel-size"
            )
        return torch.device("cuda", local_rank)
    return torch.device(device)


def num_cores() -> int:
    """Physical cores that this process may use, at least 1; OMP_NUM_THREADS comes first.

    Of a container that may use a part of the machine's time, as many as fit into that: with more threads each would be
    paused again and again, and the others would wait for it.
    """
    if threads := os.environ.get("OMP_NUM_THREADS", ""):
        return max(1, int(threads)) if threads.isdigit() else 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits().cores
    shares = allowed if quota is None else int(quota)
    return max(1, min(allowed, shares, psutil.cpu_count(logical=False) or allowed))


def available_memory(device: str) -> int:
    """Bytes free for the KV cache on `device`, before any margin."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    limits, available = read_limits(), int(psutil.virtual_memory().available)
    if limits.memory is not None:
        available = max(0, min(available, limits.memory - (limits.memory_used or 0)))
    return available + num_ready_bytes()


def total_memory() -> int:
    """Bytes of main memory that this process may have: the machine's, or its container's."""
    total = int(psutil.virtual_memory().total)
    limit = read_limits().memory
    return total if limit is None else min(total, limit)
