"""The order in which `pytest -n` gives tests to its worker processes, and which tests stay together.

A unit of tests runs in one worker, one test after another, so that its fixtures are built once. A unit is a file, with
three exceptions: folders that share a server, a browser or syntax trees, files whose costly fixture has parameters, and
files of long tests without a costly fixture.
"""

from __future__ import annotations

import re

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# The tests of such a folder share a fixture of scope "package" or what is cached, and are one unit.
FOLDERS = ("tests/architecture/", "tests/conformance/", "tests/page/", "tests/torture/")
# Each parameter of such a file's module fixture is a unit.
FILES_BY_PARAMETER = ("tests/models/test_against_transformers.py",)
# Each test of such a file is a unit.
FILES_BY_TEST = ("tests/engine/scheduling/test_scheduler_machine.py", "tests/kernels/test_native_library.py")
# The slowest units come first, so that the workers end at about the same time.
SLOWEST = (
    "tests/kernels/test_native_library.py::test_the_kernels_run_under_the_sanitizers",
    "tests/kernels/test_native_library.py::test_the_kernels_run_on_aarch64",
    "tests/engine/scheduling/test_scheduler_machine.py",
    "tests/torture/",
    "tests/page/",
    "tests/engine/sampling/test_sampler.py",
    "tests/cli/test_mistakes.py",
    "tests/models/test_config_fields.py",
    "tests/engine/test_supervisor.py",
    "tests/models/test_against_transformers.py",
    "tests/conformance/",
    "tests/models/test_tensors.py",
    "tests/cli/test_end_to_end.py",
    "tests/engine/test_exact_threads.py",
    "tests/parallel/test_collectives.py",
)


class LongestUnitsFirst(LoadScopeScheduling):
    """Gives each worker one unit after another, in the order of collection.

    The superclass looks for each test of a unit in the list of all tests, and after each test counts all that the
    worker has got so far, which for tens of thousands of tests takes it longer than they need.
    """

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._places: dict[WorkerController, dict[str, int]] = {}

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        unit, tests = self.workqueue.popitem(last=False)
        self.assigned_work.setdefault(node, {})[unit] = tests
        if node not in self._places:
            self._places[node] = {node_id: place for place, node_id in enumerate(self.registered_collections[node])}
        node.send_runtest_some([self._places[node][node_id] for node_id, is_done in tests.items() if not is_done])

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        for unit in [unit for unit, tests in workload.items() if all(tests.values())]:
            del workload[unit]
        return super()._pending_of(workload)


def unit_of(node_id: str) -> str:
    """Return the name of the unit that a test belongs to."""
    path = node_id.partition("::")[0]
    if path in FILES_BY_TEST:
        return node_id
    if path in FILES_BY_PARAMETER and (parameter := re.search(r"\[(.*)\]$", node_id)):
        return f"{path}[{parameter[1]}]"
    return next((folder for folder in FOLDERS if path.startswith(folder)), path)


def rank_of(node_id: str) -> int:
    """Return the place of a test's unit among the slowest, which come first; all others share the last place."""
    unit = unit_of(node_id)
    return next((place for place, slow in enumerate(SLOWEST) if unit.startswith(slow)), len(SLOWEST))
