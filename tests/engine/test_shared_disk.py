"""Engines that share a disk: each finds at once what another has computed, and none depends on another's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.errors import ConfigError
from pagewick.kernels import cpu
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, answers_of, assert_idle, deltas_of, request, running, serve, start
from tests.models.checkpoints import write_checkpoint

exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
KINDS = ["qwen3", pytest.param("qwen3-next", marks=exact)]
OPTIONS: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 60, "max_model_len": 128, "kv_cache_disk_shared": True}
PROMPT = [Random(4).randrange(2, 190) for _ in range(50)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    names = ("qwen3", "qwen3-next")
    made = {name: tmp_path_factory.mktemp(name) for name in names}
    for name, directory in made.items():
        write_checkpoint(name, directory)
    with row_by_row():
        yield made


def question(prompt: list[int] = PROMPT, request_id: str = "q", **given: Any) -> EngineRequest:
    return request(prompt, request_id, seed=3, temperature=0.8, max_tokens=12, ignore_eos=True, logprobs=2, **given)


def prefill(prompt: list[int] = PROMPT) -> EngineRequest:
    return request(prompt, "p", max_tokens=1, ignore_eos=True, is_prefill=True)


def ask(engine: Engine, wanted: EngineRequest) -> tuple[Answers, int]:
    """Return the answer, and the number of tokens of the prompt that were found."""
    deltas = deltas_of(engine, [wanted])
    return answers_of(deltas), deltas[0].num_cached_tokens


@pytest.fixture
def pair(directories: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, ...]]:
    """Two engines of one model that share a disk; both run before anything is computed."""
    name = getattr(request, "param", "qwen3")
    engines = [start(directories[name], **OPTIONS, kv_cache_disk=str(tmp_path / "disk")) for _ in range(2)]
    try:
        yield tuple(engines)
        for engine in engines:
            assert_idle(engine)
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_a_prompt_that_one_has_computed_is_found_by_the_other(
    pair: tuple[Engine, Engine], directories: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["pair"]
    with running(directories[name], **{**OPTIONS, "kv_cache_disk_shared": False}) as alone:
        expected = serve(alone, [question()])
    first, second = pair
    ask(first, prefill())
    # The files are complete when the request ends, though that engine has nothing more to do.
    assert len(list((tmp_path / "disk").rglob("*.tmp"))) == 0
    found, num_cached = ask(second, question())
    assert found == expected
    assert num_cached == (48 if name == "qwen3" else 32)  # states are stored further apart than blocks

    # The first engine goes on with what the second has written.
    longer = PROMPT + next(iter(found.values())).token_ids + [7, 8]
    with running(directories[name], **{**OPTIONS, "kv_cache_disk_shared": False}) as alone:
        expected = serve(alone, [question(longer)])
    found, num_cached = ask(first, question(longer))
    assert found == expected and num_cached >= (56 if name == "qwen3" else 32)


def test_without_the_flag_nothing_is_found(directories: dict[str, Path], tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_cache_disk_shared": False, "kv_cache_disk": str(tmp_path / "disk")}
    with running(directories["qwen3"], **options) as engine:
        ask(engine, prefill())
        assert list((tmp_path / "disk").rglob("*.kv")) == []


def test_requests_beside_it_go_on(pair: tuple[Engine, Engine], directories: dict[str, Path]) -> None:
    with running(directories["qwen3"], **{**OPTIONS, "kv_cache_disk_shared": False}) as alone:
        expected = serve(alone, [question(PROMPT[:20], "a"), question(PROMPT[5:], "b", n=2)])
    first, second = pair
    found = serve(first, [question(PROMPT[:20], "a"), prefill(), question(PROMPT[5:], "b", n=2)], arrivals=[0, 2, 4])
    assert {choice: answer for choice, answer in found.items() if choice[0] != "p"} == expected
    assert ask(second, question(PROMPT[5:]))[1] == 40


def test_salts_stay_apart(pair: tuple[Engine, Engine]) -> None:
    first, second = pair
    ask(first, request(PROMPT, "p", max_tokens=1, is_prefill=True, cache_salt="one"))
    assert ask(second, question(cache_salt="two"))[1] == 0
    assert ask(second, question(cache_salt="one"))[1] == 48


def test_files_that_another_has_deleted_or_damaged_are_computed_again(
    pair: tuple[Engine, Engine], directories: dict[str, Path], tmp_path: Path
) -> None:
    first, second = pair
    expected = ask(first, question())[0]
    third = start(directories["qwen3"], **OPTIONS, kv_cache_disk=str(tmp_path / "disk"))
    try:
        # The third engine has found them at its start.
        files = sorted((tmp_path / "disk").rglob("*.kv"))
        files[0].unlink()
        files[3].write_bytes(files[3].read_bytes()[:-1] + b"?")
        assert ask(third, question())[0] == expected
        assert_idle(third)
    finally:
        third.close()
    # It has written again what was missing.
    assert ask(second, question()) == (expected, 48)


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_small_disk_holds_what_it_can(directories: dict[str, Path], tmp_path: Path, capacity: int) -> None:
    """More blocks are found than the engine may keep there: all are used, and those used longest ago are deleted."""
    disk = str(tmp_path / "disk")
    first = start(directories["qwen3"], **OPTIONS, kv_cache_disk=disk)
    block_bytes = first.info.kv_cache_bytes // first.info.num_kv_blocks
    second = start(directories["qwen3"], **OPTIONS, kv_cache_disk=disk, kv_cache_disk_size=capacity * block_bytes)
    try:
        ask(first, prefill())
        found, num_cached = ask(second, question())
        assert num_cached == 48
        assert found == ask(first, question())[0]
        assert second.stats().num_disk_blocks == capacity
        assert_idle(second)
    finally:
        second.close()
        first.close()


def test_two_ranks_share_with_two_ranks(directories: dict[str, Path], tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_cache_disk": str(tmp_path / "disk"), "tensor_parallel_size": 2}
    with running(directories["qwen3"], **options) as engine:
        ask(engine, prefill())
        assert len(list((tmp_path / "disk").rglob("*.kv"))) == 12
        expected = ask(engine, question())[0]
    with running(directories["qwen3"], **options) as engine:
        assert ask(engine, question()) == (expected, 48)


def test_it_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="needs --kv-cache-disk"):
        EngineConfig(kv_cache_disk_shared=True)
