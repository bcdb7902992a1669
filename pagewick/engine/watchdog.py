"""Watchdog: tells an engine that makes no progress from one that works long or has nothing to do. Imports no torch.

It is given a look now and then, and counts how long nothing has been done of what the engine owes. That alone proves
nothing: a layer of a large model may take long, the machine may be busy with others. So from then on it also looks at
what the processes do. An engine hangs if, long enough,

- one of its processes is stopped, or
- they use no processor, and neither wait for one nor for a disk, or
- they have used more processor time than the work in hand can take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagewick.engine.progress import Reading

LOOK_INTERVAL_S = 1.0
# A hang is to be known within 10 seconds.
HUNG_AFTER_S = 8.0
# Of processor time, in which nothing happened: a step's own thread, or all of them, running in circles.
_HUNG_AFTER_CPU_S = 4.0
# Memory that comes back from swap, a disk that spins up.
_DISK_WAIT_S = 60.0
# No single piece of work takes so long, whatever was seen.
_LONGEST_S = 900.0
# Less than this share of one processor is no work.
_IDLE_SHARE = 0.05

_STOPPED, _RUNNABLE, _WAITS_FOR_DISK = b"Tt", b"R", b"D"


@dataclass(frozen=True, slots=True)
class Activity:
    """What processes do at a moment. cpu_s: all processor time they have had, in seconds.

    is_stopped: one of them, by a signal or a debugger. is_runnable, waits_for_disk: a thread of theirs.
    """

    cpu_s: float
    is_stopped: bool
    is_runnable: bool
    waits_for_disk: bool


class Watchdog:
    """is_hung: the verdict of the latest look. stalled_s: for how long nothing has been done of what is owed.
    is_owing: whether the latest look showed anything that is owed.

    activity: what the engine's processes do; None where the system does not tell, which makes it wait longer.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        activity: Callable[[], Activity | None],
        *,
        now: float,
        hung_after_s: float = HUNG_AFTER_S,
        longest_elapsed_s: float = 2 * LOOK_INTERVAL_S,
    ) -> None:
        self._read, self._activity = read, activity
        self._hung_after_s = hung_after_s
        self._hung_after_cpu_s = _HUNG_AFTER_CPU_S * hung_after_s / HUNG_AFTER_S
        self._longest_elapsed_s = longest_elapsed_s
        self._looked_at = now
        self._count = -1
        self.stalled_s: float
        self._forget()

    def look(self, now: float, num_sent: int) -> None:
        """now: seconds of any clock. num_sent: messages that the engine was sent.

        Time in which nobody looked counts little: who was kept from looking may have been stopped with the engine.
        """
        elapsed = min(now - self._looked_at, self._longest_elapsed_s)
        self._looked_at = now
        reading = self._read()
        is_owing = reading.is_busy or reading.num_taken < num_sent
        if reading.count != self._count or not is_owing:
            self._count = reading.count
            self._forget()
            self.is_owing = is_owing
        elif not self.is_owing:
            self.is_owing = True
        else:
            self.stalled_s += elapsed
            self._consider(self._activity(), elapsed)
            self.is_hung = self._is_hanging(reading)

    def _forget(self) -> None:
        self.is_hung = self.is_owing = False
        self.stalled_s = self._stopped_s = 0.0
        # Since the first look at the processes: their time then, how long ago, and looks that showed something.
        self._first_cpu_s: float | None = None
        self._cpu_s = self._seen_s = 0.0
        self._num_looks = self._num_runnable = 0
        self._waited_for_disk = False

    def _consider(self, activity: Activity | None, elapsed: float) -> None:
        if activity is None:
            return
        if self._first_cpu_s is None:
            self._first_cpu_s = activity.cpu_s
        else:
            self._seen_s += elapsed
        self._cpu_s = activity.cpu_s - self._first_cpu_s
        self._stopped_s = self._stopped_s + elapsed if activity.is_stopped else 0.0
        self._num_looks += 1
        self._num_runnable += activity.is_runnable
        self._waited_for_disk = self._waited_for_disk or activity.waits_for_disk

    def _is_hanging(self, reading: Reading) -> bool:
        limit_s = self._hung_after_s + reading.allowed_s
        if self._first_cpu_s is None:
            return self.stalled_s >= limit_s + reading.allowed_cpu_s
        if self._stopped_s >= self._hung_after_s or self.stalled_s >= _LONGEST_S:
            return True
        if self.stalled_s >= limit_s and self._cpu_s >= self._hung_after_cpu_s + reading.allowed_cpu_s:
            return True
        # Threads that would run all the time but get no processor use none, either.
        is_still = self._cpu_s <= _IDLE_SHARE * self._seen_s and 2 * self._num_runnable <= self._num_looks
        return is_still and self.stalled_s >= max(limit_s, _DISK_WAIT_S if self._waited_for_disk else 0.0)


def activity_of(process_ids: Iterable[int]) -> Activity | None:
    """What these processes do, those that have ended left out; None without Linux's /proc."""
    cpu_s, states = 0.0, b""
    for process_id in process_ids:
        try:
            cpu_s += _cpu_s(_stat(f"/proc/{process_id}/stat"))
            with os.scandir(f"/proc/{process_id}/task") as threads:
                states += b"".join(_stat(f"{thread.path}/stat")[0] for thread in threads)
        except (OSError, IndexError):
            continue
    if not states:
        return None
    return Activity(
        cpu_s,
        is_stopped=any(state in _STOPPED for state in states),
        is_runnable=any(state in _RUNNABLE for state in states),
        waits_for_disk=any(state in _WAITS_FOR_DISK for state in states),
    )


def _stat(path: str) -> list[bytes]:
    """The fields of a stat file (proc(5)) from the third on, which is the state: the name may hold anything."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _cpu_s(fields: list[bytes]) -> float:
    """utime and stime, the 14th and the 15th field, in ticks."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
