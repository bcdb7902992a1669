"""Small kernels in Triton, compiled and emulated: what the emulator reports of faulty ones, and products of matrices.

pytest runs this file in a process of its own (test_compiled_kernels.py), in which kernels are not interpreted.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.triton.ptx.values import Faulty

# Whether Triton fuses multiplications and additions unless it is told changes with its version.
OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def reverse(x_ptr, scratch_ptr, out_ptr, HAS_BARRIER: tl.constexpr, SIZE: tl.constexpr):
    """Write x backwards to out, by memory that other threads of the program have written."""
    places = tl.arange(0, SIZE)
    tl.store(scratch_ptr + places, tl.load(x_ptr + places))
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + places, tl.load(scratch_ptr + (SIZE - 1 - places)))


@triton.jit
def shift(x_ptr, out_ptr, distance, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out_ptr + places + distance, tl.load(x_ptr + places))


@triton.jit
def name_programs(out_ptr, IS_EQUAL: tl.constexpr):
    tl.store(out_ptr, 7 if IS_EQUAL else tl.program_id(0))


@triton.jit
def count_programs(out_ptr):
    tl.atomic_add(out_ptr, 1)


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, IS_TURNED: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    if IS_TURNED:
        b = tl.trans(tl.load(b_ptr + columns[:, None] * K + inner[None, :]))
    else:
        b = tl.load(b_ptr + inner[:, None] * N + columns[None, :])
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], tl.dot(a, b))


@triton.jit
def pipelined(a_ptr, b_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    """Multiply a [BLOCK, steps * BLOCK] and b [steps * BLOCK, BLOCK], loading some steps ahead."""
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(steps):
        a = tl.load(a_ptr + rows[:, None] * (steps * BLOCK) + step * BLOCK + columns[None, :])
        b = tl.load(b_ptr + (step * BLOCK + rows[:, None]) * BLOCK + columns[None, :])
        total += tl.dot(a, b)
    tl.store(out_ptr + rows[:, None] * BLOCK + columns[None, :], total)


def test_a_missing_barrier_is_a_race() -> None:
    x, scratch, out = torch.arange(256.0), torch.zeros(256), torch.zeros(256)
    reverse[(1,)](x, scratch, out, True, 256, **OPTIONS)
    assert torch.equal(out, x.flip(0))
    with pytest.raises(Faulty, match=r"a race at byte \d+ of scratch_ptr: thread .* reads; written by thread"):
        reverse[(1,)](x, scratch.zero_(), out, False, 256, **OPTIONS)


def test_no_byte_beyond_a_tensor_is_accessed() -> None:
    x, out = torch.arange(128.0), torch.zeros(130)
    shift[(1,)](x, out, 2, 128, **OPTIONS)
    assert torch.equal(out[2:], x)
    with pytest.raises(Faulty, match="bytes from the begin of out_ptr"):
        shift[(1,)](x, out, 3, 128, **OPTIONS)
    # The gap between the rows of a matrix belongs to no argument.
    with pytest.raises(Faulty, match="of out_ptr, which no argument covers"):
        shift[(1,)](x, torch.zeros(3, 100)[:, :60], 2, 128, **OPTIONS)


def test_programs_may_not_write_different_values_to_one_place() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    name_programs[(3,)](out, True, **OPTIONS)
    assert out.item() == 7
    with pytest.raises(Faulty, match=r"(a race at byte 0|different values to one place) of out_ptr"):
        name_programs[(3,)](out, False, **OPTIONS)
    count_programs[(300,)](out.zero_(), **OPTIONS)
    assert out.item() == 300
    with pytest.raises(Faulty, match="no GPU launches 1 x 65536 x 1 programs"):
        count_programs[(1, 65536)](out, **OPTIONS)


# On sm_90, warpgroups multiply tiles of 64 rows.
@pytest.mark.parametrize("num_rows", [32, 64])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_products_of_matrices(dtype: torch.dtype, is_turned: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # Small whole numbers, so that products are exact, in tf32 too.
    a, b = (torch.randint(-9, 10, size, generator=generator).to(dtype) for size in ((num_rows, 64), (64, 16)))
    out = torch.full((num_rows, 16), float("nan"))
    multiply[(1,)](a, b.t().contiguous() if is_turned else b, out, num_rows, 16, 64, is_turned, **OPTIONS)
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("num_stages", [1, 4])
def test_loads_that_run_ahead(num_stages: int, size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-9, 10, size, generator=generator).half() for size in ((size, 5 * size), (5 * size, size)))
    out = torch.full((size, size), float("nan"))
    pipelined[(1,)](a, b, out, 5, size, num_stages=num_stages, **OPTIONS)
    assert torch.equal(out, a.float() @ b.float())
