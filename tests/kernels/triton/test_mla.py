"""Latent attention in Triton, interpreted: against attention in float64, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagewick.kernels import reference_mla
from pagewick.kernels.options import AttentionMetadata
from pagewick.kernels.reference_kv import store_latents, take_latents
from tests.deep import IS_DEEP
from tests.kernels.scaled import empty_latents
from tests.kernels.test_mla import SCALE, Latents, assert_is_expected, make_latents
from tests.kernels.triton.harness import assert_close

from pagewick.kernels.triton import attention, mla  # isort: skip  (the harness skips this module without Triton)

Q_LENS, CONTEXT_LENS = [1, 2, 9, 1], [1, 257, 33, 300]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_ragged_batch(dtype: torch.dtype) -> None:
    latents = make_latents(Q_LENS, CONTEXT_LENS, dims=(32, 16), dtype=dtype)
    assert_is_expected(latents.attend(mla), latents)


@pytest.mark.parametrize(
    ("heads", "dims", "block_size"), [(1, (32, 16), 1), (35, (32, 16), 64), (16, (512 if IS_DEEP else 256, 32), 32)]
)
def test_heads_sizes_and_block_sizes(heads: int, dims: tuple[int, int], block_size: int) -> None:
    dims = (512, 64) if dims[0] == 512 else dims
    latents = make_latents([1, 5], [40, 20], heads=heads, dims=dims, block_size=block_size)
    assert_is_expected(latents.attend(mla), latents)


def test_sinks_take_a_share_of_each_head() -> None:
    latents = make_latents(Q_LENS, CONTEXT_LENS, heads=5, dims=(32, 16))
    latents = replace(latents, sinks=torch.tensor([0.5, 4.0, -3.0, 9.0, -60.0]))
    assert_is_expected(latents.attend(mla), latents)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_of_8_bits(name: str) -> None:
    latents = make_latents([1, 6], [290, 20], dims=(32, 16))
    cache, scales = empty_latents(name, len(latents.cache), 16, 32, 16)
    assert scales is not None
    slots = torch.arange(len(cache) * 16)
    rows = latents.cache.flatten(0, 1)
    is_stored = ~rows.isnan().any(1)
    # The parts differ in size, and so do their scales.
    store_latents(cache, scales, rows[is_stored] * torch.tensor([1.0] * 32 + [0.01] * 16), 32, slots[is_stored])
    q_rope = latents.q_rope * 100
    metadata = AttentionMetadata(latents.block_tables, latents.context_lens, latents.cu_seqlens_q)
    found = mla.latent_attention(latents.q_latent, q_rope, cache, metadata, softmax_scale=SCALE, scales=scales)
    plain = take_latents(cache, scales, 32, torch.arange(len(cache))).nan_to_num(0.0)
    expected = reference_mla.latent_attention(
        latents.q_latent.double(), q_rope.double(), plain.double(), metadata, softmax_scale=SCALE
    )
    assert_close(found, expected)


def test_a_sequence_has_the_same_bits_in_any_company_and_with_memory_for_few_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latents = make_latents(Q_LENS, CONTEXT_LENS, dims=(32, 16))
    together = latents.attend(mla)
    for seq in (1, 2):
        first, last = latents.cu_seqlens_q[seq : seq + 2].tolist()
        assert torch.equal(latents.only(seq).attend(mla), together[first:last])
    monkeypatch.setattr(attention, "PARTS_BYTES", 20_000)
    assert torch.equal(latents.attend(mla), together)


def test_unsupported_calls_go_to_the_definition() -> None:
    latents: Latents = make_latents([1], [40])
    assert torch.equal(latents.attend(mla), latents.attend(reference_mla))
    latents = make_latents([1], [40], dims=(32, 16), block_size=5)
    assert torch.equal(latents.attend(mla), latents.attend(reference_mla))
    empty = replace(latents, q_latent=latents.q_latent[:0], q_rope=latents.q_rope[:0])
    empty = replace(empty, context_lens=torch.zeros(1).int(), cu_seqlens_q=torch.zeros(2).int())
    assert empty.attend(mla).shape == (0, 3, 32)
