"""paged_attention against attention over plain keys and values, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from pagewick.kernels.cpu import NativeLibrary
from tests.kernels.paged import expected_attention, make_paged

Kernels = ModuleType | NativeLibrary

# Queries and values are exact in every dtype and sums are float32: what is left is the rounding of the output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
DTYPES = list(TOLERANCE)


def assert_is_expected(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[out.dtype], atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_batch_at_every_edge(kernels: Kernels, dtype: torch.dtype) -> None:
    context_lens = [1, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 1023, 1024, 1025, 1100]
    q_lens = [1, 0, 1, 32, 2, 63, 1, 65, 7, 1, 129, 0, 3, 1, 1, 80]
    paged = make_paged(q_lens, context_lens, dtype=dtype)
    assert_is_expected(paged.attend(kernels.paged_attention), expected_attention(paged))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 4), (8, 2), (7, 1), (14, 2), (71, 1)])
def test_query_groups(kernels: Kernels, heads: tuple[int, int]) -> None:
    paged = make_paged([1, 5, 20], [40, 70, 20], heads=heads, head_dim=32)
    assert_is_expected(paged.attend(kernels.paged_attention), expected_attention(paged))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 40, 72, 80, 96, 112, 128, 200, 256])
def test_head_sizes(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    paged = make_paged([1, 11], [70, 67], head_dim=head_dim, dtype=dtype)
    assert_is_expected(paged.attend(kernels.paged_attention), expected_attention(paged))


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 100, 256])
def test_block_sizes(kernels: Kernels, block_size: int) -> None:
    paged = make_paged([1, 9, 2], [130, 9, 257], block_size=block_size, head_dim=16)
    assert_is_expected(paged.attend(kernels.paged_attention), expected_attention(paged))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 1024, 5000])
def test_sliding_window(kernels: Kernels, window: int) -> None:
    paged = make_paged([1, 70, 3, 33], [1, 70, 1030, 2100], head_dim=16)
    expected = expected_attention(paged, sliding_window=window)
    assert_is_expected(paged.attend(kernels.paged_attention, sliding_window=window), expected)


def test_blocks_before_the_window_may_be_gone(kernels: Kernels) -> None:
    paged = make_paged([1, 40], [1500, 1500], head_dim=16)
    expected = paged.attend(kernels.paged_attention, sliding_window=100)
    paged.block_tables[0, : (1500 - 100) // 32] = -1
    paged.block_tables[1, : (1500 - 40 - 100) // 32] = -1
    assert torch.equal(paged.attend(kernels.paged_attention, sliding_window=100), expected)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logit_soft_cap(kernels: Kernels, cap: float) -> None:
    paged = make_paged([1, 70], [130, 100], head_dim=32)
    out = paged.attend(kernels.paged_attention, softmax_scale=32**-0.5, logit_soft_cap=cap)
    torch.testing.assert_close(out.double(), expected_attention(paged, logit_soft_cap=cap), rtol=1e-5, atol=1e-5)


def test_cache_of_another_dtype(kernels: Kernels) -> None:
    paged = make_paged([3, 1], [90, 5], dtype=torch.float32, kv_dtype=torch.bfloat16)
    assert_is_expected(paged.attend(kernels.paged_attention), expected_attention(paged))


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    paged = make_paged([1, 20], [100, 90])
    out = paged.attend(kernels.paged_attention, softmax_scale=1000.0)
    assert out.isfinite().all()
    # The softmax is all but one-hot: each row is the value of its best key.
    best = (paged.q[:1, 0].double() @ paged.keys[0][:, 0].double().T).argmax()
    torch.testing.assert_close(out[0, 0], paged.values[0][best, 0])


def test_queries_inside_a_fused_projection(kernels: Kernels) -> None:
    paged = make_paged([4, 2], [33, 40], head_dim=16)
    fused = torch.full((6, 4 * 16 + 50), float("nan"))
    fused[:, : 4 * 16] = paged.q.flatten(1)
    view = replace(paged, q=fused[:, : 4 * 16].view(6, 4, 16))
    assert torch.equal(view.attend(kernels.paged_attention), paged.attend(kernels.paged_attention))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_later_key_changes_no_bit_of_an_earlier_query(native: NativeLibrary, poison: float) -> None:
    paged = make_paged([90], [200], head_dim=16)
    expected = paged.attend(native.paged_attention)
    for which in (0, 1):
        block_id, offset = paged.block_tables[0, 150 // 32], 150 % 32
        paged.kv_cache[block_id, which, :, offset] = poison
    out = paged.attend(native.paged_attention)
    first_to_see_it = 90 - (200 - 150)
    assert torch.equal(out[:first_to_see_it], expected[:first_to_see_it])
    assert out[first_to_see_it:].isnan().all()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 77}, {"logit_soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_batched_chunked_and_threaded(
    native: NativeLibrary, dtype: torch.dtype, options: dict[str, float]
) -> None:
    q_lens, context_lens = [1, 130, 1, 7, 40], [1, 130, 2100, 1030, 1100]
    paged = make_paged(q_lens, context_lens, heads=(7, 1), head_dim=40, dtype=dtype)
    expected = paged.attend(native.paged_attention, **options)
    alone = [paged.only(seq).attend(native.paged_attention, **options) for seq in range(len(q_lens))]
    assert torch.equal(torch.cat(alone), expected)
    for chunk in (1, 7, 13):
        chunks = [
            paged.only(seq, begin, min(begin + chunk, q_len)).attend(native.paged_attention, **options)
            for seq, q_len in enumerate(q_lens)
            for begin in range(0, q_len, chunk)
        ]
        assert torch.equal(torch.cat(chunks), expected)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(paged.attend(native.paged_attention, **options), expected)


def test_same_bits_when_a_long_decode_is_split_over_its_segments(native: NativeLibrary) -> None:
    paged = make_paged([1, 2], [9000, 3000], heads=(2, 1), head_dim=16)
    expected = paged.attend(native.paged_attention)
    assert_is_expected(expected, expected_attention(paged))
    for num_threads in (2, 3, 8):
        native.set_num_threads(num_threads)
        assert torch.equal(paged.attend(native.paged_attention), expected)


def test_a_sequence_does_not_depend_on_the_batch(kernels: Kernels) -> None:
    paged = make_paged([1, 300, 7], [900, 300, 1030])
    out = paged.attend(kernels.paged_attention)
    assert torch.equal(torch.cat([paged.only(seq).attend(kernels.paged_attention) for seq in range(3)]), out)


def test_empty_batches(kernels: Kernels) -> None:
    for q_lens in ([], [0], [0, 0]):
        paged = make_paged(q_lens, [5] * len(q_lens))
        assert paged.attend(kernels.paged_attention).shape == (0, 4, 64)


def test_every_half_precision_value_is_widened_and_rounded_rightly(native: NativeLibrary) -> None:
    every_bit_pattern = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        values = every_bit_pattern.view(dtype).float()
        # With a single key the output is its value: nothing but conversions is left.
        assert torch.equal(
            single_key_output(native, values.to(dtype), torch.float32).nan_to_num(1), values.nan_to_num(1)
        )
        next_up = torch.nextafter(values, torch.full_like(values, float("inf")))
        halfway = torch.where(values.isfinite(), (values.double() * (1 + 2.0**-9)).float(), values)
        for wide in (values, next_up, halfway):
            rounded = single_key_output(native, wide, dtype)
            assert torch.equal(rounded.nan_to_num(1), wide.to(dtype).nan_to_num(1))


def single_key_output(native: NativeLibrary, values: torch.Tensor, q_dtype: torch.dtype) -> torch.Tensor:
    head_dim, num_seqs = 256, values.numel() // 256
    kv_cache = torch.zeros(num_seqs, 2, 1, 1, head_dim, dtype=values.dtype)
    kv_cache[:, 1, 0, 0] = values.view(num_seqs, head_dim)
    out = native.paged_attention(
        torch.zeros(num_seqs, 1, head_dim, dtype=q_dtype),
        kv_cache,
        torch.arange(num_seqs, dtype=torch.int32).unsqueeze(1),
        torch.ones(num_seqs, dtype=torch.int32),
        torch.arange(num_seqs + 1, dtype=torch.int32),
        softmax_scale=1.0,
    )
    return out.flatten()


def test_the_output_is_written_in_place(native: NativeLibrary) -> None:
    paged = make_paged([3], [10])
    out = torch.full_like(paged.q, float("nan"))
    assert paged.attend(native.paged_attention, out=out) is out
    assert torch.equal(out, paged.attend(native.paged_attention))


def test_tensors_that_do_not_fit_are_refused(native: NativeLibrary) -> None:
    good = make_paged([3, 1], [40, 5])
    q, kv_cache = good.q, good.kv_cache
    wrong = {
        "q .T, H, D.": {"q": q.flatten(1)},
        "contiguous kv_cache": {"kv_cache": kv_cache.transpose(2, 3)},
        "heads of q": {"q": q[:, :3].contiguous()},
        "heads of": {"q": q[..., :32].contiguous()},
        "no native attention for torch.float64": {"q": q.double()},
        "head size of 12": {"q": q[..., :12], "kv_cache": kv_cache[..., :12].contiguous()},
        "cu_seqlens_q": {"cu_seqlens_q": good.cu_seqlens_q[:-1]},
        "block_tables must be int32": {"block_tables": good.block_tables.long()},
        "context_lens must be int32": {"context_lens": good.context_lens.long()},
        "contradict": {"context_lens": torch.tensor([2, 5], dtype=torch.int32)},
        "contradict each other": {"context_lens": torch.tensor([97, 5], dtype=torch.int32)},
        "and q contradict": {"cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32)},
        "outside the cache": {"context_lens": torch.tensor([65, 5], dtype=torch.int32)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            replace(good, **change).attend(native.paged_attention)
    with pytest.raises(ValueError, match="sliding_window must be at least 1, not 0"):
        good.attend(native.paged_attention, sliding_window=0)
    with pytest.raises(ValueError, match="out must be contiguous"):
        good.attend(native.paged_attention, out=torch.empty_like(good.q, dtype=torch.float16))
