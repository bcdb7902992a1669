"""The record that the engine process shares with its parent, and that an engine marks it where it should."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewick.engine.engine import Engine
from pagewick.engine.progress import PROGRESS_VARIABLE, Progress, Reading
from pagewick.engine.step_time_limits import StepTimeLimits, TimeLimit
from pagewick.kernels import native_status, recorded_steps
from tests.engine.serving import request, running, serve
from tests.models.checkpoints import COMMON, write_checkpoint

CHILD = f"""
import os
from pagewick.engine.progress import Progress
progress = Progress.inherited(os.environ)
progress.take(); progress.take(); progress.expect(1.5, 0.25); progress.mark()
assert "{PROGRESS_VARIABLE}" in os.environ and "torch" not in __import__("sys").modules
"""


@pytest.fixture
def shared() -> Iterator[Progress]:
    progress = Progress.shared()
    yield progress
    progress.close_file()


def inherit(progress: Progress) -> Progress | None:
    return Progress.inherited({PROGRESS_VARIABLE: str(progress.file)})


def test_a_child_process_writes_what_we_read(shared: Progress) -> None:
    assert shared.file is not None and shared.read() == Reading()
    environment = {**os.environ, PROGRESS_VARIABLE: str(shared.file)}
    subprocess.run([sys.executable, "-c", CHILD], pass_fds=[shared.file], env=environment, check=True, timeout=60)
    assert shared.read() == Reading(count=4, num_taken=2, is_busy=True, allowed_s=1.5, allowed_cpu_s=0.25)


def test_every_mark_is_seen_whoever_of_the_process_makes_it(shared: Progress) -> None:
    """The loop and the model runner find the record each for itself."""
    writers = [inherit(shared), inherit(shared)]
    counts = [shared.read().count]
    for writer in writers:
        assert writer is not None
        for act in (writer.mark, writer.take, writer.rest, writer.expect):
            act()
            counts.append(shared.read().count)
    assert len(set(counts)) == len(counts)
    assert shared.read() == Reading(count=8, num_taken=2, is_busy=False)


def test_the_memory_outlives_the_open_file(shared: Progress) -> None:
    writer = inherit(shared)
    assert writer is not None
    shared.close_file()
    shared.close_file()
    writer.mark()
    assert shared.read().count == 1


def test_no_other_file_is_written_to(tmp_path: Path) -> None:
    """A process that inherits the variable without the file may have another file open under its number."""
    for content in (b"", b"x" * 64, b"x" * 63):
        path = tmp_path / "other"
        path.write_bytes(content)
        with path.open("r+b") as file:
            assert Progress.inherited({PROGRESS_VARIABLE: str(file.fileno())}) is None
        assert path.read_bytes() == content
    for number in ("", "-1", "a", "1000000", "9" * 30, "٣"):
        assert Progress.inherited({PROGRESS_VARIABLE: number}) is None
    assert Progress.inherited({}) is None


def test_a_pipe_is_not_it_either() -> None:
    reader, writer = os.pipe()
    try:
        assert Progress.inherited({PROGRESS_VARIABLE: str(reader)}) is None
    finally:
        os.close(reader)
        os.close(writer)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return directory


def count_marks(engine: Engine, progress: Progress, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Reading]]:
    """Record the count of every step, and the time limit of its layers."""
    counts: list[int] = []
    readings: list[Reading] = []
    submit = engine._ranks.submit
    layer = engine._ranks.runner.model.model.layers[-1]
    layer.register_forward_pre_hook(lambda module, inputs: readings.append(progress.read()))

    def counted(plan: Any) -> Any:
        before = progress.read().count
        handle = submit(plan)
        counts.append(progress.read().count - before)
        return handle

    monkeypatch.setattr(engine._ranks, "submit", counted)
    return counts, readings


def test_an_engine_marks_every_layer(checkpoint: Path, shared: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRESS_VARIABLE, str(shared.file))
    # A recorded step calls no layer; the test below covers it.
    monkeypatch.setattr(recorded_steps, "can_record", lambda device: False)
    with running(checkpoint, num_kv_blocks=20, max_num_batched_tokens=16) as engine:
        counts, readings = count_marks(engine, shared, monkeypatch)
        serve(engine, [request(range(2, 25), max_tokens=4, ignore_eos=True)])
    # Two steps for the prompt, the second of which gives a token, and three for the others.
    assert len(counts) == len(readings) == 5
    assert min(counts) >= COMMON["num_hidden_layers"] + 2
    # 16 tokens, 7, and one at a time: on the slowest processor, in which case it still takes no time here.
    allowed = [reading.allowed_cpu_s for reading in readings]
    assert allowed[0] > allowed[1] > allowed[2] > 0 and max(allowed) < 0.1
    assert all(reading.allowed_s == 0 for reading in readings)
    assert (shared.read().allowed_s, shared.read().allowed_cpu_s) == (0, 0)


@pytest.mark.skipif("off" in native_status(), reason="needs the native library: make install")
def test_what_is_replayed_is_marked_operation_by_operation(
    checkpoint: Path, shared: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRESS_VARIABLE, str(shared.file))
    with running(checkpoint, num_kv_blocks=20, max_num_batched_tokens=16) as engine:
        counts, readings = count_marks(engine, shared, monkeypatch)
        serve(engine, [request(range(2, 25), max_tokens=4, ignore_eos=True)])
    # A size is recorded when it comes for the second time: layers are called in all steps but the last.
    assert len(counts) == 5 and len(readings) == 4
    # A layer has at least these operations: two norms, four products, rotation, attention and activation.
    assert counts[-1] >= 9 * COMMON["num_hidden_layers"]


def spied(function: Any, progress: Progress, readings: list[Reading]) -> Any:
    """The function, with a note of what progress says whenever it is called."""

    def wrapper(*given: Any) -> Any:
        readings.append(progress.read())
        return function(*given)

    return wrapper


def test_blocks_on_their_way_are_marked_one_by_one(
    checkpoint: Path, tmp_path: Path, shared: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks may take their time, but for each block anew."""
    monkeypatch.setenv(PROGRESS_VARIABLE, str(shared.file))
    options: dict[str, Any] = {"num_kv_blocks": 8, "block_size": 16, "kv_cache_disk": str(tmp_path), "swap_space": 0}
    with running(checkpoint, **options) as engine:
        disk = engine._ranks.runner.disk
        assert disk is not None
        seen: dict[str, list[Reading]] = {"write": [], "read_into": []}
        for name, readings in seen.items():
            monkeypatch.setattr(disk, name, spied(getattr(disk, name), shared, readings))
        for number in range(3):
            serve(engine, [request([number + 2] * 100, f"r{number}", max_tokens=1)])
        serve(engine, [request([2] * 100, "again", max_tokens=1)])
    for readings in seen.values():
        assert len(readings) >= 3
        assert len({reading.count for reading in readings}) == len(readings)
        assert {reading.allowed_s for reading in readings} == {60.0}


WORK: dict[str, Any] = {"layer_size": 10**8, "head_size": 10**9, "attention_width": 4096, "num_layers": 30}


def test_what_a_layer_may_take_is_what_it_computes() -> None:
    """On one core at 1e9 operations a second: 2 per parameter and token, 4 per score and channel."""
    on_cpu = StepTimeLimits(**WORK, device="cpu", num_ranks=1)
    assert on_cpu.of_tokens(50) == TimeLimit(0.0, 10.0)
    assert on_cpu.of_tokens(50, 10**6) == TimeLimit(0.0, pytest.approx(26.384))
    # One that waits for others uses no processor.
    assert StepTimeLimits(**WORK, device="cpu", num_ranks=2).of_tokens(50) == TimeLimit(10.0, 10.0)
    # On a GPU all layers are waited for together.
    found = StepTimeLimits(**WORK, device="cuda", num_ranks=1).of_tokens(5000)
    assert found == TimeLimit(pytest.approx(30 * 2 * 10**8 * 5000 / 5e12 + 60), 60.0)
