"""Random histories of requests on a device that computes late and out of phase: the answers are those of a CPU.

PAGEWICK_DEEP=1 plays 50 times as many, other ones every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from tests.deep import IS_DEEP
from tests.engine.exactness import Model, Tally, make_scene, play
from tests.engine.graph.late_device import late_device
from tests.engine.row_by_row import row_by_row
from tests.kernels.conftest import library_off
from tests.models.checkpoints import COMMON, write_checkpoint
from tests.models.lora_adapters import write_adapters

NUM_SCENES = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "llama")}
    served, _ = (write_checkpoint(name, directory) for name, directory in found.items())
    adapters = write_adapters(served, tmp_path_factory.mktemp("adapters"))
    with row_by_row(), library_off():
        drafts = [str(directory) for directory in found.values()]
        options = {"lora_modules": adapters}
        made = Model(str(found["qwen3"]), drafts, COMMON["vocab_size"], options, list(adapters))
        yield made
        made.close()


@pytest.mark.timeout(0 if IS_DEEP else 300)
@pytest.mark.parametrize("depth", [1, 2])
def test_random_histories(depth: int, model: Model) -> None:
    tally, num_replays = Tally(), 0
    seeds = Random() if IS_DEEP else Random(depth)
    for _ in range(NUM_SCENES * (50 if IS_DEEP else 1)):
        seed = seeds.getrandbits(64)
        scene = make_scene(Random(seed), model.adapters)
        for wanted in scene.wanted:
            model.alone(wanted)
        with TemporaryDirectory() as disk, late_device(seed, chance=[0.0, 0.05, 0.5][seed % 3]) as device:
            try:
                play(model, scene, Path(disk), tally, depth)
            except BaseException:
                print(scene)
                raise
            num_replays += sum(graph.num_replays for graph in device.graphs)
    print(tally)
    assert num_replays > 40 and tally.counts["tokens"] > 40 and tally.counts["adapters"] > 1
