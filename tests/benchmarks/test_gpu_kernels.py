"""The resources of compiled kernels, their limits and their tables; without compiling anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu_kernels import (
    DOCUMENT,
    MULTIPROCESSORS,
    Resources,
    limit_seconds,
    limits_table,
    occupancy,
    resources_table,
    with_table,
)
from pagewick.kernels.triton.variant import Variant, Workload

RESOURCES = Resources("norm", "rows bf16 sm_80", "sm_80", 64, 0, 2048, 4, True, 0.5)
VARIANT = Variant("rows bf16 sm_80", None, {}, {}, uses_tensor_cores=True)


@pytest.mark.parametrize(
    ("target", "num_registers", "shared_bytes", "num_warps", "expected"),
    [
        # 65,536 registers make 8 programs of 128 threads with 64; 48 KiB and 1 KiB more make 3 in 164 KiB.
        ("sm_80", 64, 0, 4, 32 / 64),
        ("sm_80", 57, 48 * 1024, 4, 12 / 64),
        ("sm_89", 32, 0, 4, 48 / 48),
        ("sm_90", 255, 1024, 8, 8 / 64),
        # 512 registers a lane: two waves on each of the four SIMD units.
        ("gfx942", 256, 0, 4, 8 / 32),
        ("gfx942", 128, 64 * 1024, 4, 4 / 32),
    ],
)
def test_occupancy(target: str, num_registers: int, shared_bytes: int, num_warps: int, expected: float) -> None:
    assert occupancy(MULTIPROCESSORS[target], num_registers, shared_bytes, num_warps) == expected


def test_the_limits_that_a_variant_breaks() -> None:
    assert RESOURCES.faults(VARIANT) == []
    broken = replace(RESOURCES, num_spills=200, shared_bytes=164 * 1024, uses_tensor_cores=False)
    assert [fault.partition(" sm_80 ")[2] for fault in broken.faults(VARIANT)] == [
        "spills registers (200) on sm_80",
        "needs 167936 bytes of shared memory on sm_80",
        "does not use tensor cores on sm_80",
    ]
    assert replace(RESOURCES, uses_tensor_cores=False).faults(replace(VARIANT, uses_tensor_cores=False)) == []


def test_tables() -> None:
    assert resources_table([RESOURCES]).endswith("| norm | rows bf16 | sm_80 | 64 | 2.0 KiB | 50% |")
    work = Workload("norm", "2 rows", 3_350_000, 10**9)
    assert limit_seconds(work, "H100") == pytest.approx(1.0112e-6, rel=1e-4)
    assert limit_seconds(replace(work, on_tensor_cores=False), "H100") == pytest.approx(1e-6)
    assert "| norm | 2 rows | 3.4 | 1.00 | 1.0 µs |" in limits_table([work])
    assert with_table("a <!-- x --> old <!-- /x --> b", "x", "new") == "a <!-- x -->\n\nnew\n\n<!-- /x --> b"
    with pytest.raises(ValueError, match="lacks"):
        with_table("a", "x", "new")


def test_the_document_has_the_marks() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(with_table(text, name, "new") for name in ("resources", "limits"))
