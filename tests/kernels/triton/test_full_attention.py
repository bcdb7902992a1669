"""Attention within sequences in Triton, interpreted: against the definition in float64, and bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.kernels import batch_invariance, fused, reference
from tests.deep import IS_DEEP
from tests.kernels.triton.comparison import numbers

full = pytest.importorskip("pagewick.kernels.triton.full_attention")
# The interpreter computes like NumPy, which warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Half a unit in the last place of 1, twice where the interpreter cuts off, and in float32 what long sums add to it.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Sequences of several tiles of 128 rows and 64 keys, of one whole tile, of a part of one, of no row, and of one row.
LENGTHS = (0, 200, 264, 264, 271, 272)
SHAPES = [
    (torch.float32, 72), (torch.bfloat16, 80), (torch.bfloat16, 72), (torch.float16, 64), (torch.float16, 20),
]  # fmt: skip


def heads_of(cu_seqlens: tuple[int, ...], dtype: torch.dtype, head_dim: int, num_heads: int = 2) -> list[Tensor]:
    """q, k and v [T, H, D], which lie apart, as in a fused product."""
    fused_product = numbers(cu_seqlens[-1], 3 * num_heads * head_dim).to(dtype)
    return [part.unflatten(1, (num_heads, head_dim)) for part in fused_product.chunk(3, dim=1)]


def assert_attended(found: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], scale: float) -> None:
    """That a result is exact but for its own rounding and, with 16 bits, that of the weights and of their sum."""
    assert found.dtype == q.dtype and found.is_contiguous()
    q, k, v = q.double(), k.double(), v.double()
    expected = reference.full_attention(q, k, v, cu_seqlens, scale)
    sizes = reference.full_attention(q, k, v.abs(), cu_seqlens, scale)
    rounding = ROUNDING[found.dtype]
    tolerance = 1e-5 + rounding * expected.abs() + (0.0 if found.dtype == torch.float32 else 1.05 * rounding) * sizes
    error = (found.double() - expected).abs()
    assert bool((error <= tolerance).all()), f"an error of {(error - tolerance).max().item()} more than tolerated"


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES, ids=str)
def test_each_row_sees_all_rows_of_its_sequence(dtype: torch.dtype, head_dim: int) -> None:
    heads, scale = heads_of(LENGTHS, dtype, head_dim), head_dim**-0.5
    assert_attended(full.full_attention(*heads, LENGTHS, scale), *heads, LENGTHS, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if IS_DEEP else [torch.float32])
@pytest.mark.parametrize("head_dim", [*full.HEAD_DIMS, 1, 17, 65, 73, 127])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    heads, cu_seqlens = heads_of((0, 70, 83), dtype, head_dim, num_heads=3), (0, 70, 83)
    assert_attended(full.full_attention(*heads, cu_seqlens, 0.4), *heads, cu_seqlens, 0.4)


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES[:2], ids=str)
def test_a_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = heads_of(LENGTHS, dtype, head_dim)
    together = full.full_attention(q, k, v, LENGTHS, 0.3)
    for start, stop in ((0, 200), (200, 264), (271, 272)):
        alone = full.full_attention(q[start:stop], k[start:stop], v[start:stop], (0, stop - start), 0.3)
        assert torch.equal(alone, together[start:stop])


@pytest.mark.parametrize("head_dim", [72, 112])
def test_no_number_of_another_sequence_or_tensor_is_taken(head_dim: int) -> None:
    """Sequences beside it are full of NaN, as is what lies between heads and rows of a wider tensor."""
    wide = torch.full((90, 5, head_dim + 8), float("nan"))
    for first in range(3):
        wide[17:80, first : first + 3, :head_dim] = numbers(63, 3, head_dim, seed=first)
    apart = [wide[:, first : first + 3, :head_dim] for first in range(3)]
    rows = [x[:, :, :head_dim].contiguous() for x in apart]
    # Heads that follow each other in rows that do not, and heads that lie apart.
    spaced = [torch.cat((x.flatten(1), torch.full((90, head_dim), float("nan"))), 1)[:, :-head_dim] for x in rows]
    inside, lengths = slice(17, 80), (0, 17, 80, 90)
    for heads in (apart, rows, [x.unflatten(1, (3, head_dim)) for x in spaced]):
        found = full.full_attention(*heads, lengths, 0.2)
        assert_attended(found[inside], *(x[inside] for x in rows), (0, 63), 0.2)
        assert found[:17].isnan().all() and found[80:].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = heads_of((0, 150), torch.float32, 32)
    k[:, 0] += 40 * k[:, 0].sign()
    found = full.full_attention(300 * q, k, v, (0, 150), 1.0)
    assert_attended(found, 300 * q, k, v, (0, 150), 1.0)


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(16, (16, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (104, (128, 0)), (20, (32, 0))],
)
def test_heads_are_filled_up_as_little_as_tensor_cores_allow(head_dim: int, parts: tuple[int, int]) -> None:
    assert full.parts_of(head_dim) == parts


def test_registers_are_limited_where_two_programs_then_fit() -> None:
    limits = {
        (variant.targets[0], variant.constexprs["HEAD_DIM"]): variant.options.get("maxnreg")
        for variant in full.VARIANTS
        if variant.uses_tensor_cores
    }
    limited = {key for key, limit in limits.items() if limit == 128}
    assert limited == {("sm_90", size) for size in full.HEAD_DIMS if size <= 96}
    assert {limits[key] for key in limits.keys() - limited} == {None}


def test_calls_without_rows_or_heads() -> None:
    for cu_seqlens in ((0,), (0, 0, 0)):
        nothing = torch.empty(0, 2, 72)
        assert full.full_attention(nothing, nothing, nothing, cu_seqlens, 1.0).shape == (0, 2, 72)
    nothing = torch.empty(3, 0, 72)
    assert full.full_attention(nothing, nothing, nothing, (0, 3), 1.0).shape == (3, 0, 72)


@pytest.mark.parametrize("cu_seqlens", [(), (0,), (0, 4), (1, 5), (0, 3, 2, 5)])
def test_sequences_must_cover_the_rows(cu_seqlens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of rows, 5"):
        full.full_attention(*heads_of((0, 5), torch.float32, 16), cu_seqlens, 1.0)


def test_other_calls_pass_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is alone in its call, so that they are not refused with --batch-invariant either."""
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    q, k, v = heads_of((0, 9), torch.float32, 130)
    assert torch.equal(full.full_attention(q, k, v, (0, 9), 0.1), fused.full_attention(q, k, v, (0, 9), 0.1))
    q, k, v = (x.double() for x in heads_of((0, 9), torch.float32, 16))
    for heads, scale in (((q, k, v), 0.1), ((q.half(), k.float(), v), 0.1)):
        assert torch.equal(full.full_attention(*heads, (0, 9), scale), reference.full_attention(*heads, (0, 9), scale))
    negative = full.full_attention(q.float(), k.float(), v.float(), (0, 9), -0.5)
    torch.testing.assert_close(negative.double(), reference.full_attention(q, k, v, (0, 9), -0.5), atol=1e-5, rtol=0)
