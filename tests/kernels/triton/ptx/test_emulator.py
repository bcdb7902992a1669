"""The emulator of PTX: instructions by hand, and faults of programs that it must report."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton.ptx.parsing import parse
from tests.kernels.triton.ptx.snippets import FRAME, run
from tests.kernels.triton.ptx.sums import check_sums
from tests.kernels.triton.ptx.values import Faulty, fused_float32, fused_float64, perturbed


def value_of(instructions: str, num: int = 1) -> list[int]:
    """Return what some instructions leave in %r9, in the first threads."""
    out = torch.zeros(32, dtype=torch.int32)
    return [value & 0xFFFFFFFF for value in run(f"{instructions} st.global.b32 [%rd2], %r9;", out)[:num].tolist()]


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("div.s32 %r9, -7, 2;", -3), ("rem.s32 %r9, -7, 2;", -1), ("div.u32 %r9, -7, 2;", 0x7FFFFFFC),
        ("shr.s32 %r9, -8, 40;", -1), ("shr.u32 %r9, -8, 40;", 0), ("shl.b32 %r9, 1, 32;", 0),
        ("bfe.u32 %r9, 0xABCD, 4, 8;", 0xBC), ("bfe.s32 %r9, 0xABCD, 4, 8;", 0xBC - 256),
        ("bfe.s32 %r9, 0x80000000, 28, 8;", -8), ("bfi.b32 %r9, 0xF, 0x1000, 4, 4;", 0x10F0),
        ("prmt.b32 %r9, 0x84838281, 0x88878685, 0x7430;", 0x88858481), ("prmt.b32 %r9, 0x80, 0, 0x4448;", 0xFF),
        ("add.f16x2 %r9, 0x3C004000, 0x3C003C00;", 0x40004200),
        ("fma.rn.bf16x2 %r9, 0x3F804000, 0x40003F80, 0x3F80;", 0x40004040),
        ("lop3.b32 %r9, 0xF0F0, 0xCCCC, 0xAAAA, 0x96;", 0xF0F0 ^ 0xCCCC ^ 0xAAAA),
        ("mul.wide.s16 %r9, -3, 5;", -15), ("mul.hi.u32 %r9, 0x80000000, 6;", 3),
        ("cvt.rzi.s32.f32 %r9, 0fC0200000;", -2), ("cvt.rni.s32.f32 %r9, 0f40200000;", 2),
        ("cvt.rzi.s32.f32 %r9, 0f7FC00000;", 0), ("cvt.rzi.s32.f32 %r9, 0f50000000;", 0x7FFFFFFF),
        ("cvt.rn.bf16x2.f32 %r9, 0f3F800000, 0f3F808000;", 0x3F803F80),
        ("cvt.rn.f16x2.f32 %r9, 0f3F800000, 0f40000000;", 0x3C004000),
        ("max.f32 %r9, 0f80000000, 0f00000000;", 0), ("min.f32 %r9, 0f7FC00000, 0f3F800000;", 0x3F800000),
        ("max.NaN.f32 %r9, 0f7FC00000, 0f3F800000;", 0x7FFFFFFF),
        ("setp.lt.f32 %p1, 0f7FC00000, 0f0; selp.b32 %r9, 1, 0, %p1;", 0),
        ("setp.ltu.f32 %p1, 0f7FC00000, 0f0; selp.b32 %r9, 1, 0, %p1;", 1),
        ("mov.b32 {%rs1, %rs2}, 0x12345678; mov.b32 %r9, {%rs2, %rs1};", 0x56781234),
        ("cvt.s8.s32 %rs1, 200; cvt.s32.s16 %r9, %rs1;", -56), ("mul.ftz.f32 %r9, 0f00800000, 0f3F000000;", 0),
    ],
)  # fmt: skip
def test_instructions(instructions: str, expected: int) -> None:
    assert value_of(instructions) == [expected & 0xFFFFFFFF]


def test_exchanges_in_a_warp() -> None:
    lanes = list(range(32))
    assert value_of("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;", 32) == [lane ^ 5 for lane in lanes]
    assert value_of("shfl.sync.up.b32 %r9, %r1, 3, 0, -1;", 32) == [lane - 3 if lane >= 3 else lane for lane in lanes]
    assert value_of("shfl.sync.down.b32 %r9, %r1, 3, 31, -1;", 32) == [
        min(lane + 3, 31) if lane < 29 else lane for lane in lanes
    ]
    assert value_of("shfl.sync.idx.b32 %r9, %r1, 7, 31, -1;", 32) == [7] * 32
    assert value_of("redux.sync.add.s32 %r9, %r1, -1;", 32) == [sum(lanes)] * 32
    assert value_of("setp.lt.u32 %p1, %r1, 3; vote.sync.ballot.b32 %r9, %p1, -1;") == [7]


def test_sums_of_products_are_rounded_once() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 2000)).astype(np.float32)
    c = (-a.astype(np.float64) * b).astype(np.float32) * generator.choice([1, 2**-20, 2**25], 2000).astype(np.float32)
    assert np.array_equal(fused_float32(a, b, c), [_exact(*each, np.float32) for each in zip(a, b, c, strict=True)])
    wide = [numbers.astype(np.float64) * (1 + 2**-40) for numbers in (a, b, c)]
    assert np.array_equal(fused_float64(*wide), [_exact(*each, np.float64) for each in zip(*wide, strict=True)])


def _exact(a: float, b: float, c: float, dtype: type[np.floating]) -> np.floating:
    """Return a * b + c, rounded once: of the neighbours of the sum, the nearest to the exact fraction."""
    from fractions import Fraction

    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = dtype(float(exact)) if dtype is np.float64 else dtype(np.float64(float(exact)))
    candidates = [near, np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf))]
    return min(candidates, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(f"u{each.nbytes}")) & 1))


def test_approximations_are_off_by_as_much_as_they_may() -> None:
    x = np.linspace(1, 2, 1000, dtype=np.float32)
    error = perturbed(x, x, 2).view(np.int32) - x.view(np.int32)
    assert set(error.tolist()) == {-2, -1, 0, 1, 2}
    assert np.array_equal(perturbed(x, x, 2), perturbed(x, x, 2))


def test_sums_that_differ_between_threads_are_found() -> None:
    exchange = "shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;"
    check_sums(
        parse(FRAME.format(threads=32, body=f"{exchange} add.f32 %r4, %r2, %r3; fma.rn.f32 %r5, %r3, %r3, %r4;"))
    )
    with pytest.raises(Faulty, match=r"threads get different sums \(fma.rn.f32 %r4, %r1, %r1, %r3; in kernel\)"):
        check_sums(parse(FRAME.format(threads=32, body=f"{exchange} fma.rn.f32 %r4, %r1, %r1, %r3;")))


def test_registers_of_a_few_instructions() -> None:
    body = """
        { .reg .b32 tmp; mov.b64 {tmp, %r3}, 0x700000002; }
        {
        .reg .s8 s<4>;
        .reg .f32 f<2>;
        mov.b32 {s0, s1, s2, s3}, 0x04FD0201;
        cvt.rn.f32.s8 f1, s2;
        cvt.rzi.s32.f32 %r9, f1;
        }
        add.s32 %r9, %r9, %r3;
    """
    assert value_of(body) == [4]


def test_threads_that_go_apart_come_together() -> None:
    body = """
        mov.b32 %r9, 0;
        $L_loop:
        add.s32 %r9, %r9, 1;
        setp.le.u32 %p1, %r9, %r1;
        @%p1 bra $L_loop;
        redux.sync.max.u32 %r10, %r9, -1;
        add.s32 %r9, %r9, %r10;
        st.global.b32 [%rd2], %r9;
    """
    assert run(body, torch.zeros(32, dtype=torch.int32)).tolist() == [lane + 33 for lane in range(32)]


FAULTS = {
    "an access where": "st.global.b32 [4], %r1;",
    "bytes from the begin of out": "st.global.b32 [%rd2 + 128], %r1;",
    "not aligned": "ld.global.v2.b32 {%r3, %r4}, [%rd1 + 4];",
    "different values to one place": "st.global.b32 [%rd1], %r1;",
    "a race at byte 124 of out": "st.global.b32 [%rd2], %r1; ld.global.b32 %r3, [%rd1 + 124];",
    "beyond the 64 bytes of shared memory": "st.shared.b32 [64], %r1;",
    "a race at byte 0 of shared memory": "shl.b32 %r3, %r1, 1; and.b32 %r3, %r3, 60;"
    "setp.lt.u32 %p1, %r1, 1; @%p1 st.shared.b32 [0], %r1; ld.shared.b32 %r4, [0];",
    "is not known": "foo.b32 %r1, %r2;",
    "a copy that is not known": "cp.async.bulk.shared.global [0], [%rd1], 16;",
    "a fence that is not known": "fence.proxy.tensormap;",
    "that never come": "setp.lt.u32 %p1, %r1, 5; @%p1 bra $L_end; bar.warp.sync -1; $L_end:\n",
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message: str) -> None:
    body = FAULTS[message].replace(" $L_end:", "\n$L_end:")
    with pytest.raises(Faulty, match=message):
        run(body, torch.zeros(32, dtype=torch.int32), shared_bytes=64)


def test_programs_race_with_each_other_whatever_barriers_they_pass() -> None:
    body = "setp.eq.u32 %p1, %r2, 1; bar.sync 0; @%p1 st.global.b32 [%rd2], %r2; bar.sync 0; ld.global.b32 %r3, [%rd2];"
    assert run(body.replace("%r2, 1;", "%r2, 0;"), torch.zeros(32, dtype=torch.int32), programs=1).sum() == 0
    with pytest.raises(Faulty, match="thread 0 of program 0 after 2 barriers reads; written by thread 0 of program 1"):
        run(body, torch.zeros(32, dtype=torch.int32), programs=2)


def test_atomic_operations_on_shared_memory() -> None:
    """Threads of several warps count in each program's own memory; what they read without a barrier is a race."""
    body = "@%p1 st.shared.b32 [4], 5; bar.sync 0; atom.shared.add.u32 %r9, [4], 2; bar.sync 0; ld.shared.b32 %r9, [4];"
    body = f"setp.eq.u32 %p1, %r1, 7; {body} st.global.b32 [%rd2], %r9;"
    options = {"threads": 64, "programs": 2, "shared_bytes": 64}
    assert run(body, torch.zeros(64, dtype=torch.int32), **options).tolist() == [5 + 2 * 64] * 64
    with pytest.raises(Faulty, match=r"a race at byte 4 of shared memory: thread .* reads"):
        run(body.replace("2; bar.sync 0;", "2;"), torch.zeros(64, dtype=torch.int32), **options)
    with pytest.raises(Faulty, match="beyond the 64 bytes of shared memory"):
        run("atom.shared.add.u32 %r9, [64], 2;", torch.zeros(32, dtype=torch.int32), shared_bytes=64)


def test_copies_arrive_when_they_are_waited_for() -> None:
    """A thread that reads too early gets the old value; one that reads another thread's copy needs a barrier."""
    begin = "shl.b32 %r4, %r1, 2; cp.async.ca.shared.global [%r4], [%rd2], 4, 4; cp.async.commit_group;"
    end = "ld.shared.b32 %r9, [%r4]; bar.sync 0; st.global.b32 [%rd2], %r9;"
    numbers = list(range(5, 37))

    def copied(between: str) -> list[int]:
        return run(begin + between + end, torch.tensor(numbers, dtype=torch.int32), shared_bytes=128).tolist()

    assert copied("cp.async.wait_group 0;") == numbers
    assert copied("cp.async.wait_group 1;") == [-1] * 32
    turned = "sub.s32 %r4, 124, %r4;"
    assert copied(f"cp.async.wait_group 0; bar.sync 0; {turned}") == numbers[::-1]
    with pytest.raises(Faulty, match="a race"):
        copied(f"cp.async.wait_group 0; {turned}")


def test_matrices_and_tensor_cores() -> None:
    """A product of 16 x 16 and 16 x 8 halves; the warp loads both from shared memory."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (16, 16), generator=generator).half()
    b = torch.randint(-8, 9, (16, 8), generator=generator).half()
    memory = torch.cat([a.flatten(), b.flatten(), torch.zeros(256).half()])
    body = """
        shl.b32 %r3, %r1, 4;
        mad.wide.u32 %rd3, %r1, 16, %rd1;
        ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3];
        st.shared.v4.b32 [%r3], {%r10, %r11, %r12, %r13};
        setp.lt.u32 %p1, %r1, 16;
        @%p1 ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3 + 512];
        @%p1 st.shared.v4.b32 [%r3 + 512], {%r10, %r11, %r12, %r13};
        bar.sync 0;
        and.b32 %r4, %r1, 15;
        shl.b32 %r4, %r4, 5;
        and.b32 %r5, %r1, 16;
        add.s32 %r4, %r4, %r5;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r4];
        and.b32 %r6, %r1, 15;
        shl.b32 %r6, %r6, 4;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r6 + 512];
        mov.b32 %r16, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13},
            {%r14, %r15}, {%r16, %r16, %r16, %r16};
        shl.b32 %r7, %r1, 3;
        cvt.u64.u32 %rd4, %r7;
        add.s64 %rd4, %rd1, %rd4;
        st.global.v2.b32 [%rd4 + 768], {%r20, %r21};
        st.global.v2.b32 [%rd4 + 1024], {%r22, %r23};
    """.replace(",\n            ", ", ")
    found = run(body, memory, shared_bytes=1024)[384:].view(torch.float32)
    assert torch.equal(found[: 16 * 8].view(16, 8), a.float() @ b.float())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_matrices_stored_by_a_warp(is_transposed: bool) -> None:
    """Thread 4 r + c / 2 has columns c and c + 1 of row r of each matrix. Here, pairs of rows are turned round."""
    body = f"""
        mad.wide.u32 %rd3, %r1, 8, %rd1;
        ld.global.v2.b32 {{%r3, %r4}}, [%rd3];
        shl.b32 %r5, %r1, 4;
        xor.b32 %r5, %r5, 16;
        stmatrix.sync.aligned.m8n8.x2{".trans" if is_transposed else ""}.shared.b16 [%r5], {{%r3, %r4}};
        bar.sync 0;
        shl.b32 %r6, %r1, 3;
        ld.shared.v2.b32 {{%r3, %r4}}, [%r6];
        st.global.v2.b32 [%rd3], {{%r3, %r4}};
    """
    numbers = torch.arange(128, dtype=torch.int16)
    found = run(body, numbers.clone(), shared_bytes=512).view(16, 8).tolist()
    expected = [[0] * 8 for _ in range(16)]
    for thread in range(32):
        for matrix in range(2):
            for half in range(2):
                row, column = thread // 4, thread % 4 * 2 + half
                if is_transposed:
                    row, column = column, row
                expected[(8 * matrix + row) ^ 1][column] = 4 * thread + 2 * matrix + half
    assert found == expected
