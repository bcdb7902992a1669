"""paged_attention and store_kv against attention over plain keys and values, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import KVCache, packing_step, padded_head_dim
from pagewick.kernels.options import AttentionMetadata, ScoreOptions
from tests.kernels.conftest import NativeKernels
from tests.kernels.paged import assert_is_expected, expected_attention, make_paged, packed_copy, plain_cache, plain_copy

Kernels = ModuleType | NativeKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_batch_at_every_edge(kernels: Kernels, dtype: torch.dtype) -> None:
    context_lens = [1, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 1023, 1024, 1025, 1100]
    q_lens = [1, 0, 1, 32, 2, 63, 1, 65, 7, 1, 129, 0, 3, 1, 1, 80]
    paged = make_paged(q_lens, context_lens, dtype=dtype)
    assert_is_expected(paged.attend(kernels.paged_attention), paged)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 4), (8, 2), (7, 1), (14, 2), (71, 1)])
def test_query_groups(kernels: Kernels, heads: tuple[int, int]) -> None:
    paged = make_paged([1, 5, 20], [40, 70, 20], heads=heads, head_dim=32)
    assert_is_expected(paged.attend(kernels.paged_attention), paged)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 40, 72, 80, 96, 112, 128, 200, 256])
def test_head_sizes(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    paged = make_paged([1, 11], [70, 67], head_dim=head_dim, dtype=dtype)
    assert_is_expected(paged.attend(kernels.paged_attention), paged)


@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [
        (block_size, dtype)
        for block_size in (1, 2, 7, 16, 32, 64, 96, 100, 256)
        for dtype in (torch.float32, torch.bfloat16)
        if block_size % packing_step(dtype) == 0
    ],
)
def test_block_sizes(kernels: Kernels, block_size: int, dtype: torch.dtype) -> None:
    paged = make_paged([1, 9, 2, 70], [130, 9, 257, 193], block_size=block_size, head_dim=16, dtype=dtype)
    assert_is_expected(paged.attend(kernels.paged_attention), paged)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 1024, 5000])
def test_sliding_window(kernels: Kernels, window: int) -> None:
    paged = make_paged([1, 70, 3, 33], [1, 70, 1030, 2100], head_dim=16)
    assert_is_expected(paged.attend(kernels.paged_attention, sliding_window=window), paged, sliding_window=window)


def test_blocks_before_the_window_may_be_gone(kernels: Kernels) -> None:
    paged = make_paged([1, 40], [1500, 1500], head_dim=16)
    expected = paged.attend(kernels.paged_attention, sliding_window=100)
    paged.block_tables[0, : (1500 - 100) // 32] = -1
    paged.block_tables[1, : (1500 - 40 - 100) // 32] = -1
    assert torch.equal(paged.attend(kernels.paged_attention, sliding_window=100), expected)


@pytest.mark.parametrize("chunk", [1, 2, 64, 100, 1024, 5000])
def test_chunks(kernels: Kernels, chunk: int) -> None:
    paged = make_paged([1, 70, 3, 33, 1, 200], [1, 70, 1030, 2100, 1024, 1200], head_dim=16)
    options = {"sliding_window": chunk, "is_chunked": True}
    out = paged.attend(kernels.paged_attention, **options)
    assert_is_expected(out, paged, **options)
    # Blocks before the chunk of a sequence's first new token may be gone.
    for table, q_len, context_len in zip(
        paged.block_tables, paged.cu_seqlens_q.diff().tolist(), paged.context_lens.tolist(), strict=True
    ):
        table[: (context_len - q_len) // chunk * chunk // 32] = -1
    assert torch.equal(paged.attend(kernels.paged_attention, **options), out)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logit_soft_cap(kernels: Kernels, cap: float) -> None:
    paged = make_paged([1, 70], [130, 100], head_dim=32)
    out = paged.attend(kernels.paged_attention, softmax_scale=32**-0.5, logit_soft_cap=cap)
    torch.testing.assert_close(out.double(), expected_attention(paged, logit_soft_cap=cap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"logit_soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(kernels: Kernels, dtype: torch.dtype, options: dict[str, float]) -> None:
    paged = make_paged([1, 20, 3], [7, 20, 1100], heads=(6, 2), head_dim=32, dtype=dtype)
    # Next to nothing, more than every key together, and between them.
    sinks = torch.tensor([-30.0, 0.0, 3.0, 30.0, 1.0, -2.0])
    out = paged.attend(kernels.paged_attention, sinks=sinks, **options)
    assert_is_expected(out, paged, sinks=sinks, **options)


# Images of one token, within a tile of keys, over several tiles, over segments, up to the last token, and one of which
# the first tokens have been computed before.
SPANS = [(0, 3, 4), (0, 10, 60), (1, 200, 900), (2, 990, 1100), (3, 0, 20), (4, 40, 120)]
SPAN_LENS = ([130, 700, 120, 20, 60], [130, 1100, 1100, 20, 125])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 77}, {"logit_soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_an_image_see_later_ones(kernels: Kernels, dtype: torch.dtype, options: dict[str, float]) -> None:
    paged = make_paged(*SPAN_LENS, heads=(6, 2), head_dim=24, dtype=dtype).seeing_whole(SPANS)
    out = paged.attend(kernels.paged_attention, **options)
    assert_is_expected(out, paged, **options)
    causal = replace(paged, key_ends=None).attend(kernels.paged_attention, **options)
    # Token 3 is an image by itself, and the last token of each image has none behind it.
    differs = (out != causal).flatten(1).any(1)
    assert differs[10:59].all() and not differs[[*range(10), *range(59, 130)]].any()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 77}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_of_images_alone_chunked_and_threaded(
    native: NativeKernels, dtype: torch.dtype, options: dict[str, float]
) -> None:
    paged = make_paged(*SPAN_LENS, heads=(7, 1), head_dim=40, dtype=dtype).seeing_whole(SPANS)
    expected = paged.attend(native.paged_attention, **options)
    alone = [paged.only(seq).attend(native.paged_attention, **options) for seq in range(5)]
    assert torch.equal(torch.cat(alone), expected)
    # A chunk may begin within an image, if its beginning is cached, but never ends there.
    for begin, end in ((0, 10), (10, 60), (30, 60), (59, 60), (60, 61), (61, 130), (30, 130)):
        chunk = paged.only(0, begin, end).attend(native.paged_attention, **options)
        assert torch.equal(chunk, expected[begin:end])
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(paged.attend(native.paged_attention, **options), expected)


def test_impossible_key_ends_are_refused(native: NativeKernels) -> None:
    paged = make_paged([3, 2], [10, 40], head_dim=16)
    good = torch.tensor([10, 10, 10, 39, 40], dtype=torch.int32)
    assert replace(paged, key_ends=good).attend(native.paged_attention).isfinite().all()
    for wrong in ([11, 11, 11, 39, 40], [7, 9, 10, 39, 40], [10, 9, 10, 39, 40], [8, 9, 10, 39, 41]):
        with pytest.raises(ValueError, match="key_ends"):
            replace(paged, key_ends=torch.tensor(wrong, dtype=torch.int32)).attend(native.paged_attention)
    for other in (good.long(), good[:4], good.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match=r"key_ends must be int32 \[T\] on the CPU"):
            replace(paged, key_ends=other).attend(native.paged_attention)


def test_the_sum_is_of_the_probabilities_that_weigh_the_values(native: NativeKernels) -> None:
    paged = make_paged([1, 30], [1100, 200], head_dim=16, dtype=torch.float32, kv_dtype=torch.bfloat16)
    paged.kv_cache[:, 1] = 1.0
    # The sum of probabilities in bfloat16 differs from 1 by up to 2^-9.
    torch.testing.assert_close(paged.attend(native.paged_attention), torch.ones_like(paged.q), rtol=1e-6, atol=0)


def test_queries_over_bfloat16_are_rounded_to_it(native: NativeKernels) -> None:
    paged = make_paged([1, 30], [70, 30], head_dim=24, dtype=torch.float32, kv_dtype=torch.bfloat16)
    between = replace(paged, q=paged.q * (1 + 2**-11))
    assert not torch.equal(between.q, paged.q)
    assert torch.equal(between.attend(native.paged_attention), paged.attend(native.paged_attention))


def test_cache_of_another_dtype(kernels: Kernels) -> None:
    paged = make_paged([3, 1], [90, 5], dtype=torch.float32, kv_dtype=torch.bfloat16)
    assert_is_expected(paged.attend(kernels.paged_attention), paged)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_later_key_changes_no_bit_of_an_earlier_query(
    native: NativeKernels, poison: float, dtype: torch.dtype
) -> None:
    paged = make_paged([90], [200], head_dim=16, dtype=dtype)
    expected = paged.attend(native.paged_attention)
    for which in (0, 1):
        block_id, offset = paged.block_tables[0, 150 // 32], 150 % 32
        paged.kv_cache[block_id, which, :, offset] = poison
    out = paged.attend(native.paged_attention)
    first_to_see_it = 90 - (200 - 150)
    assert torch.equal(out[:first_to_see_it], expected[:first_to_see_it])
    assert out[first_to_see_it:].isnan().all()


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 77}, {"sliding_window": 90, "is_chunked": True}, {"logit_soft_cap": 20.0}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_batched_chunked_and_threaded(
    native: NativeKernels, dtype: torch.dtype, options: dict[str, float]
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


def test_same_bits_when_a_long_decode_is_split_over_its_segments(native: NativeKernels) -> None:
    paged = make_paged([1, 2], [9000, 3000], heads=(2, 1), head_dim=16)
    expected = paged.attend(native.paged_attention)
    assert_is_expected(expected, paged)
    for num_threads in (2, 3, 8):
        native.set_num_threads(num_threads)
        assert torch.equal(paged.attend(native.paged_attention), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_however_many_heads_a_thread_takes(native: NativeKernels, dtype: torch.dtype) -> None:
    # One unit of all heads on one thread, single heads on many; 17 rows of a head are too many to take several.
    paged = make_paged([1, 3, 17, 4], [1100, 90, 17, 64], heads=(12, 6), head_dim=24, dtype=dtype)
    sinks = torch.arange(-6.0, 6.0)
    expected = paged.attend(native.paged_attention, sinks=sinks)
    assert_is_expected(expected, paged, sinks=sinks)
    for num_threads in (2, 3, 8):
        native.set_num_threads(num_threads)
        assert torch.equal(paged.attend(native.paged_attention, sinks=sinks), expected)


def test_a_sequence_does_not_depend_on_the_batch(kernels: Kernels) -> None:
    paged = make_paged([1, 300, 7], [900, 300, 1030])
    out = paged.attend(kernels.paged_attention)
    assert torch.equal(torch.cat([paged.only(seq).attend(kernels.paged_attention) for seq in range(3)]), out)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 77}], ids=str)
def test_queries_have_a_bounded_number_of_scores(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make_paged([1, 70, 7], [900, 1070, 7])
    expected = paged.attend(reference.paged_attention, **options)
    monkeypatch.setattr(reference, "MAX_SCORES", 5 * 4 * 1070)
    sizes: list[int] = []
    attend = reference._attend

    def watched(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(len(q))
        return attend(q, *arguments)

    monkeypatch.setattr(reference, "_attend", watched)
    torch.testing.assert_close(paged.attend(reference.paged_attention, **options), expected)
    assert sizes == [1] + [5] * 14 + [7]
    # One query may have more.
    monkeypatch.setattr(reference, "MAX_SCORES", 1)
    torch.testing.assert_close(paged.attend(reference.paged_attention, **options), expected)
    assert sizes[16:] == [1] * 78


def test_empty_batches(kernels: Kernels) -> None:
    for q_lens in ([], [0], [0, 0]):
        paged = make_paged(q_lens, [5] * len(q_lens))
        assert paged.attend(kernels.paged_attention).shape == (0, 4, 64)


def test_every_half_precision_value_is_widened_and_rounded_rightly(native: NativeKernels) -> None:
    every_bit_pattern = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        values = every_bit_pattern.view(dtype).float()
        # With a single key the output is its value: nothing but conversions is left. The instructions for bfloat16, the
        # dot product and the rounding, take subnormal values for 0.
        has_dot = dtype == torch.bfloat16 and native.isa in ("avx512_bf16", "amx")
        least = torch.finfo(dtype).tiny if has_dot else 0.0
        out = single_key_output(native, values.to(dtype), torch.float32)
        assert torch.equal(out.nan_to_num(1), values.where((values.abs() >= least) | values.isnan(), 0).nan_to_num(1))
        next_up = torch.nextafter(values, torch.full_like(values, float("inf")))
        halfway = torch.where(values.isfinite(), (values.double() * (1 + 2.0**-9)).float(), values)
        for wide in (values, next_up, halfway):
            rounded = single_key_output(native, wide, dtype)
            expected = wide.where((wide.abs() >= least) | wide.isnan(), 0).to(dtype)
            assert torch.equal(rounded.nan_to_num(1), expected.nan_to_num(1))


def single_key_output(native: NativeKernels, values: torch.Tensor, q_dtype: torch.dtype) -> torch.Tensor:
    head_dim, num_seqs = 256, values.numel() // 256
    kv_cache = torch.zeros(num_seqs, 2, 1, 2, head_dim, dtype=values.dtype)
    kv_cache[:, 1, 0, 0] = values.view(num_seqs, head_dim)
    out = native.paged_attention(
        torch.zeros(num_seqs, 1, head_dim, dtype=q_dtype),
        packed_copy(kv_cache),
        AttentionMetadata(
            torch.arange(num_seqs, dtype=torch.int32).unsqueeze(1),
            torch.ones(num_seqs, dtype=torch.int32),
            torch.arange(num_seqs + 1, dtype=torch.int32),
        ),
        ScoreOptions(1.0),
    )
    flat: torch.Tensor = out.flatten()
    return flat


def test_tensors_that_do_not_fit_are_refused(native: NativeKernels) -> None:
    good = make_paged([3, 1], [40, 5])
    q, kv_cache = good.q, good.kv_cache
    wrong: dict[str, dict[str, Any]] = {
        "q .T, H, D.": {"q": q.flatten(1)},
        "q .T, H, D. for 2 KV heads": {"q": q[:, :3].contiguous()},
        "KV heads of size 64": {"q": q[..., :32].contiguous()},
        "no native attention for torch.float64": {"q": q.double()},
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
    wrong_options: dict[str, dict[str, Any]] = {
        "sliding_window must be at least 1, not 0": {"sliding_window": 0},
        "softmax_scale must be above 0, not 0": {"softmax_scale": 0.0},
        "sinks must be float32 .H.": {"sinks": torch.zeros(3)},
    }
    for message, options in wrong_options.items():
        with pytest.raises(ValueError, match=message):
            good.attend(native.paged_attention, **options)
    for message, cache in {
        "a contiguous packed": replace(good.cache(), data=good.cache().data.transpose(1, 2)),
        "cache of torch.float64": packed_copy(kv_cache.double()),
        "head size of 12 and 32 keys": packed_copy(kv_cache[..., :12]),
        "64 and 7 keys": KVCache(torch.zeros(4, 2, 2, 7 * 64, dtype=torch.bfloat16), 64, is_packed=True),
    }.items():
        with pytest.raises(ValueError, match=message):
            native.paged_attention(q[..., : cache.head_dim], cache, good.metadata, ScoreOptions(1.0))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_writes_the_named_slots_and_nothing_else(
    native: NativeKernels, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    num_tokens, num_kv_heads, head_dim, block_size = 37, 3, 24, 6
    generator = torch.Generator().manual_seed(0)
    # Keys and values inside a fused product.
    fused = torch.randn(num_tokens, 2 * num_kv_heads * head_dim + 5, generator=generator).to(dtype)
    k, v = (part.view(num_tokens, num_kv_heads, head_dim) for part in fused[:, 5:].chunk(2, dim=1))
    slots = torch.randperm(60, generator=generator)[:num_tokens]
    slots[[3, 20]] = -1
    plain = torch.full((10, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=kv_dtype)
    for num_threads in (1, 2, 3):
        native.set_num_threads(num_threads)
        cache = packed_copy(plain)
        cache.data.fill_(float("nan"))
        native.store_kv(k, v, cache, slots)
        expected = plain.clone()
        reference.store_kv(k, v, plain_cache(expected), slots)
        assert torch.equal(plain_copy(cache).nan_to_num(99), expected.nan_to_num(99))
        # Elements beyond the head size are 0 where a token was stored, and untouched elsewhere.
        beyond = plain_copy(replace(cache, head_dim=padded_head_dim(head_dim)))[..., head_dim:]
        assert torch.equal(beyond == 0, ~expected[..., :1].isnan().expand_as(beyond))


def test_what_store_kv_wrote_is_attended_to(native: NativeKernels) -> None:
    paged = make_paged([1, 20], [70, 20], head_dim=40, dtype=torch.bfloat16)
    cache = replace(paged.cache(), data=torch.full_like(paged.cache().data, float("nan")))
    for seq in range(2):
        positions = torch.arange(int(paged.context_lens[seq]))
        slots = paged.block_tables[seq][positions // 32].long() * 32 + positions % 32
        native.store_kv(paged.keys[seq], paged.values[seq], cache, slots)
    out = paged.attend(lambda q, _, metadata, scores: native.paged_attention(q, cache, metadata, scores))
    assert torch.equal(out, paged.attend(native.paged_attention))


def test_keys_that_do_not_fit_are_refused(native: NativeKernels) -> None:
    cache = packed_copy(torch.zeros(2, 2, 3, 4, 16))
    k = torch.ones(2, 3, 16)
    slots = torch.tensor([1, 8])
    for message, arguments in {
        "slot outside the cache of 2 blocks": (k, k, slots),
        "expected k and v .2, 3, 16.": (k[:, :2], k, slots),
        "not .2, 3, 16. and .1, 3, 16.": (k, k[:1], slots),
        "of a native dtype": (k.double(), k.double(), slots),
        "slot_mapping must be int64": (k, k, slots.int()),
    }.items():
        with pytest.raises(ValueError, match=message):
            native.store_kv(*arguments[:2], cache, arguments[2])
    assert not cache.data.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_an_element_of_a_packed_cache_lies(dtype: torch.dtype) -> None:
    plain = torch.randn(2, 2, 3, 6, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = packed_copy(plain)
    assert (cache.num_blocks, cache.num_kv_heads, cache.block_size, cache.dtype) == (2, 3, 6, dtype)
    assert torch.equal(plain_copy(cache), plain)
    step = 2 if dtype == torch.bfloat16 else 1
    for key in range(6):
        for d in range(24):
            k, v = cache.data[1, :, 2]
            assert k[(d // step * 6 + key) * step + d % step] == plain[1, 0, 2, key, d]
            assert v[(key // step * 32 + d) * step + key % step] == plain[1, 1, 2, key, d]
    assert int((cache.data == 0).sum()) == 2 * 2 * 3 * 6 * 8
