"""Limits of this process's control group on memory and CPU time, for cgroup versions 1 and 2.

https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 expresses "no limit" by a very large number.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """memory, memory_used: bytes; memory_used excludes memory that the kernel can drop. cores: may be a fraction.

    None: no limit.
    """

    memory: int | None = None
    memory_used: int | None = None
    cores: float | None = None


def read_limits(root: Path = Path("/")) -> GroupLimits:
    """Return the tightest limits of this process's group and its parents. root: the directory of /proc and /sys."""
    memory: list[tuple[int, int]] = []
    cores: list[float] = []
    for controller, path in _groups(root):
        # The directories of the group and its parents. In a container, the mount point may be the group.
        for directory in (controller / str(place).lstrip("/") for place in (path, *path.parents)):
            memory += _memory_of(directory)
            cores += _cores_of(directory)
    # The tightest limit is the one with the least memory left.
    limit, used = min(memory, key=lambda pair: pair[0] - pair[1], default=(None, None))
    return GroupLimits(limit, used, min(cores, default=None))


def _groups(root: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield (mount point, this process's path) of each relevant hierarchy."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        mount = root / "sys/fs/cgroup"
        if number == "0" and not controllers:
            # If version 1 is mounted too, version 2 is mounted in a subdirectory.
            yield (mount / "unified" if (mount / "unified").is_dir() else mount), PurePosixPath(path)
        for controller in {"memory", "cpu"} & set(controllers.split(",")):
            yield mount / controller, PurePosixPath(path)


def _memory_of(directory: Path) -> list[tuple[int, int]]:
    """Return [(limit, used)], or an empty list if there is no limit."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for limit_name, used_name in names:
        limit = _number(directory / limit_name)
        if limit is not None and limit < _NO_LIMIT:
            droppable = 0
            for line in _text(directory / "memory.stat").splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file") and value.isdigit():
                    droppable = int(value)
            return [(limit, max(0, (_number(directory / used_name) or 0) - droppable))]
    return []


def _cores_of(directory: Path) -> list[float]:
    quota, _, period = _text(directory / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _text(directory / "cpu.cfs_quota_us").strip(), _text(directory / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return [int(quota) / int(period)]
    return []


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
