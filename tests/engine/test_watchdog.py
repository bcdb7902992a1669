"""When an engine hangs and when it only seems to, on a clock of our own; and what processes are seen to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pagewick.engine.progress import Reading
from pagewick.engine.watchdog import Activity, Watchdog, activity_of

STILL = Activity(100.0, is_stopped=False, is_runnable=False, waits_for_disk=False)


class Scene:
    """An engine that a test describes, second by second."""

    def __init__(self, activity: Activity | None = STILL) -> None:
        self.reading = Reading(count=5, num_taken=3, is_busy=True)
        self.activity = activity
        self.num_sent = 3
        self.now = 1000.0
        self.watchdog = Watchdog(lambda: self.reading, lambda: self.activity, now=self.now)
        self.look(0.0)

    def look(self, elapsed: float = 1.0, *, cpu: float = 0.0) -> bool:
        self.now += elapsed
        if self.activity is not None:
            self.activity = replace(self.activity, cpu_s=self.activity.cpu_s + cpu)
        self.watchdog.look(self.now, self.num_sent)
        return self.watchdog.is_hung

    def until_hung(self, limit: int, *, cpu: float = 0.0) -> int | None:
        """After how many seconds it was found to hang; None if it was not."""
        return next((second for second in range(1, limit) if self.look(cpu=cpu)), None)

    def mark(self) -> None:
        self.reading = replace(self.reading, count=self.reading.count + 1)


def test_a_deadlock_is_found_in_8_seconds() -> None:
    assert Scene().until_hung(100) == 8


def test_a_loop_without_end_is_found_in_8_seconds() -> None:
    """Also where it gets no more than 60 % of a processor."""
    runnable = replace(STILL, is_runnable=True)
    assert Scene(runnable).until_hung(100, cpu=1.0) == 8
    assert Scene(runnable).until_hung(100, cpu=0.6) == 8


@pytest.mark.parametrize("cpu", [0.0, 0.9])
def test_a_stopped_process_is_found_in_8_seconds_whatever_it_was_allowed(cpu: float) -> None:
    scene = Scene(replace(STILL, is_stopped=True))
    scene.reading = replace(scene.reading, allowed_s=60.0, allowed_cpu_s=100.0)
    assert scene.until_hung(100, cpu=cpu) == 8


def test_where_the_system_tells_nothing_what_is_allowed_counts_as_time() -> None:
    scene = Scene(None)
    assert scene.until_hung(100) == 8
    scene.mark()
    scene.reading = replace(scene.reading, allowed_s=10.0, allowed_cpu_s=20.0)
    assert not scene.look()
    assert scene.until_hung(100) == 38


def test_whoever_makes_progress_now_and_then_never_hangs() -> None:
    scene = Scene()
    for _ in range(100):
        assert scene.until_hung(8) is None
        scene.mark()
        assert not scene.look()


def test_an_idle_engine_never_hangs() -> None:
    scene = Scene()
    scene.reading = replace(scene.reading, is_busy=False)
    assert scene.until_hung(5000) is None


def test_an_idle_engine_that_does_not_take_a_message_hangs() -> None:
    """The time before the message does not count."""
    scene = Scene()
    scene.reading = replace(scene.reading, is_busy=False)
    assert scene.until_hung(50) is None
    scene.num_sent += 1
    assert not scene.look()
    assert scene.until_hung(100) == 8


def test_it_goes_on() -> None:
    scene = Scene()
    assert scene.until_hung(20) == 8
    assert scene.look() and scene.watchdog.stalled_s == 9
    scene.mark()
    assert not scene.look() and scene.watchdog.stalled_s == 0
    assert scene.until_hung(100) == 8


def test_honest_work_has_the_processor_time_that_it_needs() -> None:
    """A piece that may take 60 seconds on two cores; on a busy machine that takes as long as it takes."""
    for cpu, expected in ((2.0, 63), (0.5, 250)):
        scene = Scene(replace(STILL, is_runnable=True))
        scene.reading = replace(scene.reading, allowed_cpu_s=120.0)
        found = scene.until_hung(1000, cpu=cpu)
        # The first look at the processes comes a second late, and 4 seconds of them are anybody's.
        assert found is not None and abs(found - expected) <= 1


def test_who_gets_no_processor_at_all_is_not_hung() -> None:
    assert Scene(replace(STILL, is_runnable=True)).until_hung(600) is None


def test_nor_is_who_waits_for_a_disk_up_to_a_minute() -> None:
    assert Scene(replace(STILL, waits_for_disk=True)).until_hung(100) == 60


def test_a_gpu_is_waited_for_as_long_as_its_work_may_take() -> None:
    """Whether the driver waits in circles or asleep."""
    for cpu in (0.0, 1.0):
        scene = Scene(replace(STILL, is_runnable=cpu > 0))
        scene.reading = replace(scene.reading, allowed_s=17.0)
        assert scene.until_hung(100, cpu=cpu) == 25


def test_time_in_which_nobody_looked_is_no_evidence() -> None:
    """The machine slept, or both processes were stopped."""
    scene = Scene()
    for _ in range(2):
        assert not scene.look(3600.0)
    assert scene.watchdog.stalled_s == 4


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", f"print('here', flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        try:
            yield child
        finally:
            child.kill()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, which only Linux has")


@on_linux
def test_what_a_process_does_is_seen() -> None:
    with process("while True: pass") as busy, process("import time; time.sleep(600)") as asleep:
        until(lambda: activity_of([busy.pid]).is_runnable, "a busy process runs")  # type: ignore[union-attr]
        until(lambda: activity_of([busy.pid]).cpu_s >= 0.1, "and uses time")  # type: ignore[union-attr]
        until(lambda: not activity_of([asleep.pid]).is_runnable, "the other one sleeps")  # type: ignore[union-attr]
        both = activity_of([busy.pid, asleep.pid])
        assert both is not None and both.cpu_s >= 0.1 and not both.is_stopped
        asleep.send_signal(signal.SIGSTOP)
        until(lambda: activity_of([busy.pid, asleep.pid]).is_stopped, "one of them is stopped")  # type: ignore[union-attr]
        assert not activity_of([busy.pid]).is_stopped  # type: ignore[union-attr]


@on_linux
def test_threads_count_too() -> None:
    code = (
        "import threading, time\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()\n"
    )
    with process(code + "time.sleep(600)") as child:
        until(lambda: activity_of([child.pid]).cpu_s >= 0.1, "a thread uses time")  # type: ignore[union-attr]
        until(lambda: activity_of([child.pid]).is_runnable, "and runs")  # type: ignore[union-attr]


def test_who_is_gone_does_nothing() -> None:
    with process("pass") as child:
        child.wait()
    assert activity_of([child.pid]) is None
    assert activity_of([]) is None
    assert (activity_of([child.pid, os.getpid()]) is not None) == (sys.platform == "linux")
