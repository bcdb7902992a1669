"""The program of every rank in the tests of layouts; rank 0 calls `run_layouts` itself.

Usage: python -m tests.parallel.layout_worker FOLDER
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.launch import die_with_parent
from pagewick.parallel.layout import RankLayout
from pagewick.parallel.rendezvous import open_listener
from pagewick.parallel.stages import Stages
from pagewick.parallel.topology import Topology, detect_topology
from tests.parallel.gloo_worker import payload_of, save, values

# Data, pipeline, tensor.
LAYOUTS = ((2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4), (2, 2, 1))


def run_layouts(folder: Path, topology: Topology, listener: socket.socket | None) -> None:
    """Form a group with the other ranks for each of LAYOUTS; write this rank's results to `folder`/<index>."""
    for index, sizes in enumerate(LAYOUTS):
        collectives = init_collectives(topology, "cpu", layout=RankLayout(*sizes), listener=listener, timeout_s=60)
        (folder / str(index)).mkdir(exist_ok=True)
        save(folder / str(index), topology.rank, _run_operations(collectives))
        # The next group uses another port, which rank 0 opens and announces.
        listener = open_listener(replace(topology, master_port=0)) if topology.rank == 0 else None
        port = collectives.broadcast_bytes(None if listener is None else str(listener.getsockname()[1]).encode())
        topology = replace(topology, master_port=int(port))
        collectives.barrier()
        collectives.close()
    if listener is not None:
        listener.close()


def _run_operations(collectives: Collectives) -> dict[str, np.ndarray]:
    rank, tp_rank, tp_size = collectives.rank, collectives.tp_rank, collectives.tp_size
    reduced = collectives.all_reduce(torch.from_numpy(values(rank, 5, 7)))
    uneven = torch.from_numpy(values(rank, 3, 2 + tp_rank))
    gathered = collectives.all_gather(uneven, sizes=[2 + other for other in range(tp_size)])
    received = collectives.broadcast_bytes(payload_of(5000) if rank == 0 else None)
    hidden_states, residual = _pass_through(collectives.stages, rank)
    return {
        "stage": np.array([collectives.stages.index, collectives.stages.size]),
        "hidden_states": hidden_states.float().numpy(),
        "residual": np.array([]) if residual is None else residual.numpy(),
        "rows": collectives.stages.from_last(torch.full((2, 3), rank + 0.5, dtype=torch.bfloat16)).float().numpy(),
        "numbers": np.array([*collectives.minimum([rank, -rank]), *collectives.total([rank])]),
        "place": np.array([tp_rank, tp_size]),
        "sum": reduced.numpy(),
        "gathered": gathered.numpy(),
        "is_payload_right": np.array(received == payload_of(5000)),
    }


def _pass_through(stages: Stages, rank: int) -> tuple[Tensor, Tensor | None]:
    """Pass tensors along the pipeline twice, of other lengths; each rank adds its number. Only some have a residual."""
    has_residual = stages.size != 4
    for num_tokens in (5, 2):
        hidden_states = torch.zeros(num_tokens, 2, 3, dtype=torch.bfloat16)
        residual = torch.zeros(num_tokens, 4) if has_residual else None
        if not stages.is_first:
            hidden_states, residual = stages.receive(num_tokens, torch.zeros(1))
        hidden_states = hidden_states + rank + 1
        residual = None if residual is None else residual - rank - 1
        if not stages.is_last:
            # The sender need not make tensors contiguous.
            stages.send(hidden_states.transpose(1, 2).contiguous().transpose(1, 2), residual)
    return hidden_states, residual


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    topology = detect_topology(os.environ)
    run_layouts(Path(sys.argv[1]), topology, None)


if __name__ == "__main__":
    main()
