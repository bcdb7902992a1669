"""Random requests get what each gets alone, in random engines, with models of every kind of layer.

test_exactness_properties plays more scenes with few models. PAGEWICK_DEEP=1 plays scenes with every variant of every
architecture, other ones every time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.errors import ConfigError
from tests.deep import IS_DEEP
from tests.engine.exactness import Model, Scene, Tally, make_scene, play
from tests.engine.row_by_row import row_by_row
from tests.engine.speculation import test_mtp as predicting
from tests.models.checkpoints import COMMON, write_checkpoint
from tests.models.predicting import Predicting
from tests.models.variants import VARIANTS

# One for each kind of attention, state and stream that keeps something of earlier tokens.
KINDS = (
    "deepseek-v4", "gemma-3n", "glm-5.2", "gpt-oss", "granite-4", "hy4", "kimi-linear", "lfm2", "llama4-scout",
    "mamba-1", "minimax-m3", "qwen4",
)  # fmt: skip
# Layers with a state cannot take tokens back, so that these models cannot be draft models.
WITH_STATES = ("granite-4", "kimi-linear", "lfm2", "mamba-1", "qwen4")
PREDICTING = ("deepseek-v3", "glm-4.5", "glm-5.2", "hy3", "qwen3-next")
OPTIONS: dict[str, tuple[str | None, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "kv_cache_dtype": (None, None, "int8", "fp8_e4m3"),
    "quantization": (None, None, "q8_0", "q4_k_m", "int4"),
}
NUM_SCENES = 12 if IS_DEEP else 2
pytestmark = pytest.mark.timeout(0 if IS_DEEP else 300)


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    with row_by_row():
        yield


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model that predicts others badly."""
    directory = tmp_path_factory.mktemp("drafter")
    write_checkpoint("qwen3", directory)
    return str(directory)


def draws(name: str) -> Random:
    return Random() if IS_DEEP else Random(name)


def options_of(random: Random) -> dict[str, Any]:
    """Draw options that change the tokens of all requests alike."""
    chosen = {name: random.choice(values) for name, values in OPTIONS.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def played(model: Model, scene: Scene, disk: Path, random: Random) -> bool:
    """Play a scene; return False if the model refuses the engine's options."""
    try:
        play(model, scene, disk, Tally(), depth=random.choice([1, 2]))
    except ConfigError as refused:
        assert "--" in str(refused), "the error names the flag"
        return False
    except BaseException:
        print(model.options, scene)
        raise
    return True


@pytest.mark.parametrize("name", sorted(VARIANTS) if IS_DEEP else KINDS)
def test_tokens_are_those_of_single_requests(name: str, drafter: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "model")
    random = draws(name)
    options = options_of(random) if IS_DEEP else {"dtype": random.choice(["float32", "bfloat16"])}
    right = drafter if name in WITH_STATES else str(tmp_path / "model")
    model = Model(str(tmp_path / "model"), [right, drafter], COMMON["vocab_size"], options)
    outcomes = [played(model, make_scene(random), tmp_path / f"disk{number}", random) for number in range(NUM_SCENES)]
    model.close()
    shutil.rmtree(tmp_path / "model")
    assert any(outcomes) or IS_DEEP, "every scene was refused"


@pytest.mark.parametrize("name", sorted(predicting.KINDS) if IS_DEEP else PREDICTING)
def test_a_predicting_layer_changes_no_token(name: str, tmp_path: Path) -> None:
    Predicting(name, **predicting.KINDS[name]).write(tmp_path / "model")
    random = draws(name)
    options = options_of(random) if IS_DEEP else {"dtype": "float32"}
    model = Model(str(tmp_path / "model"), [], COMMON["vocab_size"], options)
    outcomes = []
    for number in range(NUM_SCENES):
        scene = make_scene(random)
        scene.draft = None
        scene.engine |= {
            "speculative_method": "mtp",
            "num_speculative_tokens": random.randint(1, 5),
            "speculative_max_batch": 8,
        }
        outcomes.append(played(model, scene, tmp_path / f"disk{number}", random))
    model.close()
    assert any(outcomes) or IS_DEEP, "every scene was refused"
