"""Products of warpgroups (wgmma) run beside the program: when results arrive, and faults of programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton.ptx.snippets import END, FENCES, NUM_THREADS, filled, product, registers, run, stored
from tests.kernels.triton.ptx.values import Array, Faulty

# a [64, 16] and then b [8, 16] in bfloat16: blocks of 8 rows of 32 bytes, without a swizzle that changes anything, as
# two halves of a row are equal.
A_BYTES, IMAGE_BYTES = 2048, 4096
DESCRIPTORS = f"mov.b64 %rd10, {256 >> 4 << 32 | 3 << 62}; mov.b64 %rd11, {A_BYTES >> 4 | 256 >> 4 << 32 | 3 << 62};"
ZEROS = "".join(f"mov.b32 %r{1000 + number}, 0;" for number in range(4))
WGMMA_FENCE, PROXY_FENCE, BARRIER = "wgmma.fence.sync.aligned;", "fence.proxy.async;", "bar.sync 0;"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
MULTIPLY = product("bf16", "%rd10", "%rd11", "1, 1, 1, 0, 0", 8)
FRAGMENT = registers(20, 4)
MULTIPLY_FRAGMENT = product("bf16", FRAGMENT, "%rd11", "1, 1, 1, 0", 8)
# Products with accumulators of their own.
OTHER = MULTIPLY_FRAGMENT.replace("%r100", "%r110")
FILL = filled(IMAGE_BYTES)
COPY = """
    shl.b32 %r3, %r1, 4;
    mad.wide.u32 %rd3, %r1, 16, %rd1;
    cp.async.cg.shared.global [%r3], [%rd3], 16;
    cp.async.cg.shared.global [%r3 + 2048], [%rd3 + 2048], 16;
    cp.async.commit_group;
"""
COPY_END = "cp.async.wait_group 0;"


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-3, 4, (rows, 8), generator=generator).bfloat16() for rows in (64, 8))
    return torch.cat([a, a], 1), torch.cat([b, b], 1)


def run_parts(*parts: str, threads: int = NUM_THREADS) -> Array:
    """Run parts of a kernel, and return the accumulators [threads, 4]."""
    a, b = matrices()
    memory = torch.zeros(IMAGE_BYTES + 4 * 64 * 8, dtype=torch.uint8)
    memory[:A_BYTES] = a.view(torch.uint8).flatten()
    memory[A_BYTES : A_BYTES + 256] = b.view(torch.uint8).flatten()
    body = "\n".join([DESCRIPTORS, *parts, stored(8, IMAGE_BYTES)])
    found = run(body, memory, threads=threads, shared_bytes=IMAGE_BYTES)[IMAGE_BYTES:]
    numbers: Array = found.view(torch.float32).view(NUM_THREADS, 4).numpy()
    return numbers


def expected() -> Array:
    """Return the accumulators of a product: those of thread 5 are of rows 1 and 9, and of columns 2 and 3."""
    a, b = matrices()
    whole = (a.double() @ b.double().t()).numpy()
    lanes = np.arange(NUM_THREADS)
    rows, columns = lanes // 32 * 16 + lanes % 32 // 4, lanes % 4 * 2
    places = [(rows, columns), (rows, columns + 1), (rows + 8, columns), (rows + 8, columns + 1)]
    return np.stack([whole[place] for place in places], axis=1)


READ, WRITE = "mov.b32 %r5, %r1002;", "mov.b32 %r1002, 0;"
OVERWRITE = f"st.shared.b32 [{A_BYTES}], 77;"
FIRST_WARP = "setp.lt.u32 %p1, %r1, 32;"


def test_results_arrive_when_they_are_waited_for() -> None:
    assert np.array_equal(run_parts(FILL, ZEROS, FENCES, MULTIPLY, END), expected())
    # Products of one shape add to the same accumulators without a wait or a fence between them.
    assert np.array_equal(run_parts(FILL, ZEROS, FENCES, MULTIPLY, COMMIT, MULTIPLY, END), 2 * expected())
    # Each thread may fence what it wrote before the barrier, or all of the warpgroup after it.
    assert np.array_equal(run_parts(FILL, ZEROS, BARRIER, PROXY_FENCE, WGMMA_FENCE, MULTIPLY, END), expected())
    assert np.array_equal(run_parts(COPY, ZEROS, COPY_END, FENCES, MULTIPLY, END), expected())
    # After the wait and a barrier, shared memory is free again.
    assert np.array_equal(run_parts(FILL, ZEROS, FENCES, MULTIPLY, END, BARRIER, OVERWRITE), expected())


def test_groups_are_waited_for_one_after_the_other() -> None:
    second = MULTIPLY.replace("%r100", "%r110")
    start = [FILL, ZEROS, ZEROS.replace("%r100", "%r110"), FENCES, MULTIPLY, COMMIT, second, COMMIT]
    wait_for_first = "wgmma.wait_group.sync.aligned 1;"
    assert np.array_equal(run_parts(*start, wait_for_first, READ), expected())
    with pytest.raises(Faulty, match="%r1102 is accessed while a product in flight has it"):
        run_parts(*start, wait_for_first, READ.replace("%r1002", "%r1102"))


def test_options_of_a_product() -> None:
    garbage = ZEROS.replace("0;", "0x7FC00000;")
    for scale in ("0", "%p2"):
        plain = product("bf16", "%rd10", "%rd11", f"{scale}, 1, 1, 0, 0", 8)
        assert np.array_equal(run_parts("mov.pred %p2, 0;", FILL, garbage, FENCES, plain, END), expected())
    minus = product("bf16", "%rd10", "%rd11", "1, -1, 1, 0, 0", 8)
    assert np.array_equal(run_parts(FILL, ZEROS, FENCES, minus, END), -expected())


FAULTS = {
    "no wgmma.fence after %r1000 was accessed": [FILL, ZEROS, PROXY_FENCE, BARRIER, MULTIPLY],
    "no wgmma.fence after %r1002 was accessed": [FILL, ZEROS, FENCES, MULTIPLY, END, READ, MULTIPLY],
    "no wgmma.fence after %r20 was accessed": [FILL, ZEROS, FENCES, "mov.b32 %r20, 0;", MULTIPLY_FRAGMENT],
    "%r1002 is accessed while a product in flight has it": [FILL, ZEROS, FENCES, MULTIPLY, COMMIT, READ],
    "%r1002 is accessed while a product in": [FILL, ZEROS, FENCES, MULTIPLY, COMMIT, WRITE],
    "%r1002 is accessed while a product": [FILL, ZEROS, FENCES, MULTIPLY, WAIT, READ],
    "%r20 is accessed": [FILL, ZEROS, FENCES, MULTIPLY_FRAGMENT, COMMIT, "mov.b32 %r20, 0;"],
    "no proxy fence between a write and a product's read of byte 0": [FILL, ZEROS, BARRIER, WGMMA_FENCE, MULTIPLY],
    "no proxy fence": [FILL, FIRST_WARP, BARRIER, f"@%p1 {PROXY_FENCE}", ZEROS, WGMMA_FENCE, MULTIPLY],
    "no proxy fence between": [COPY, PROXY_FENCE, COPY_END, ZEROS, BARRIER, WGMMA_FENCE, MULTIPLY],
    "a race at byte": [FILL, ZEROS, PROXY_FENCE, WGMMA_FENCE, MULTIPLY],
    "a write during a product's read of byte 2048": [FILL, ZEROS, FENCES, MULTIPLY, COMMIT, BARRIER, OVERWRITE, WAIT],
    "a race at byte 2048": [FILL, ZEROS, FENCES, MULTIPLY, END, OVERWRITE],
    "different matrix descriptors": [FILL, ZEROS, FENCES, "cvt.u64.u32 %rd10, %r1;", MULTIPLY],
    "a matrix descriptor that is not known": [FILL, ZEROS, FENCES, "mov.b64 %rd10, 0x4000;", MULTIPLY],
    "first row of its swizzle's pattern": [FILL, ZEROS, FENCES, f"mov.b64 %rd10, {128 >> 4 | 3 << 62};", MULTIPLY],
    "belongs to a product of another shape": [
        FILL, ZEROS, FENCES, product("bf16", "%rd10", "%rd11", "1, 1, 1, 0, 0", 16), MULTIPLY,
    ],
    "is an accumulator of a product in flight": [
        FILL, ZEROS, FENCES, MULTIPLY, OTHER.replace(FRAGMENT, registers(1000, 4)),
    ],
    "options are not known": [FILL, ZEROS, FENCES, product("bf16", "%rd10", "%rd11", "1, 1, 1, 0", 8)],
    "a product that is not known": [FILL, ZEROS, FENCES, MULTIPLY.replace("bf16.bf16", "bf16.f16")],
    "that never come": [FILL, ZEROS, FENCES, FIRST_WARP, "@%p1 bra $L_end;", MULTIPLY, "$L_end:"],
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message: str) -> None:
    with pytest.raises(Faulty, match=message):
        run_parts(*FAULTS[message])


def test_a_warpgroup_has_four_warps() -> None:
    with pytest.raises(Faulty, match="a warpgroup"):
        run_parts(ZEROS, FENCES, MULTIPLY, threads=64)
