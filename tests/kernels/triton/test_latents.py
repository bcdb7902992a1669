"""rope_and_store_latent in Triton against its definition, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference_mla
from pagewick.kernels.options import Rotation
from tests.deep import IS_DEEP
from tests.kernels.scaled import NAMES, empty_latents
from tests.kernels.triton.comparison import DTYPES, numbers

latents = pytest.importorskip("pagewick.kernels.triton.latents")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NUM_BLOCKS, BLOCK_SIZE = 3, 5


def arguments(
    dtype: torch.dtype, sizes: tuple[int, int], *, heads: int = 17, interleaved: bool = False
) -> tuple[tuple[Tensor, Tensor], Tensor, dict[str, Any]]:
    """Return (q, latents) of seven tokens, which are parts of wider products, their slots, and the other arguments."""
    latent_dim, rope_dim = sizes
    q = numbers(7, heads, 24 + rope_dim).to(dtype)
    rows = numbers(7, 16 + latent_dim + rope_dim, seed=1).to(dtype)[:, 16:]
    cos, sin = numbers(2, 7, rope_dim // 2, seed=2)
    weight = numbers(latent_dim, seed=3).to(dtype)
    options = {"norm_weight": weight, "norm_eps": 1e-5, "rotation": Rotation(cos, sin, interleaved)}
    return (q, rows), torch.tensor([6, -1, 0, 14, 3, 7, 5]), options


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(32, 16), *([(256, 32), (512, 64)] if IS_DEEP else [])])
def test_it_is_its_definition(sizes: tuple[int, int], dtype: torch.dtype, interleaved: bool) -> None:
    tensors, slots, options = arguments(dtype, sizes, interleaved=interleaved)
    caches = [torch.full((NUM_BLOCKS, BLOCK_SIZE, sum(sizes)), 7.0, dtype=dtype) for _ in range(2)]
    found = latents.rope_and_store_latent(*tensors, caches[0], slots, **options)
    expected = reference_mla.rope_and_store_latent(*tensors, caches[1], slots, **options)
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches[0], caches[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_8_bits(name: str) -> None:
    tensors, slots, options = arguments(torch.float32, (32, 16))
    # Signs have the norm 1, and this rotation changes nothing: bytes and scales are exactly those of the definition.
    tensors[1][:, :32] = tensors[1][:, :32].sign()
    tensors[1][4, 32:], tensors[1][5, 35] = 0, float("nan")
    options |= {"norm_weight": numbers(32, seed=5).exp(), "norm_eps": 0.0}
    options["rotation"] = Rotation(torch.ones(7, 8), torch.zeros(7, 8))
    caches = [empty_latents(name, NUM_BLOCKS, BLOCK_SIZE, 32, 16) for _ in range(2)]
    for function, (cache, scales) in zip((latents, reference_mla), caches, strict=True):
        function.rope_and_store_latent(*tensors, cache, slots, scales=scales, **options)
    (found, found_scales), (expected, expected_scales) = caches
    assert found_scales is not None and expected_scales is not None
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(found_scales.nan_to_num(-1), expected_scales.nan_to_num(-1))


def test_a_token_has_the_bits_that_it_has_alone() -> None:
    (q, rows), slots, options = arguments(torch.float16, (32, 16))
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 48, dtype=torch.float16) for _ in range(2)]
    together = latents.rope_and_store_latent(q, rows, caches[0], slots, **options)
    cos, sin, _ = options["rotation"]
    for token in range(7):
        part = slice(token, token + 1)
        own = {**options, "rotation": Rotation(cos[part], sin[part])}
        alone = latents.rope_and_store_latent(q[part], rows[part], caches[1], slots[part], **own)
        assert torch.equal(alone[0], together[token])
    assert torch.equal(caches[0], caches[1])


def test_other_sizes_pass_to_the_definition() -> None:
    tensors, slots, options = arguments(torch.float32, (24, 8))
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 32) for _ in range(2)]
    found = latents.rope_and_store_latent(*tensors, caches[0], slots, **options)
    assert torch.equal(found, reference_mla.rope_and_store_latent(*tensors, caches[1], slots, **options))
    assert torch.equal(caches[0], caches[1])
