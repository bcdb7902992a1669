"""Whatever engine serves them together, requests get what each gets alone: the same tokens and the same bits.

PAGEWICK_DEEP=1 plays 50 times as many scenes, other ones every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from pagewick.demo import MODEL_DIR
from tests.deep import IS_DEEP
from tests.engine.exactness import Model, Tally, make_scene, play
from tests.engine.row_by_row import row_by_row
from tests.models.checkpoints import COMMON, write_checkpoint
from tests.models.lora_adapters import write_adapters

NAMES = ("qwen3", "llama", "llama-linear-rope", "qwen3-next")
CACHE_DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
NUM_SCENES = {"qwen3": 40, "llama": 10, "llama-linear-rope": 10, "qwen3-next": 5, "pagewick-demo": 4}
pytestmark = pytest.mark.timeout(0 if IS_DEEP else 300)


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    with row_by_row():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """Each with itself as a draft model that is always right, and another one that never is; qwen3 has adapters.

    A model with states cannot be a draft model.
    """
    directories: dict[str, str] = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
    adapters: dict[str, str] = {}
    for name, directory in directories.items():
        made = write_checkpoint(name, Path(directory))
        if name == "qwen3":
            adapters = write_adapters(made, tmp_path_factory.mktemp("adapters"))
    found = {}
    for name, directory in directories.items():
        other = directories["llama" if name == "qwen3" else "qwen3"]
        own = adapters if name == "qwen3" else {}
        found[name] = Model(
            directory,
            [directories["llama"] if name == "qwen3-next" else directory, other],
            COMMON["vocab_size"],
            {"lora_modules": own} if own else {},
            list(own),
        )
    for dtype in CACHE_DTYPES:
        drafts = [directories["llama"], directories["qwen3"]]
        found[dtype] = Model(directories["llama"], drafts, COMMON["vocab_size"], {"kv_cache_dtype": dtype})
    found["pagewick-demo"] = Model(str(MODEL_DIR), [str(MODEL_DIR)] * 2, 4096, {"dtype": "float32"})
    yield found
    for model in found.values():
        model.close()


def check(model: Model, num_scenes: int, depth: int) -> Tally:
    """Play scenes that are the same in every run, whatever other tests run, or others in every deep run."""
    tally = Tally()
    seeds = Random() if IS_DEEP else Random(model.directory.rpartition("/")[2].rstrip("0123456789"))
    for _ in range(num_scenes * (50 if IS_DEEP else 1)):
        scene = make_scene(Random(seeds.getrandbits(64)), model.adapters)
        with TemporaryDirectory() as disk:
            try:
                play(model, scene, Path(disk), tally, depth)
            except BaseException:
                print(scene)
                raise
    print(tally)
    return tally


@pytest.mark.parametrize("depth", [1, 2] if IS_DEEP else [2])
@pytest.mark.parametrize("name", NAMES)
def test_tiny_models(name: str, depth: int, models: dict[str, Model]) -> None:
    tally = check(models[name], NUM_SCENES[name], depth)
    if NUM_SCENES[name] >= 40:
        assert min(tally.counts.values()) > 0, f"something never happened: {tally}"
        assert models[name].adapters


@pytest.mark.parametrize("dtype", CACHE_DTYPES if IS_DEEP else CACHE_DTYPES[:1])
def test_8_bit_caches(dtype: str, models: dict[str, Model]) -> None:
    assert check(models[dtype], 6, depth=2).counts["tokens"] > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_the_built_in_model(depth: int, models: dict[str, Model]) -> None:
    assert check(models["pagewick-demo"], NUM_SCENES["pagewick-demo"], depth).counts["tokens"] > 0
