"""Latents in 8-bit numbers: what is stored of them, attention over them, and the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference_mla
from pagewick.kernels.kv_cache import torch_dtype
from pagewick.kernels.options import AttentionMetadata, Rotation
from pagewick.kernels.reference_kv import quantize_vectors, store_latents, take_latents
from tests.kernels.conftest import NativeKernels
from tests.kernels.scaled import NAMES, empty_latents
from tests.kernels.test_mla import SCALE, SHAPES, Latents, assert_is_expected, make_latents, make_stored, operations

__all__ = ["operations"]  # the fixture
by_name = pytest.mark.parametrize("name", NAMES)
# Half the distance between neighbours, in parts of the number, and of the smallest numbers, in parts of the scale.
PRECISION = {"int8": (0.0, 2**-1), "fp8_e4m3": (2**-4, 2**-10), "fp8_e5m2": (2**-3, 2**-17)}


@dataclass(frozen=True)
class ScaledLatents(Latents):
    """Latents whose rows are what the 8-bit numbers in the cache stand for."""

    scales: Tensor = field(kw_only=True)

    def attend(self, operations: Any) -> Tensor:
        metadata = AttentionMetadata(self.block_tables, self.context_lens, self.cu_seqlens_q)
        result: Tensor = operations.latent_attention(
            self.q_latent, self.q_rope, self.cache, metadata, softmax_scale=SCALE, scales=self.scales
        )
        return result


def make_scaled(name: str, q_lens: list[int], context_lens: list[int], **shape: Any) -> ScaledLatents:
    plain = make_latents(q_lens, context_lens, cache_dtype=torch.bfloat16, **shape)
    latents = replace(plain, q_latent=plain.q_latent.float(), q_rope=plain.q_rope.float())
    num_blocks, block_size, _ = latents.cache.shape
    latent_dim, rope_dim = latents.q_latent.shape[2], latents.q_rope.shape[2]
    cache, scales = empty_latents(name, num_blocks, block_size, latent_dim, rope_dim)
    assert scales is not None
    rows = []
    for seq, stored in enumerate(latents.rows):
        positions = torch.arange(len(stored))
        block_ids = latents.block_tables[seq][positions // block_size].long()
        # The magnitudes of both parts have nothing to do with each other.
        stored[:, latent_dim:] *= 8
        store_latents(cache, scales, stored, latent_dim, block_ids * block_size + positions % block_size)
        rows.append(take_latents(cache, scales, latent_dim, block_ids)[positions, positions % block_size])
    fields = {name: getattr(latents, name) for name in latents.__dataclass_fields__}
    return ScaledLatents(**{**fields, "cache": cache, "rows": rows}, scales=scales)


@by_name
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_over_what_the_numbers_stand_for(operations: Any, shape: str, name: str) -> None:
    latents = make_scaled(name, [1, 5, 33, 1], [1, 5, 70, 300], **SHAPES[shape])
    out = latents.attend(operations)
    if getattr(operations, "isa", "") in ("avx512_bf16", "amx"):
        # These multiply latents in bfloat16.
        rounded = [rows.bfloat16() for rows in latents.rows]
        latents = replace(latents, rows=rounded, cache=latents.cache.to(torch.bfloat16))
    assert_is_expected(out, latents)


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storing(operations: Any, name: str, dtype: torch.dtype) -> None:
    nope_dim, latent_dim, rope_dim = 5, 19, 6
    stored = make_stored(dtype, 7, 3, (nope_dim, latent_dim, rope_dim))
    slots = torch.tensor([3, -1, 11, 0, 4, 5, 7])
    cache, scales = empty_latents(name, 3, 4, latent_dim, rope_dim)
    assert scales is not None
    exact = torch.full((3, 4, latent_dim + rope_dim), float("nan"), dtype=dtype)
    for operations_, target, options in ((operations, cache, {"scales": scales}), (reference_mla, exact, {})):
        operations_.rope_and_store_latent(
            stored["q"], stored["latents"], target, slots, norm_weight=stored["norm_weight"], norm_eps=0.01,
            rotation=Rotation(stored["cos"], stored["sin"], interleaved=True), **options,
        )  # fmt: skip
    is_stored = slots[slots >= 0]
    found = take_latents(cache, scales, latent_dim, torch.arange(3)).flatten(0, 1)[is_stored]
    rows = exact.flatten(0, 1)[is_stored].float()
    relative, absolute = PRECISION[name]
    for part in (slice(0, latent_dim), slice(latent_dim, None)):
        _, expected_scales = quantize_vectors(rows[:, part], torch_dtype(name))
        bound = torch.maximum(relative * rows[:, part].abs(), absolute * expected_scales.unsqueeze(1))
        # The last bit of a norm or a rotation may differ.
        slack = 1e-5 if dtype == torch.float32 else 2**-7
        assert bool(((found[:, part] - rows[:, part]).abs() <= bound * (1 + 1e-4) + slack * rows[:, part].abs()).all())
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[is_stored] = False
    assert bool((cache.view(torch.uint8).flatten(0, 1)[untouched] == 255).all())
    assert bool(scales.flatten(0, 1)[untouched].isnan().all())


@by_name
def test_same_bits_alone_chunked_and_threaded(native: NativeKernels, name: str) -> None:
    latents = make_scaled(name, [1, 40, 1], [1, 90, 2100], heads=5)
    expected = latents.attend(native)
    assert torch.equal(torch.cat([latents.only(seq).attend(native) for seq in range(3)]), expected)
    for chunk in (1, 7):
        chunks = [latents.only(1, begin, min(begin + chunk, 40)).attend(native) for begin in range(0, 40, chunk)]
        assert torch.equal(torch.cat(chunks), expected[1:41])
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(latents.attend(native), expected)


@by_name
def test_a_later_latent_changes_no_bit_of_an_earlier_query(native: NativeKernels, name: str) -> None:
    latents = make_scaled(name, [90], [200])
    expected = latents.attend(native)
    latents.scales[latents.block_tables[0, 150 // 16], 150 % 16] = float("nan")
    out = latents.attend(native)
    assert torch.equal(out[:40], expected[:40])
    assert out[40:].isnan().all()
