"""Paged attention in Triton, interpreted: against attention in float64, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import ScoreOptions
from tests.deep import IS_DEEP
from tests.kernels.paged import Paged, assert_is_expected, expected_attention, make_paged, packed_copy, plain_cache
from tests.kernels.scaled import make_scaled
from tests.kernels.triton.harness import IS_COMPILED, assert_close

# The harness skips this module without Triton.
import triton.language as tl  # isort: skip

from pagewick.kernels.triton import attention, online_softmax  # isort: skip
from pagewick.kernels.triton.variant import Variant  # isort: skip

# Contexts at the edges of tiles (32 and 64 keys) and splits (256), queries of short and of long sequences.
Q_LENS, CONTEXT_LENS = [1, 0, 3, 18, 1], [1, 0, 257, 66, 300]


def attend(paged: Paged, cache: KVCache | None = None, **options: Any) -> Tensor:
    scores = ScoreOptions(**{"softmax_scale": paged.q.shape[-1] ** -0.5, **options})
    return attention.paged_attention(paged.q, cache or plain_cache(paged.kv_cache), paged.metadata, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_ragged_batch(dtype: torch.dtype) -> None:
    paged = make_paged(Q_LENS, CONTEXT_LENS, head_dim=16, dtype=dtype)
    assert_is_expected(attend(paged), paged)


@pytest.mark.parametrize(("max_query_len", "is_launched"), [(None, True), (5, True), (4, False), (1, False)])
def test_the_kernel_for_prompts_starts_only_if_a_sequence_may_be_long(
    monkeypatch: pytest.MonkeyPatch, max_query_len: int | None, is_launched: bool
) -> None:
    paged = make_paged([1] * 6, [1, 70, 300, 5, 33, 64], heads=(4, 1), head_dim=16)
    launched, launch = [], Variant.launch

    def record(self: Variant, grid: tuple[int, ...], **arguments: Any) -> None:
        launched.append(self.name.split()[0])
        launch(self, grid, **arguments)

    monkeypatch.setattr(Variant, "launch", record)
    metadata = paged.metadata._replace(max_query_len=max_query_len)
    scores = ScoreOptions(softmax_scale=0.25)
    assert_is_expected(attention.paged_attention(paged.q, plain_cache(paged.kv_cache), metadata, scores), paged)
    assert ("long" in launched) == is_launched and "short" in launched


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((7, 1), 80, 16), ((3, 3), 16, 1), ((35, 1), 16, 64), ((16, 2), 112, 32), ((5, 1), 160, 16), ((8, 1), 512, 32)],
)
def test_groups_head_sizes_and_block_sizes(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    paged = make_paged([2, 20], [270, 21], heads=heads, head_dim=head_dim, block_size=block_size)
    assert_is_expected(attend(paged), paged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 33, 64, 5000] if IS_DEEP else [1, 40])
def test_sliding_windows_read_no_block_before_them(window: int, dtype: torch.dtype) -> None:
    """Such a block may belong to another sequence by now, whatever that has stored: here, NaN."""
    paged = make_paged([1, 20, 2], [300, 70, 600], head_dim=16, dtype=dtype)
    others = torch.full_like(paged.kv_cache[:1], float("nan"))
    paged = replace(paged, kv_cache=torch.cat([paged.kv_cache, others]))
    for table, q_len, context_len in zip(paged.block_tables, [1, 20, 2], [300, 70, 600], strict=True):
        table[: max(0, context_len - q_len + 1 - window) // 32] = len(paged.kv_cache) - 1
    assert_is_expected(attend(paged, sliding_window=window), paged, sliding_window=window)


@pytest.mark.parametrize(("chunk", "dtype"), [(1, torch.float32), (40, torch.bfloat16), (256, torch.float32)])
def test_chunks_read_no_block_before_them(chunk: int, dtype: torch.dtype) -> None:
    """Some sequences are short and split, some cross a boundary, and one token begins a chunk."""
    q_lens, context_lens = [1, 20, 2, 1], [300, 70, 600, 241]
    paged = make_paged(q_lens, context_lens, head_dim=16, dtype=dtype)
    others = torch.full_like(paged.kv_cache[:1], float("nan"))
    paged = replace(paged, kv_cache=torch.cat([paged.kv_cache, others]))
    for table, q_len, context_len in zip(paged.block_tables, q_lens, context_lens, strict=True):
        table[: (context_len - q_len) // chunk * chunk // 32] = len(paged.kv_cache) - 1
    options = {"sliding_window": chunk, "is_chunked": True}
    assert_is_expected(attend(paged, **options), paged, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9, "logit_soft_cap": 3.0}], ids=str)
def test_sinks_and_soft_caps(options: dict[str, Any]) -> None:
    paged = make_paged([1, 12], [290, 20], heads=(6, 2), head_dim=32)
    sinks = torch.tensor([-30.0, 0.0, 1.0, 2.5, 5.0, 20.0])
    expected = expected_attention(paged, sinks=sinks, **options)
    assert_close(attend(paged, sinks=sinks, **options), expected)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_an_image_see_later_ones(dtype: torch.dtype, window: int | None) -> None:
    """Images over several tiles, over the edge of a split, at the end of a short sequence, and beside text."""
    lens = ([100, 5, 1, 3, 20], [310, 258, 300, 258, 70])
    paged = make_paged(*lens, heads=(4, 2), head_dim=16, dtype=dtype)
    whole = paged.seeing_whole([(0, 215, 300), (1, 255, 257), (3, 200, 258), (4, 52, 60), (4, 60, 70)])
    options = {"sliding_window": window}
    found = attend(whole, **options)
    assert_is_expected(found, whole, **options)
    alone = [attend(whole.only(seq), **options) for seq in range(len(lens[0]))]
    assert torch.equal(torch.cat(alone), found)
    differs = (found != attend(paged, **options)).flatten(1).any(1)
    assert differs[[5, 88, 102, 107]].all() and not differs[[*range(5), 89, 103, 104, 105, 108]].any()


def test_caps_and_later_tokens_together_are_computed_by_the_definition() -> None:
    paged = make_paged([20, 1], [30, 5], head_dim=16).seeing_whole([(0, 12, 25)])
    found = attend(paged, logit_soft_cap=3.0)
    assert_close(found, expected_attention(paged, logit_soft_cap=3.0))


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_8_bits(name: str, dtype: torch.dtype) -> None:
    scaled = make_scaled(name, [1, 20], [290, 40], head_dim=16, dtype=dtype)
    found = attend(scaled.paged, scaled.plain)
    if dtype == torch.bfloat16:
        # Tensor cores get probabilities in bfloat16; the interpreter cuts off what does not fit into a result.
        assert_is_expected(found, scaled.paged)
    else:
        assert_close(found, expected_attention(scaled.paged))


@pytest.mark.parametrize(
    ("heads", "head_dim", "options"),
    [((4, 2), 16, {}), ((3, 1), 80, {"sliding_window": 70}), ((2, 2), 128, {"logit_soft_cap": 3.0})],
)
def test_numbers_of_4_bits(heads: tuple[int, int], head_dim: int, options: dict[str, Any]) -> None:
    """In short and long sequences, in one split and in two. Rotations are matrices of 16 in heads of 80."""
    scaled = make_scaled("int4", [1, 20, 0], [290, 40, 3], heads=heads, head_dim=head_dim)
    found = attend(scaled.paged, scaled.plain, **options)
    if IS_COMPILED:
        scaled.assert_is_expected(found, **options)
    else:
        assert_close(found, expected_attention(scaled.paged, **options))


def test_scaled_weights_do_not_underflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes all products in float32, so only the choice of types is tested."""
    monkeypatch.setattr(online_softmax, "_IS_INTERPRETED", False)
    types = {dtype: online_softmax.value_type(dtype, "fp8_e5m2") for dtype in (torch.bfloat16, torch.float16)}
    assert types == {torch.bfloat16: tl.bfloat16, torch.float16: tl.bfloat16}
    assert online_softmax.value_type(torch.float16, "") == tl.float16
    for stored in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.arange(256, dtype=torch.uint8).view(stored).float()
        numbers = numbers[numbers.isfinite()]
        assert torch.equal(numbers.bfloat16().float(), numbers), "bfloat16 must hold every number of 8 bits"


def test_a_sequence_has_the_same_bits_in_any_company_and_in_any_chunks() -> None:
    paged = make_paged(Q_LENS, CONTEXT_LENS, head_dim=16)
    together = attend(paged)
    for seq in (2, 3):
        first, last = paged.cu_seqlens_q[seq : seq + 2].tolist()
        assert torch.equal(attend(paged.only(seq)), together[first:last])
    # A long sequence in two chunks, both long as well.
    first = int(paged.cu_seqlens_q[3])
    for begin, end in ((0, 9), (9, 18)):
        assert torch.equal(attend(paged.only(3, begin, end)), together[first + begin : first + end])


def test_one_split_has_the_bits_of_several() -> None:
    paged = make_paged([1, 2], [200, 31], head_dim=16)
    wider = torch.nn.functional.pad(paged.block_tables, (0, 40), value=-1)
    assert torch.equal(attend(paged), attend(replace(paged, block_tables=wider)))


@pytest.mark.parametrize("num_bytes", [1, 10_000])
def test_a_batch_whose_splits_need_much_memory_is_divided(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    paged = make_paged([1, 3, 1], [300, 270, 70], heads=(2, 1), head_dim=16)
    expected = attend(paged)
    monkeypatch.setattr(attention, "PARTS_BYTES", num_bytes)
    assert torch.equal(attend(paged), expected)


def test_queries_may_lie_in_a_fused_product() -> None:
    paged = make_paged([1, 20], [40, 20], head_dim=16)
    fused = torch.cat((paged.q.flatten(1), torch.full((21, 64), float("nan"))), dim=1)
    apart = replace(paged, q=fused[:, :64].unflatten(1, (4, 16)))
    assert torch.equal(attend(apart), attend(paged))


def test_an_empty_batch() -> None:
    assert attend(make_paged([0], [0], head_dim=16)).shape == (0, 4, 16)


def test_unsupported_calls_go_to_the_definition() -> None:
    for shape in ({"head_dim": 24}, {"block_size": 7}, {"dtype": torch.float32, "kv_dtype": torch.bfloat16}):
        paged = make_paged([1], [40], **shape)
        assert torch.equal(attend(paged), paged.attend(reference.paged_attention))
    paged = make_paged([1], [40])
    with pytest.raises(ValueError, match="over a packed cache"):
        attend(paged, packed_copy(paged.kv_cache))
