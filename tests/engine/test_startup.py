"""The work beside the import of torch and the loading of a model."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine import startup
from pagewick.engine.startup import starting
from pagewick.errors import ModelNotFoundError
from pagewick.huge_memory import HUGE_PAGE, allocate
from tests.engine.test_preflight import NUM_IN_NORMS, NUM_PARAMETERS


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """In every test without frozen objects, and as it was after it."""
    was_enabled, has_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    (gc.freeze if has_frozen else gc.unfreeze)()
    (gc.enable if was_enabled else gc.disable)()


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a launcher, and with one memory."""
    monkeypatch.setattr(startup, "_SECOND_NODE", tmp_path / "node1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig(model=str(MODEL_DIR), **options)


def address_of(piece: tuple[mmap.mmap, int]) -> int:
    memory, offset = piece
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset


def num_prepared(config: EngineConfig) -> int:
    """Bytes, to a page, by how many of them come from the same memory."""
    with starting(config):
        first, _ = allocate(1)
        return 4096 * (1 + sum(allocate(1)[0] is first for _ in range(4 * NUM_PARAMETERS // 4096)))


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        ({"device": "cpu", "dtype": "float32"}, 4 * NUM_PARAMETERS),
        ({"device": "cpu", "dtype": "bfloat16"}, 2 * NUM_PARAMETERS),
        ({"device": "cpu", "dtype": "float32", "tensor_parallel_size": 2}, 2 * (NUM_PARAMETERS + NUM_IN_NORMS)),
        ({"device": "cpu", "dtype": "bfloat16", "speculative_model": str(MODEL_DIR)}, 4 * NUM_PARAMETERS),
        ({"device": "auto", "dtype": "float32"}, 4 * NUM_PARAMETERS),
    ],
)
def test_as_much_is_prepared_as_this_rank_loads(
    options: dict[str, Any], num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_GPU_FILES", ())
    assert abs(num_prepared(config_of(**options)) - num_bytes) <= 4096


@pytest.mark.parametrize("device", ["auto", "cuda", "mps"])
def test_nothing_is_prepared_where_weights_may_go_elsewhere(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "_GPU_FILES", (tmp_path,))
    assert num_prepared(config_of(device=device)) == 4096


def test_nothing_is_prepared_where_processors_have_memories_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "_SECOND_NODE", tmp_path)
    assert num_prepared(config_of(device="cpu")) == 4096


@pytest.mark.parametrize("uses_library", [True, False])
def test_what_is_prepared_is_what_weights_take(uses_library: bool) -> None:
    from pagewick.engine.engine import Engine
    from tests.kernels.conftest import library_off

    config = config_of(device="cpu", dtype="float32", num_kv_blocks=16)
    with nullcontext() if uses_library else library_off(), starting(config):
        first = address_of(allocate(1))
        engine = Engine(config)
    weights = [weight for weight in engine._ranks.runner.model.parameters() if weight.nbytes >= HUGE_PAGE]
    assert weights
    assert all(first < weight.data_ptr() < first + 4 * NUM_PARAMETERS for weight in weights)
    engine.close()


def test_nothing_is_prepared_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = 4 * NUM_PARAMETERS + startup._RESERVED_BYTES
    monkeypatch.setattr(startup, "available_memory", lambda device: enough - 1)
    config = config_of(device="cpu", dtype="float32")
    assert num_prepared(config) == 4096
    # Two ranks share the memory of a machine.
    assert num_prepared(config_of(device="cpu", dtype="float32", tensor_parallel_size=2)) == 4096
    monkeypatch.setattr(startup, "available_memory", lambda device: enough)
    assert num_prepared(config) > HUGE_PAGE


def test_the_collector_rests_and_does_not_look_at_all_afterwards() -> None:
    gc.enable()
    with starting(config_of(device="cuda")):
        assert not gc.isenabled()
        kept = [[index] for index in range(50_000)]
    assert gc.isenabled()
    assert len(gc.get_objects(generation=0)) < 5_000
    assert not gc.get_freeze_count()
    assert len(kept) == 50_000


def test_what_the_program_has_frozen_stays_frozen() -> None:
    gc.enable()
    gc.freeze()
    with starting(config_of(device="cuda")):
        pass
    # Not their number: frozen objects that nothing refers to any more are freed. `unfreeze` leaves none.
    assert gc.get_freeze_count() > 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with starting(config_of(device="cuda")):
        pass
    assert not gc.isenabled()


def test_the_collector_goes_on_after_a_failure(tmp_path: Path) -> None:
    gc.enable()
    with pytest.raises(KeyError), starting(config_of(device="cpu")):
        raise KeyError
    with pytest.raises(ModelNotFoundError), starting(EngineConfig(model=str(tmp_path / "none"), device="cpu")):
        pass
    assert gc.isenabled()
