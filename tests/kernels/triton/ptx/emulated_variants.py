"""Compiled kernels in the types and sizes for which tensor cores and shared memory are used in different ways.

Interpreted kernels compute all products in float32 whatever the types are, so that their tests try few of these.
pytest runs this file in a process of its own (test_compiled_kernels.py), in which kernels are not interpreted.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference, reference_mla
from pagewick.kernels.kv_cache import torch_dtype
from pagewick.kernels.options import AttentionMetadata, Rotation, ScoreOptions, StoredMatrix
from pagewick.kernels.reference_kv import store_latents, take_latents
from pagewick.kernels.triton import full_attention, launches, mla, window_attention
from pagewick.kernels.triton.attention import HEAD_DIMS, paged_attention
from pagewick.kernels.triton.grouping import group
from pagewick.kernels.triton.latents import rope_and_store_latent
from pagewick.kernels.triton.layouts import FORMATS
from pagewick.kernels.triton.linear import linear
from tests.kernels.paged import Paged, expected_attention, make_paged, plain_cache
from tests.kernels.scaled import NAMES, empty_latents, make_scaled
from tests.kernels.test_mla import SCALE, Latents, make_latents
from tests.kernels.triton.test_index import assert_scores, make_batch
from tests.kernels.triton.test_moe import plain_experts, quantized_experts
from tests.kernels.triton.test_quantized import packed, random_x
from tests.kernels.triton.test_window_attention import assert_expected as assert_window
from tests.kernels.triton.test_window_attention import make_batch as make_window

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
# Half a unit in the last place of 1.
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 2**-24}
# Short and long sequences, with and without several splits and tiles of keys.
Q_LENS, CONTEXT_LENS = [1, 3, 18, 1], [1, 270, 66, 65]


def assert_mean(found: Tensor, expected: Tensor, sizes: Tensor, weights: torch.dtype) -> None:
    """That a mean is exact but for its own rounding and for that of weights and of their sum to a type.

    sizes: the mean of the absolute values.
    """
    tolerance = 2e-5 + 2 * ROUNDING[found.dtype] * expected.abs() + 2.1 * ROUNDING[weights] * sizes
    error = (found.double() - expected).abs()
    assert bool((error <= tolerance).all()), f"an error of {(error - tolerance).max().item()} more than tolerated"


def assert_attention(found: Tensor, paged: Paged, weights: torch.dtype, **options: float) -> None:
    sizes = Paged(**{**vars(paged), "values": [values.abs() for values in paged.values]})
    assert_mean(found, expected_attention(paged, **options), expected_attention(sizes, **options), weights)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(dtype: torch.dtype, head_dim: int) -> None:
    paged = make_paged(Q_LENS, CONTEXT_LENS, head_dim=head_dim, dtype=dtype)
    for options in ({}, {"logit_soft_cap": 4.0, "sliding_window": 40}):
        scores = ScoreOptions(softmax_scale=head_dim**-0.5, **options)
        found = paged_attention(paged.q, plain_cache(paged.kv_cache), paged.metadata, scores)
        assert_attention(found, paged, dtype, **options)


@pytest.mark.parametrize("head_dim", full_attention.HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_attention(dtype: torch.dtype, head_dim: int) -> None:
    """Queries and keys that follow each other, as behind a rotation, and values as a part of a fused product."""
    cu_seqlens, scale = (0, 150, 150, 163), head_dim**-0.5
    q, k, v = (part.unflatten(1, (2, head_dim)) for part in random_x(163, 6 * head_dim, dtype).chunk(3, 1))
    found = full_attention.full_attention(q.contiguous(), k.contiguous(), v, cu_seqlens, scale)
    q, k, v = q.double(), k.double(), v.double()
    expected, sizes = (reference.full_attention(q, k, x, cu_seqlens, scale) for x in (v, v.abs()))
    assert_mean(found, expected, sizes, dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_numbers_of_8_bits(dtype: torch.dtype, name: str, head_dim: int) -> None:
    scaled = make_scaled(name, Q_LENS, CONTEXT_LENS, head_dim=head_dim, dtype=dtype)
    for options in ({}, {"logit_soft_cap": 4.0}):
        scores = ScoreOptions(softmax_scale=head_dim**-0.5, **options)
        found = paged_attention(scaled.paged.q, scaled.plain, scaled.paged.metadata, scores)
        # Weights times scales are in bfloat16, unless all is in float32.
        assert_attention(found, scaled.paged, dtype if dtype == torch.float32 else torch.bfloat16, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_long_prompts(dtype: torch.dtype, name: str, head_dim: int) -> None:
    """Prompts of several tiles of queries and of keys have the same bits whole and in chunks."""
    shape = {"heads": (8, 2), "head_dim": head_dim, "dtype": dtype}
    scaled = make_scaled(name, [70, 9], [200, 30], **shape) if name else None
    paged = make_paged([70, 9], [200, 30], **shape) if scaled is None else scaled.paged
    cache = plain_cache(paged.kv_cache) if scaled is None else scaled.plain
    scores = ScoreOptions(softmax_scale=head_dim**-0.5, sliding_window=150)
    found = paged_attention(paged.q, cache, paged.metadata, scores)
    assert_attention(found, paged, torch.bfloat16 if name else dtype, sliding_window=150)
    for begin, end in ((0, 33), (33, 70)):
        chunk = paged.only(0, begin, end)
        assert torch.equal(paged_attention(chunk.q, cache, chunk.metadata, scores), found[begin:end])


@pytest.mark.parametrize("dims", [(512, 64), (256, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    latents = make_latents([1, 9], [270, 20], heads=16, dims=dims, dtype=dtype)
    assert_mean(latents.attend(mla), latents.expected(), latents.expected(sizes=True), dtype)


@pytest.mark.parametrize("dims", [(512, 64), (256, 32)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention_over_numbers_of_8_bits(dtype: torch.dtype, name: str, dims: tuple[int, int]) -> None:
    latents = make_latents([1, 9], [70, 20], heads=16, dims=dims, dtype=dtype)
    cache, scales = empty_latents(name, len(latents.cache), 16, *dims)
    assert scales is not None and cache.dtype == torch_dtype(name)
    rows = latents.cache.flatten(0, 1)
    is_stored = ~rows.isnan().any(1)
    store_latents(cache, scales, rows[is_stored], dims[0], torch.arange(len(rows))[is_stored])
    metadata = AttentionMetadata(latents.block_tables, latents.context_lens, latents.cu_seqlens_q)
    q = latents.q_latent, latents.q_rope
    found = mla.latent_attention(*q, cache, metadata, softmax_scale=SCALE, scales=scales)
    plain = take_latents(cache, scales, dims[0], torch.arange(len(cache))).nan_to_num(0.0).double()
    wide = [numbers.double() for numbers in q]
    expected = reference_mla.latent_attention(*wide, plain, metadata, softmax_scale=SCALE)
    sizes = _sizes(latents, plain, dims[0])
    assert_mean(found, expected, sizes, dtype if dtype == torch.float32 else torch.bfloat16)


def _sizes(latents: Latents, plain: Tensor, latent_dim: int) -> Tensor:
    """Return the mean of the absolute values that are attended."""
    rows = []
    for table, length in zip(latents.block_tables, latents.context_lens.tolist(), strict=True):
        blocks = table[: -(-length // plain.shape[1])].long()
        rows.append(plain[blocks].flatten(0, 1)[:length])
    assert rows[0].shape[1] > latent_dim
    return Latents(**{**vars(latents), "rows": rows}).expected(sizes=True)


@pytest.mark.parametrize("dims", [(512, 64), (256, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("name", NAMES[1:])
def test_threads_agree_on_the_scale_of_a_row(name: str, dims: tuple[int, int]) -> None:
    """Rows of 1 and of numbers near powers of two, for which all scales to choose from are almost equally good."""
    generator = torch.Generator().manual_seed(0)
    shape = 32, dims[1]
    sizes = 2.0 ** -torch.randint(1, 4, shape, generator=generator) * (
        1 + 0.02 * torch.rand(shape, generator=generator)
    )
    keys = torch.where(torch.rand(shape, generator=generator) < 0.5, -sizes, sizes)
    keys[:, 0] = 1
    rows = torch.cat([torch.randn(32, dims[0], generator=generator), keys], dim=1)
    cache, scales = empty_latents(name, 2, 16, *dims)
    assert scales is not None
    rotation = Rotation(torch.ones(32, dims[1] // 2), torch.zeros(32, dims[1] // 2))
    rope_and_store_latent(
        torch.randn(32, 1, dims[1]), rows, cache, torch.arange(32), norm_weight=torch.ones(dims[0]), norm_eps=1e-6,
        rotation=rotation, scales=scales,
    )  # fmt: skip
    numbers = cache.flatten(0, 1)[:, dims[0] :].float() * scales.flatten(0, 1)[:, 1:]
    torch.testing.assert_close(numbers, keys, rtol=0.021, atol=0)


@pytest.mark.parametrize("heads", [32, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_index_keys(dtype: torch.dtype, heads: int) -> None:
    """Several tiles of keys, and more tokens than a program takes."""
    batch = make_batch([18, 1], [140, 20], heads=heads, dim=128, dtype=dtype)
    assert_scores(batch, batch.scores(top_k=9), top_k=9)


@pytest.mark.parametrize("heads", [16, 17])
@pytest.mark.parametrize("kind", window_attention.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_window_attention(dtype: torch.dtype, kind: str, heads: int) -> None:
    """A short and a long sequence, windows and entries of several tiles of keys, and more heads than a tile has."""
    shape = {"heads": heads, "dim": 512, "window": 35, "ratio": 1}
    batch = make_window(kind, dtype=dtype, q_lens=[5, 1], context_lens=[6, 40], **shape)
    assert_window(batch, batch.attend(window_attention))


@pytest.mark.parametrize("kind", [launches.ROWS, launches.FEW, launches.SOME, launches.MANY])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_quantized_weights(name: str, dtype: torch.dtype, kind: str) -> None:
    """Rows and outputs that fill no tile. The row kernel rounds no weight, the others to the type of x."""
    num_tokens, num_rows = {launches.ROWS: (2, 19), launches.FEW: (5, 35)}.get(kind, (67, 35))
    weight, numbers = packed(name, num_rows)
    x, bias = random_x(num_tokens, weight.num_columns, dtype), random_x(1, num_rows, dtype)[0]
    expected = x.double() @ numbers.t() + bias.double()
    sizes = x.double().abs() @ numbers.abs().t() + bias.double().abs()
    part = 1e-6 if kind == launches.ROWS else 2 * ROUNDING[dtype]
    stored = launches.Stored(weight.data, num_rows, weight.num_columns, name)
    for out_dtype in (dtype, torch.float32):
        out = torch.full((num_tokens, num_rows), float("nan"), dtype=out_dtype)
        launches.launch_product(kind, x, stored, bias, out)
        tolerance = part * sizes + 2 * ROUNDING[out_dtype] * expected.abs() + 1e-6
        assert bool(((out.double() - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("kind", [launches.ROWS, launches.FEW, launches.SOME, launches.MANY])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_with_plain_weights(dtype: torch.dtype, kind: str) -> None:
    """Products are exact in float32, and only their sums are rounded.

    Tensor cores cut a sum off after each 16 of 200 columns: 13 times, by less than a unit in the last place, which is
    2^-23 of a sum that is at most that of the absolute values. The row kernel rounds less than 26 times on the way of a
    product to the result, to the nearest, by half a unit.
    """
    x, weight = random_x(131, 200, dtype), random_x(70, 200, dtype)
    expected = x.double() @ weight.double().t()
    sizes = x.double().abs() @ weight.double().abs().t()
    out = torch.full((131, 70), float("nan"))
    launches.launch_product(kind, x, launches.Stored(weight, 70, 200), None, out)
    assert bool(((out.double() - expected).abs() <= 13 * 2**-23 * sizes).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(dtype: torch.dtype) -> None:
    x, weight = random_x(70, 130, dtype), random_x(65, 130, dtype)
    found = linear(x, StoredMatrix(weight, 65, 130, False))
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(found.double(), expected, rtol=2 * ROUNDING[dtype], atol=5e-5)


@pytest.mark.parametrize("kind", [launches.FEW, launches.SOME, launches.MANY])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [launches.PLAIN, "Q4_K"])
def test_products_of_experts(name: str, dtype: torch.dtype, kind: str) -> None:
    """Experts with more choices than a tile has rows, with few, and with none."""
    experts, numbers = quantized_experts(name) if name in FORMATS else (plain_experts(dtype=dtype), None)
    weights = (experts.data if numbers is None else numbers).double()
    num_tokens = 150
    ids = torch.where(torch.arange(num_tokens) % 9 == 4, 3, torch.tensor([[1], [2]])).t().to(torch.int32)
    x = random_x(num_tokens, experts.num_columns, dtype)
    rows, chosen = x.double().repeat_interleave(2, 0), weights[ids.flatten().long()]
    grouping = group(ids, experts.num_experts, launches.tile_of(kind, launches.PLAIN).rows)
    stored = launches.Stored(experts.data, experts.num_rows, experts.num_columns, name, experts.num_experts)
    out = torch.full((2 * num_tokens, experts.num_rows), float("nan"))
    launches.launch_product(kind, x, stored, None, out, choices_per_row=2, grouping=grouping)
    sizes = torch.einsum("ck,cnk->cn", rows.abs(), chosen.abs())
    # Sums of 16 times 16 columns; and weights that are rounded to the type of x.
    part = 16 * 2**-23 if name == launches.PLAIN else 2 * ROUNDING[dtype]
    assert bool(((out.double() - torch.einsum("ck,cnk->cn", rows, chosen)).abs() <= part * sizes).all())
