"""How many may wait, and when it is worth coming back."""

from __future__ import annotations

import pytest

from pagewick.engine.messages import ImageInput
from pagewick.engine.scheduling.queue_limits import MAX_IMAGE_BYTES, QueueLimits
from pagewick.errors import QueueFullError
from tests.engine.requests import Simulation


def refusal(limits: QueueLimits, *arguments: float) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        limits.check(*arguments)  # type: ignore[arg-type]
    return caught.value


def test_without_limits_everybody_may_wait() -> None:
    QueueLimits().check(10**6, 10**9, 10**6, 0.0)


def test_the_number_that_waits_is_limited() -> None:
    limits = QueueLimits(max_requests=3)
    limits.check(2, 10**6, 10**6, 0.0)
    error = refusal(limits, 3, 0, 1, 0.0)
    assert str(error) == "the server is busy: 3 requests wait already, and --max-waiting-requests is 3; retry in 1 s"


def test_the_tokens_that_wait_are_limited_but_one_request_always_may() -> None:
    limits = QueueLimits(max_tokens=100)
    limits.check(0, 0, 500, 0.0)
    limits.check(3, 60, 40, 0.0)
    assert "60 tokens wait already; with 41 more that is above --max-waiting-tokens 100" in str(
        refusal(limits, 3, 60, 41, 0)
    )


def test_retry_when_half_of_the_queue_should_be_gone() -> None:
    limits = QueueLimits(max_requests=1)
    assert refusal(limits, 40, 0, 1, 5.0).retry_after_s == 1  # nothing is known yet
    for second in range(10):
        limits.note_finished(float(second))
    # Ten in ten seconds, so the half of 40 takes 20.
    assert refusal(limits, 40, 0, 1, 10.0).retry_after_s == 20
    assert refusal(limits, 1, 0, 1, 10.0).retry_after_s == 1
    assert refusal(limits, 10**6, 0, 1, 10.0).retry_after_s == 120
    # Only the last 32 count.
    for number in range(32):
        limits.note_finished(100 + number / 8)
    assert refusal(limits, 160, 0, 1, 104.0).retry_after_s == 10


def test_a_quiet_hour_is_no_slow_hour() -> None:
    limits = QueueLimits(max_requests=8)
    limits.note_finished(0.0)
    limits.note_finished(1.0)
    limits.check(0, 0, 1, 3600.0)
    assert refusal(limits, 8, 0, 1, 3600.5).retry_after_s == 1
    for number in range(4):
        limits.note_finished(3601.0 + number)
    assert refusal(limits, 8, 0, 1, 3605.0).retry_after_s == 4


def test_who_is_refused_leaves_no_trace() -> None:
    simulation = Simulation(max_num_seqs=1, limits=lambda: QueueLimits(max_requests=2))
    for _ in range(2):
        simulation.add(range(5), max_tokens=3)
    before = simulation.scheduler.refresh_stats().prompt_tokens
    for _ in range(2):
        with pytest.raises(QueueFullError):
            simulation.add(range(5), max_tokens=3, request_id="late", timeout_s=1.0)
    stats = simulation.scheduler.refresh_stats()
    assert (stats.num_refused, stats.num_requests_waiting, stats.prompt_tokens) == (2, 2, before)
    assert not simulation.scheduler.is_known("late")
    simulation.step()
    simulation.add(range(5), max_tokens=3, request_id="late")
    simulation.run()


def test_the_memory_of_images_is_limited_but_one_request_always_may() -> None:
    limits = QueueLimits()
    limits.check_images(0, MAX_IMAGE_BYTES + 1, 0, 0.0)
    limits.check_images(MAX_IMAGE_BYTES - 3, 3, 0, 0.0)
    limits.check_images(2 * MAX_IMAGE_BYTES, 0, 0, 0.0)
    with pytest.raises(QueueFullError, match="images of unfinished requests would take more than 1024 MiB; retry in"):
        limits.check_images(MAX_IMAGE_BYTES - 3, 4, 0, 0.0)


def test_images_count_until_their_request_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewick.engine.scheduling.queue_limits.MAX_IMAGE_BYTES", 100)
    simulation = Simulation(max_num_seqs=2)

    def add(num_bytes: int, **values: int) -> None:
        image = ImageInput(0, 1, 1, num_bytes // 3, bytes(num_bytes))
        simulation.add([1, 2, 3], max_tokens=4, images=[image], **values)

    add(60, n=2)
    with pytest.raises(QueueFullError):
        add(42)
    simulation.step()
    simulation.add([1, 2, 3], max_tokens=4)
    with pytest.raises(QueueFullError):
        add(42)
    add(39)
    simulation.run()
    add(99)
    simulation.run()
