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
    (2, 2, 1): [[0], [1], [2], [3]],
}
# With the same keys, the ranks of each pipeline in order.
PIPELINES = {
    (2, 1, 2): [[0], [1], [2], [3]],
    (1, 2, 2): [[0, 2], [1, 3]],
    (1, 4, 1): [[0, 1, 2, 3]],
    (1, 1, 4): [[0], [1], [2], [3]],
    (2, 2, 1): [[0, 1], [2, 3]],
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


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=["x".join(map(str, sizes)) for sizes in LAYOUTS])
def test_stages_get_what_the_stage_before_sends(index: int, folder: Path) -> None:
    for pipeline in PIPELINES[LAYOUTS[index]]:
        for stage, rank in enumerate(pipeline):
            found = dict(np.load(folder / str(index) / f"{rank}.npz"))
            assert found["stage"].tolist() == [stage, len(pipeline)]
            total = sum(other + 1 for other in pipeline[: stage + 1])
            np.testing.assert_array_equal(found["hidden_states"], np.full((2, 2, 3), total))
            expected = np.array([]) if len(pipeline) == 4 else np.full((2, 4), -total)
            np.testing.assert_array_equal(found["residual"], expected)
            np.testing.assert_array_equal(found["rows"], np.full((2, 3), pipeline[-1] + 0.5))
            assert found["numbers"].tolist() == [0, -3, 6]
