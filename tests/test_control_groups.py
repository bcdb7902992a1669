"""Limits of control groups, from trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewick.control_groups import GroupLimits, read_limits

GIB = 2**30
V1_NONE = str(2**63 - 4096)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(**files: str) -> dict[str, str]:
    return {"proc/self/cgroup": "0::/a/b", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}


def v1(controllers: str = "5:memory:/pod\n3:cpu,cpuacct:/pod", **files: str) -> dict[str, str]:
    return {"proc/self/cgroup": controllers, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}


CASES = {
    "nothing at all": ({}, GroupLimits()),
    "no limits": (v2(**{"a/b/memory.max": "max", "a/b/cpu.max": "max 100000"}), GroupLimits()),
    "version 2": (
        v2(**{"a/b/memory.max": str(4 * GIB), "a/b/memory.current": str(GIB), "a/b/cpu.max": "150000 100000"}),
        GroupLimits(4 * GIB, GIB, 1.5),
    ),
    "files in the cache do not count": (
        v2(**{"a/b/memory.max": str(4 * GIB), "a/b/memory.current": str(3 * GIB),
              "a/b/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7"}),
        GroupLimits(4 * GIB, GIB),
    ),
    "the group above is tighter": (
        v2(**{"a/b/memory.max": "max", "a/memory.max": str(2 * GIB), "a/memory.current": "5",
              "a/b/cpu.max": "400000 100000", "a/cpu.max": "50000 100000"}),
        GroupLimits(2 * GIB, 5, 0.5),
    ),
    "in a container, the mount is the group": (
        v2(**{"memory.max": str(GIB), "memory.current": "0"}), GroupLimits(GIB, 0),
    ),
    "version 1": (
        v1(**{"memory/pod/memory.limit_in_bytes": str(GIB), "memory/pod/memory.usage_in_bytes": "700",
              "memory/pod/memory.stat": "total_inactive_file 200", "memory/memory.limit_in_bytes": V1_NONE,
              "cpu/pod/cpu.cfs_quota_us": "25000", "cpu/pod/cpu.cfs_period_us": "50000"}),
        GroupLimits(GIB, 500, 0.5),
    ),
    "version 1 without limits": (
        v1(**{"memory/pod/memory.limit_in_bytes": V1_NONE, "cpu/pod/cpu.cfs_quota_us": "-1",
              "cpu/pod/cpu.cfs_period_us": "100000"}),
        GroupLimits(),
    ),
    "version 2 beside version 1": (
        v1("1:memory:/x\n0::/y", **{"unified/y/cpu.max": "100000 100000", "memory/x/memory.limit_in_bytes": "9"}),
        GroupLimits(9, 0, 1.0),
    ),
    "nonsense": (v2(**{"a/b/memory.max": "lots", "a/b/cpu.max": "1000 0"}), GroupLimits()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limits(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    assert read_limits(tree(tmp_path, files)) == expected
