"""Full attention and the rotation of its heads: the definition, PyTorch's fused kernel, and transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from pagewick import kernels
from pagewick.kernels import fused, reference, reference_full
from pagewick.kernels.options import Rotation

# One sequence over a block of queries; sequences of equal and of other lengths, one of them empty; one row.
CASES = [(0, 300), (0, 64, 128, 137, 137, 201), (0, 5, 10, 15), (0, 1)]
SCALE = 0.3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def heads_of(cu_seqlens: tuple[int, ...], dtype: torch.dtype, head_dim: int = 20) -> list[Tensor]:
    """q, k and v [T, 3, head_dim], which lie apart, as in a fused product."""
    generator = torch.Generator().manual_seed(len(cu_seqlens))
    qkv = torch.randn(cu_seqlens[-1], 9 * head_dim, generator=generator).to(dtype)
    return [part.unflatten(1, (3, head_dim)) for part in qkv.chunk(3, dim=1)]


def by_formula(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
    """In float64, each row by itself."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        start = max(bound for bound in cu_seqlens if bound <= row)
        stop = min(bound for bound in cu_seqlens if bound > row)
        scores = torch.einsum("hd,khd->hk", q[row].double(), k[start:stop].double()) * SCALE
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[start:stop].double())
    return out


@pytest.mark.parametrize("cu_seqlens", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("function", [reference.full_attention, fused.full_attention, kernels.full_attention])
def test_each_row_sees_all_rows_of_its_sequence(
    function: object, dtype: torch.dtype, tolerance: float, cu_seqlens: tuple[int, ...]
) -> None:
    assert callable(function)
    q, k, v = heads_of(cu_seqlens, dtype)
    found = function(q, k, v, cu_seqlens, SCALE)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), by_formula(q, k, v, cu_seqlens), atol=tolerance, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("function", [reference.full_attention, fused.full_attention, kernels.full_attention])
def test_a_bias_is_added_to_the_scores(function: object, dtype: torch.dtype, tolerance: float) -> None:
    assert callable(function)
    bounds = (0, 64, 128, 131, 201)
    q, k, v = heads_of(bounds, dtype)
    bias = torch.randn(3, 90, 90, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = function(q, k, v, bounds, SCALE, bias)
    for start, stop in itertools.pairwise(bounds):
        rows = slice(start, stop)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[rows].double()) * SCALE
        scores += bias[:, : stop - start, : stop - start].double()
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows].double())
        torch.testing.assert_close(found[rows].double(), expected, atol=tolerance, rtol=0)
        alone = function(q[rows], k[rows], v[rows], (0, stop - start), SCALE, bias)
        assert torch.equal(alone, found[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_the_number_of_threads_nor_on_other_sequences(dtype: torch.dtype) -> None:
    cu_seqlens = (0, 700, 717, 734)
    q, k, v = heads_of(cu_seqlens, dtype, head_dim=72)
    torch.set_num_threads(1)
    expected = kernels.full_attention(q, k, v, cu_seqlens, SCALE)
    for number in (2, 3, 5):
        torch.set_num_threads(number)
        assert torch.equal(kernels.full_attention(q, k, v, cu_seqlens, SCALE), expected)
    for start, stop in ((0, 700), (717, 734)):
        alone = kernels.full_attention(q[start:stop], k[start:stop], v[start:stop], (0, stop - start), SCALE)
        assert torch.equal(alone, expected[start:stop])


def test_the_definition_computes_few_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cu_seqlens = (0, 7, 40)
    q, k, v = heads_of(cu_seqlens, torch.float32)
    expected = reference.full_attention(q, k, v, cu_seqlens, SCALE)
    monkeypatch.setattr(reference_full, "_MAX_SCORES", 3 * 33 * 4)
    torch.testing.assert_close(reference.full_attention(q, k, v, cu_seqlens, SCALE), expected)


@pytest.mark.parametrize("cu_seqlens", [(), (0,), (0, 4), (1, 5), (0, 3, 2, 5)])
@pytest.mark.parametrize("function", [reference.full_attention, fused.full_attention])
def test_sequences_must_cover_the_rows(function: object, cu_seqlens: tuple[int, ...]) -> None:
    assert callable(function)
    q, k, v = heads_of((0, 5), torch.float32)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of rows, 5"):
        function(q, k, v, cu_seqlens, SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_heads_have_the_bits_of_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_full, "_ROTATED_ROWS", 4)
    q, k, _ = heads_of((0, 11), dtype)
    theta = torch.randn(11, 10, generator=torch.Generator().manual_seed(2)) * 9
    twice = torch.cat((theta, theta), dim=-1)
    expected = apply_rotary_pos_emb_vision(q, k, twice.cos(), twice.sin())
    for x, theirs in zip((q, k), expected, strict=True):
        assert torch.equal(kernels.rotate_heads(x, Rotation(theta.cos(), theta.sin())), theirs)
