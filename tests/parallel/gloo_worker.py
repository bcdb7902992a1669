"""The program of every rank in the gloo tests; rank 0 calls `run_operations` itself, or torchrun starts all ranks.

Usage: python -m tests.parallel.gloo_worker FOLDER operations|wait|sum [RANK_TIMEOUT_S]

wait: all but rank 0 wait for a plan that never comes. sum: all of them sum for ever.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.launch import die_with_parent
from pagewick.parallel.symmetric_memory import SmallSums
from pagewick.parallel.topology import detect_topology

PAYLOAD_SIZES = (0, 1, 4087, 4088, 4089, 100_000)


def values(rank: int, *shape: int) -> np.ndarray:
    """Return rank `rank`'s input; its magnitudes are mixed, so that the order of a sum changes the result."""
    random = np.random.default_rng([rank, *shape])
    return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)).astype(np.float32)


def payload_of(size: int) -> bytes:
    return bytes(index * 7 % 251 for index in range(size))


def run_operations(collectives: Collectives) -> dict[str, np.ndarray]:
    """Run every operation once and return the results of this rank by name."""
    rank, world_size = collectives.rank, collectives.world_size

    def mine(*shape: int) -> torch.Tensor:
        return torch.from_numpy(values(rank, *shape))

    matrix = mine(5, 7)
    reduced = collectives.all_reduce(matrix)
    assert reduced is matrix
    transposed = mine(4, 6).T
    collectives.all_reduce(transposed)
    uneven = mine(3, 2 + rank)
    sizes = [2 + other for other in range(world_size)]
    with_empty = mine(2, 0 if rank == 0 else 3)
    received = [collectives.broadcast_bytes(payload_of(size) if rank == 0 else None) for size in PAYLOAD_SIZES]
    lowest = collectives.minimum([rank, -rank, 2**40 + rank])
    results = {
        "sum": reduced,
        "sum_transposed": transposed,
        "sum_of_row": collectives.all_reduce(mine(5, 7)[3].clone()),
        "sum_bfloat16": collectives.all_reduce(mine(3, 11).bfloat16()).float(),
        "sum_int64": collectives.all_reduce(torch.arange(5) + 2**40 * rank),
        "sum_of_nothing": collectives.all_reduce(mine(0, 7)),
        "gather_last": collectives.all_gather(mine(2, 3)),
        "gather_first": collectives.all_gather(mine(2, 3), dim=0),
        "gather_uneven": collectives.all_gather(uneven, dim=1, sizes=sizes),
        "gather_with_empty": collectives.all_gather(with_empty, sizes=[0] + [3] * (world_size - 1)),
        "gather_bfloat16": collectives.all_gather(mine(2, 3).bfloat16()).float(),
    }
    results |= sums_on_gpus(collectives, mine)
    collectives.barrier()
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    arrays = {name: tensor.numpy() for name, tensor in results.items()}
    arrays["payloads_right"] = np.array(
        [got == payload_of(size) for got, size in zip(received, PAYLOAD_SIZES, strict=True)]
    )
    arrays["local_world_size"] = np.array(collectives.local_world_size)
    return {**arrays, "lowest": np.array(lowest), "listening": np.array(listening, dtype=str)}


class GlooMemory:
    """A SharedMemory of processes without GPUs: parts go through gloo, and are added in the order of the ranks."""

    num_sums = 0

    def buffer(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def add_parts(self, part: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor) -> None:
        self.num_sums += 1
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        out.copy_(functools.reduce(torch.add, parts))


def sums_on_gpus(collectives: Collectives, mine: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums as ranks with GPUs compute them: small ones through shared memory, others by the backend's all_reduce."""
    memory, group = GlooMemory(), dist.group.WORLD
    assert group is not None
    small_sums = SmallSums(memory, memory.buffer(1024, torch.device("cpu"), group), group)
    on_gpus = Collectives(
        collectives.rank, collectives.world_size, tensor_group=group, ordered_sum=False, small_sums=small_sums
    )
    tensor = mine(4, 8)
    assert on_gpus.all_reduce(tensor) is tensor
    results = {
        "small": tensor,
        "small_bfloat16": on_gpus.all_reduce(mine(4, 8).bfloat16()).float(),
        "small_again": on_gpus.all_reduce(mine(16, 16)),
    }
    assert memory.num_sums == 3
    results["not_small"] = on_gpus.all_reduce(mine(17, 16))
    results["not_aligned"] = on_gpus.all_reduce(mine(1, 7))
    results["not_contiguous"] = on_gpus.all_reduce(mine(4, 6).T)
    results["not_float"] = on_gpus.all_reduce(torch.arange(8) + collectives.rank)
    assert memory.num_sums == 3
    return results


def save(folder: Path, rank: int, results: dict[str, np.ndarray]) -> None:
    """Write a rank's results to the folder that the test reads."""
    np.savez(folder / f"{rank}.npz", **results)  # type: ignore[arg-type]  # none is called allow_pickle


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    topology = detect_topology(os.environ)
    rank_timeout_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    collectives = init_collectives(topology, "cpu", timeout_s=60, rank_timeout_s=rank_timeout_s)
    if mode != "operations":
        (folder / str(topology.rank)).touch()
    if mode == "wait" and topology.rank == 0:
        signal.pause()
    if mode == "wait":
        collectives.broadcast_bytes(None)
        return
    while mode == "sum":
        collectives.all_reduce(torch.ones(1000))
    save(folder, topology.rank, run_operations(collectives))
    collectives.barrier()
    collectives.close()


if __name__ == "__main__":
    main()
