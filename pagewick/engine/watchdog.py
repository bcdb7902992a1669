"""Watchdog: tells whether an engine hangs, works on something long or has nothing to do. Imports no torch.

Its owner calls `look` from time to time. The watchdog counts how long the engine has made no progress although it has
work. That alone proves nothing: a layer of a large model may take long, and the machine may be busy with other
programs. From then on it therefore also looks at the engine's processes. An engine hangs if, for long enough,

- one of its processes is stopped, or
- they use no processor time, and wait neither for a processor nor for a disk, or
- they have used more processor time than the present work can take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagewick.engine.progress import Reading

LOOK_INTERVAL_S = 1.0
# With this limit, a hang is noticed within 10 seconds.
HUNG_AFTER_S = 8.0
# Processor time without progress after which the engine counts as hung: its threads run in an endless loop.
_HUNG_AFTER_CPU_S = 4.0
# Time that a disk may take, to read memory back from swap or to spin up.
_DISK_WAIT_S = 60.0
# No work without progress takes this long, in whatever state the processes are.
_LONGEST_S = 900.0
# Processes that use less than this share of one processor count as idle.
_IDLE_SHARE = 0.05

_STOPPED, _RUNNABLE, _WAITS_FOR_DISK = b"Tt", b"R", b"D"


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of some processes at one moment.

    cpu_s: total processor time that they have used, in seconds. is_stopped: whether a signal or a debugger has stopped
    one of them. is_runnable, waits_for_disk: whether this holds for one of their threads.
    """

    cpu_s: float
    is_stopped: bool
    is_runnable: bool
    waits_for_disk: bool


class Watchdog:
    """Judges one engine.

    is_hung: the verdict of the latest look. stalled_s: seconds without progress although there is work. is_owing:
    whether the engine had work at the latest look. read: reads the engine's progress. activity: returns the state of
    its processes, or None where the system does not tell, in which case the limits are longer.
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
        """Look at the engine. now: seconds of any clock. num_sent: number of messages that the engine was sent.

        A long time between two looks counts only in part: the calling process may have been stopped with the engine.
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
        # Since the first look at the processes: their processor time, the time that has passed, and counts of looks.
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
        # Threads that are runnable but get no processor use no processor time either; they are not idle.
        is_still = self._cpu_s <= _IDLE_SHARE * self._seen_s and 2 * self._num_runnable <= self._num_looks
        return is_still and self.stalled_s >= max(limit_s, _DISK_WAIT_S if self._waited_for_disk else 0.0)


def activity_of(process_ids: Iterable[int]) -> Activity | None:
    """Return the state of those of these processes that still exist; None without Linux's /proc."""
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
    """Return the fields of a stat file (proc(5)) from the third on, the state. The second may contain any character."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _cpu_s(fields: list[bytes]) -> float:
    """Return the sum of utime and stime, the 14th and 15th field, which are in ticks."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
