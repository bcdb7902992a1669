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

from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.launch import die_with_parent
from pagewick.parallel.layout import RankLayout
from pagewick.parallel.rendezvous import open_listener
from pagewick.parallel.topology import Topology, detect_topology
from tests.parallel.gloo_worker import payload_of, save, values

# Data, pipeline, tensor.
LAYOUTS = ((2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4))


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
    return {
        "place": np.array([tp_rank, tp_size]),
        "sum": reduced.numpy(),
        "gathered": gathered.numpy(),
        "is_payload_right": np.array(received == payload_of(5000)),
    }


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    topology = detect_topology(os.environ)
    run_layouts(Path(sys.argv[1]), topology, None)


if __name__ == "__main__":
    main()
