"""KV caches of numbers of 8 and of 4 bits: rounding, storing, and attention over them, beside the definitions."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import INT4, LARGEST, torch_dtype
from pagewick.kernels.options import AttentionMetadata, HeadLayout, ScoreOptions
from pagewick.kernels.reference_kv import TARGETS, quantize_vectors, rotate_vectors, unpack_pairs
from tests.kernels.conftest import NativeKernels
from tests.kernels.scaled import (
    ALL_NAMES,
    NAMES,
    empty_heads,
    make_scaled,
    numbers_of,
    packed_cache,
    plain_numbers,
    rotation,
)

Kernels = ModuleType | NativeKernels
by_name = pytest.mark.parametrize("name", NAMES)
by_any_name = pytest.mark.parametrize("name", ALL_NAMES)


def finite_numbers(dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.abs() <= LARGEST[dtype]].unique()


@by_name
def test_numbers_are_the_nearest_ones_and_ties_are_even(name: str) -> None:
    dtype = torch_dtype(name)
    numbers = finite_numbers(dtype)
    # Each number itself, the middle between neighbours, and a little to both sides of it.
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)))
    x = torch.cat((x, x.new_tensor([LARGEST[dtype]]))).float()
    stored, scale = quantize_vectors(x, dtype, constant=1.0)
    assert scale == 1
    distances = (x.double().unsqueeze(1) - numbers).abs()
    assert torch.equal((x.double() - stored.double()).abs(), distances.amin(1))
    is_tie = (distances == distances.amin(1, keepdim=True)).sum(1) == 2
    assert bool(is_tie.any())
    assert not (stored[is_tie].view(torch.uint8) & 1).any()


@by_name
def test_scales_of_zeros_of_the_smallest_numbers_and_of_no_numbers(name: str) -> None:
    dtype = torch_dtype(name)
    x = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [float("nan"), 1.0], [float("-inf"), 1.0], [-3e38, 1e38]])
    stored, scales = quantize_vectors(x, dtype)
    assert not stored[:4].float().any()
    assert torch.equal(scales.isnan(), torch.tensor([False, False, True, True, False]))
    assert scales[0] == 0 and scales[1] == 0
    assert -stored[4].float()[0] in TARGETS[dtype] and scales[4] == torch.tensor(3e38) / -stored[4].float()[0]
    # A constant scale bounds what is larger than it can express.
    stored, scales = quantize_vectors(torch.tensor([[0.5, -1e9, 2.0]]), dtype, constant=0.25)
    assert stored.float().tolist() == [[2.0, -LARGEST[dtype], 8.0]] and scales == 0.25


@by_name
def test_no_other_target_has_less_error(name: str) -> None:
    dtype = torch_dtype(name)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    largest = x.abs().amax(-1)

    def error(scales: Tensor) -> Tensor:
        parts = (x / scales.unsqueeze(1)).clamp(-LARGEST[dtype], LARGEST[dtype])
        numbers = (parts.round() if dtype == torch.int8 else parts).to(dtype).double()
        return (numbers * scales.double().unsqueeze(1) - x.double()).square().sum(1)

    _, scales = quantize_vectors(x, dtype)
    least = torch.stack([error(largest / target) for target in TARGETS[dtype]]).amin(0)
    torch.testing.assert_close(error(scales), least, rtol=1e-3, atol=0)
    # From the largest number down, the targets go on to where the same numbers follow with another exponent.
    numbers = finite_numbers(dtype)
    assert TARGETS[dtype][0] == numbers.max()
    if dtype != torch.int8:
        assert set(numbers[numbers > numbers.max() / 2].tolist()) <= {*TARGETS[dtype], 480.0}


@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 128, 256])
def test_rotations_are_those_of_hadamard_matrices(head_dim: int) -> None:
    x = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(rotate_vectors(x).double(), x.double() @ rotation(head_dim), rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate_vectors(rotate_vectors(x)), x, rtol=0, atol=1e-6)


def test_numbers_of_4_bits_are_the_nearest_ones_and_no_other_target_has_less_error() -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(2))
    x[0, 0], x[1, 1, 5] = 0, float("inf")
    stored, scales = quantize_vectors(x, INT4)
    assert stored.shape == (50, 3, 32)
    assert torch.equal(scales.isnan(), ~x.isfinite().all(-1)) and scales[0, 0] == 0
    assert not stored[0, 0].any() and not stored[1, 1].any()
    used = (scales > 0).nonzero(as_tuple=True)
    rotated, numbers, scales = (x.double() @ rotation(64))[used], unpack_pairs(stored)[used].double(), scales[used]
    steps = rotated / scales.double().unsqueeze(-1)
    assert bool(((numbers - steps.clamp(-7, 7)).abs() <= 0.5 + 1e-5).all())
    # Four bits hold them, and -8 is never used.
    assert set(numbers.unique().tolist()) == set(range(-7, 8))
    largest = rotated.abs().amax(-1)

    def error(target: Tensor) -> Tensor:
        steps = rotated / (largest / target).unsqueeze(-1)
        return ((steps.clamp(-7, 7).round() - steps) * (largest / target).unsqueeze(-1)).square().sum(-1)

    errors = torch.stack([error(torch.tensor(target)) for target in TARGETS[INT4]])
    torch.testing.assert_close(error(largest / scales), errors.amin(0), rtol=1e-3, atol=0)
    assert len(errors.argmin(0).unique()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@by_any_name
def test_the_native_library_stores_the_same_bytes(native: NativeKernels, name: str, dtype: torch.dtype) -> None:
    num_tokens, num_kv_heads, head_dim, block_size = 37, 3, 24, 6
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator)
    k[3], v[4], k[5, 1, 2], v[6, 0, 1], k[7] = 0, 1e-7, float("nan"), float("inf"), 1e-30
    # Numbers of every size, so that fp8 has subnormal ones.
    v[8:20] *= torch.randn(12, num_kv_heads, head_dim, generator=generator).mul(5).exp()
    k, v = k.to(dtype), v.to(dtype)
    slots = torch.randperm(60, generator=generator)[:num_tokens]
    slots[[3, 20]] = -1
    slots[24:36] = torch.arange(48, 60)
    slots[36] = 0
    if name == "int4":
        # Tokens whose values share bytes follow each other, as those of a sequence do.
        slots = slots.sort().values
    for constants in ((0.0, 0.0), (0.03, 0.2)):
        shape = (10, num_kv_heads, block_size, head_dim)
        plain, packed, fused = (
            replace(empty_heads(name, *shape, is_packed=is_packed), constant_scales=constants)
            for is_packed in (False, True, True)
        )
        reference.store_kv(k, v, plain, slots)
        native.store_kv(k, v, packed, slots)
        qkv = torch.cat((k[:, :1], k, v), dim=1).flatten(1)
        native.rope_and_store(qkv, fused, slots, HeadLayout(1, num_kv_heads, head_dim))
        assert plain.scales is not None
        for cache in (packed, fused):
            assert torch.equal(plain_numbers(cache), numbers_of(plain))
            assert cache.scales is not None and torch.equal(cache.scales.nan_to_num(-1), plain.scales.nan_to_num(-1))


@by_name
@pytest.mark.parametrize("num_rows", [1, 7, 13])
def test_every_number_is_widened_rightly(native: NativeKernels, name: str, num_rows: int) -> None:
    """With a single key, the output is its value: as it lies in the cache for few rows, widened once for many."""
    dtype, head_dim = torch_dtype(name), 256
    cache = empty_heads(name, 1, 1, 2, head_dim, is_packed=False)
    assert cache.scales is not None
    cache.data.view(torch.uint8)[:] = 0
    cache.data.view(torch.uint8)[0, 1, 0, 0] = torch.arange(256, dtype=torch.uint8)
    cache.scales[:, :, :, 0] = 0.5
    lengths = AttentionMetadata(
        torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    )
    out = native.paged_attention(torch.zeros(1, num_rows, head_dim), packed_cache(cache), lengths, ScoreOptions(1.0))
    expected = cache.data[0, 1, 0, 0].float() / 2
    is_number = torch.arange(256, dtype=torch.uint8).view(dtype).float().abs() <= LARGEST[dtype]
    is_number[128] |= dtype == torch.int8  # -128 is never stored
    for row in out[0]:
        assert torch.equal(row[is_number], expected[is_number])
        # Bit patterns that are never stored must not make a sum NaN.
        assert row.isfinite().all()


@pytest.mark.parametrize(
    ("name", "heads", "head_dim"),
    [
        ("int8", (4, 2), 64), ("int8", (7, 1), 40), ("int8", (16, 2), 128), ("int8", (3, 3), 24),
        ("fp8_e4m3", (4, 2), 64), ("fp8_e4m3", (7, 1), 40), ("fp8_e5m2", (3, 3), 24),
        ("int4", (4, 2), 64), ("int4", (7, 1), 40), ("int4", (16, 2), 128), ("int4", (3, 3), 24),
    ],
)  # fmt: skip
def test_attention_is_that_over_what_the_numbers_stand_for(
    kernels: Kernels, name: str, heads: tuple[int, int], head_dim: int
) -> None:
    scaled = make_scaled(name, [1, 9, 2, 70, 0], [130, 9, 1057, 193, 3], heads=heads, head_dim=head_dim)
    scaled.assert_is_expected(scaled.attend(kernels.paged_attention))


@pytest.mark.parametrize(
    ("name", "block_size"), [("int8", 2), ("int8", 6), ("fp8_e5m2", 16), ("fp8_e4m3", 64), ("int4", 6), ("int4", 64)]
)
def test_block_sizes(native: NativeKernels, name: str, block_size: int) -> None:
    scaled = make_scaled(name, [1, 9, 2, 70], [130, 9, 257, 193], block_size=block_size, head_dim=16)
    scaled.assert_is_expected(scaled.attend(native.paged_attention))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {"sliding_window": 65}), ("fp8_e4m3", {"sliding_window": 1}), ("int8", {"logit_soft_cap": 3.0}),
        ("fp8_e5m2", {"logit_soft_cap": 3.0}), ("int8", {"sinks": torch.arange(4.0)}),
        ("int4", {"sliding_window": 65, "sinks": torch.arange(4.0)}), ("int4", {"logit_soft_cap": 3.0}),
    ],
    ids=str,
)  # fmt: skip
def test_windows_soft_caps_and_sinks(kernels: Kernels, name: str, options: dict[str, float]) -> None:
    scaled = make_scaled(name, [1, 70, 3], [7, 70, 1030], head_dim=32)
    scaled.assert_is_expected(scaled.attend(kernels.paged_attention, **options), **options)


def test_blocks_before_the_window_may_be_gone(kernels: Kernels) -> None:
    scaled = make_scaled("fp8_e4m3", [1, 40], [1500, 1500], head_dim=16)
    expected = scaled.attend(kernels.paged_attention, sliding_window=100)
    scaled.paged.block_tables[0, : (1500 - 100) // 32] = -1
    scaled.paged.block_tables[1, : (1500 - 40 - 100) // 32] = -1
    assert torch.equal(scaled.attend(kernels.paged_attention, sliding_window=100), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [("int8", {}), ("int8", {"sliding_window": 77}), ("fp8_e4m3", {}), ("fp8_e5m2", {}), ("int4", {})],
    ids=str,
)
def test_same_bits_alone_batched_chunked_and_threaded(
    native: NativeKernels, name: str, options: dict[str, float]
) -> None:
    q_lens, context_lens = [1, 50, 1, 7], [1, 50, 2100, 1030]
    scaled = make_scaled(name, q_lens, context_lens, heads=(6, 2), head_dim=40)
    expected = scaled.attend(native.paged_attention, **options)
    alone = [scaled.only(seq).attend(native.paged_attention, **options) for seq in range(len(q_lens))]
    assert torch.equal(torch.cat(alone), expected)
    for chunk in (1, 2, 3, 4, 13):
        chunks = [
            scaled.only(seq, begin, min(begin + chunk, q_len)).attend(native.paged_attention, **options)
            for seq, q_len in enumerate(q_lens)
            for begin in range(0, q_len, chunk)
        ]
        assert torch.equal(torch.cat(chunks), expected)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(scaled.attend(native.paged_attention, **options), expected)


@by_any_name
def test_a_later_key_changes_no_bit_of_an_earlier_query(native: NativeKernels, name: str) -> None:
    scaled = make_scaled(name, [90, 4], [200, 153], head_dim=16)
    expected = scaled.attend(native.paged_attention)
    assert scaled.plain.scales is not None
    for which in (0, 1):
        scaled.plain.scales[scaled.paged.block_tables[0, 150 // 32], which, :, 150 % 32] = float("nan")
        scaled.plain.scales[scaled.paged.block_tables[1, 150 // 32], which, :, 150 % 32] = float("nan")
        out = scaled.attend(native.paged_attention)
        for first, end in ((40, 90), (91, 94)):
            assert torch.equal(out[:first][:40], expected[:40]) and torch.equal(out[90], expected[90])
            assert out[first:end].isnan().all()


def test_a_cache_whose_scales_lie_elsewhere_is_refused(native: NativeKernels) -> None:
    scaled = make_scaled("int8", [1], [5])
    cache, scores = packed_cache(scaled.plain), ScoreOptions(1.0)
    assert cache.scales is not None
    for wrong in (replace(cache, scales=None), replace(cache, scales=cache.scales.clone())):
        with pytest.raises(ValueError, match="contiguous packed cache"):
            native.paged_attention(scaled.paged.q, wrong, scaled.paged.metadata, scores)
