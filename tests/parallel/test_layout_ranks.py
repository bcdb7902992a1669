"""Four gloo processes in several layouts, compared with NumPy sums over groups that are written by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from pagewick.parallel.launch import LocalRanks
from pagewick.parallel.topology import detect_topology
from tests.parallel.gloo_worker import values
from tests.parallel.layout_worker import LAYOUTS, run_layouts

WORLD_SIZE = 4
# (data, pipeline, tensor) -> the ranks that share layers.
TENSOR_GROUPS = {
    (2, 1, 2): [[0, 1], [2, 3]],
    (1, 2, 2): [[0, 1], [2, 3]],
    (1, 4, 1): [[0], [1], [2], [3]],
    (1, 1, 4): [[0, 1, 2, 3]],
}
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of every rank in every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    topology = detect_topology({}, tensor_parallel_size=WORLD_SIZE)
    module = "tests.parallel.layout_worker"
    with LocalRanks(topology, module=module, arguments=[str(folder)], environ=ENVIRON) as ranks:
        run_layouts(folder, ranks.topology, ranks.listener)
    return folder


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=["x".join(map(str, sizes)) for sizes in LAYOUTS])
def test_a_rank_communicates_with_its_tensor_group_only(index: int, folder: Path) -> None:
    for group in TENSOR_GROUPS[LAYOUTS[index]]:
        total = values(group[0], 5, 7)
        for other in group[1:]:
            total = total + values(other, 5, 7)
        gathered = np.concatenate([values(rank, 3, 2 + tp_rank) for tp_rank, rank in enumerate(group)], axis=1)
        for tp_rank, rank in enumerate(group):
            found = dict(np.load(folder / str(index) / f"{rank}.npz"))
            assert found["place"].tolist() == [tp_rank, len(group)]
            np.testing.assert_array_equal(found["sum"], total)
            np.testing.assert_array_equal(found["gathered"], gathered)
            assert found["is_payload_right"], "bytes of rank 0 go to all ranks, whatever their group"
