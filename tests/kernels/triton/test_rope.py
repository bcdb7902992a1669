"""rope_and_store and store_kv in Triton against their definitions, interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import torch_dtype
from pagewick.kernels.options import HeadLayout, HeadOptions, Rotation
from tests.deep import IS_DEEP
from tests.kernels.paged import plain_cache
from tests.kernels.scaled import ALL_NAMES, empty_heads
from tests.kernels.test_rope import SHAPES, Case, structs
from tests.kernels.triton.comparison import DTYPES, numbers

rope = pytest.importorskip("pagewick.kernels.triton.rope")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QUICK = [0, 3, 8, 9, 11, 12, 13, 17]


@pytest.mark.parametrize("dtype", DTYPES if IS_DEEP else DTYPES[:2])
@pytest.mark.parametrize("index", range(len(SHAPES)) if IS_DEEP else QUICK)
def test_shapes(index: int, dtype: torch.dtype) -> None:
    """Compared with float64 for numbers that the interpreter rounds, and else with the definition."""
    case = replace(SHAPES[index], num_tokens=min(SHAPES[index].num_tokens, 7), dtype=dtype, cache_dtype=dtype)
    plain, expected = case.plain.clone(), case.plain.clone()
    q = rope.rope_and_store(case.qkv, plain_cache(plain), case.slots, **structs(case.options))
    if dtype != torch.bfloat16:
        case.check(q, plain)
        return
    wanted = reference.rope_and_store(case.qkv, plain_cache(expected), case.slots, **structs(case.options))
    torch.testing.assert_close(q, wanted, rtol=2**-6, atol=2**-5)
    torch.testing.assert_close(plain, expected, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("constants", [(0.0, 0.0), (0.03, 0.2)])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_numbers_with_scales_are_those_of_the_definition(name: str, constants: tuple[float, float]) -> None:
    num_tokens, num_kv_heads, head_dim, block_size = 12, 3, 24, 6
    k, v = numbers(2, num_tokens, num_kv_heads, head_dim)
    k[3], v[4], k[5, 1, 2], v[6, 0, 1], k[7] = 0, 1e-7, float("nan"), float("inf"), 1e-30
    # Numbers of every size, so that fp8 has subnormal ones.
    v[8:] *= numbers(4, num_kv_heads, head_dim, seed=1).mul(5).exp()
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    slots[[2, 9]] = -1
    expected, found = (
        replace(empty_heads(name, 5, num_kv_heads, block_size, head_dim, is_packed=False), constant_scales=constants)
        for _ in range(2)
    )
    reference.store_kv(k, v, expected, slots)
    rope.store_kv(k, v, found, slots)
    assert found.dtype == torch_dtype(name)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert expected.scales is not None and found.scales is not None
    assert torch.equal(found.scales.nan_to_num(-1), expected.scales.nan_to_num(-1))


def test_a_token_has_the_bits_that_it_has_alone_and_a_packed_cache_is_refused() -> None:
    qkv, layout = numbers(3, 6 * 40), HeadLayout(4, 1, 40)
    cos, sin = numbers(2, 3, 20, seed=1)
    caches = [plain_cache(torch.zeros(2, 2, 1, 4, 40)) for _ in range(2)]
    slots = torch.tensor([6, 0, 3])
    together = rope.rope_and_store(qkv, caches[0], slots, layout, HeadOptions(Rotation(cos, sin)))
    for token in range(3):
        part = slice(token, token + 1)
        options = HeadOptions(Rotation(cos[part], sin[part]))
        alone = rope.rope_and_store(qkv[part], caches[1], slots[part], layout, options)
        assert torch.equal(alone[0], together[token])
    assert torch.equal(caches[0].data, caches[1].data)
    with pytest.raises(ValueError, match="packed"):
        rope.rope_and_store(qkv, replace(caches[0], is_packed=True), slots, layout)


@pytest.mark.parametrize(
    ("normed", "norm", "head_dim"),
    [("q", "layer", 40), ("k", "rms_last", 24), ("v", "everything", 24), ("qv", "layer_per_head", 40)],
)
def test_some_heads_are_normed_and_others_are_not(normed: str, norm: str, head_dim: int) -> None:
    """Queries alone are normed where a layer borrows keys (Gemma 3n), and values with nothing or with a weight."""
    case = Case(norm=norm, num_tokens=3, head_dim=head_dim, rotary_dim=16)
    options = structs(case.options)
    given = options["options"]
    norms = {"q_norm": given.q_norm, "k_norm": given.k_norm, "v_norm": given.k_norm}
    kept = {name: value if name[0] in normed else None for name, value in norms.items()}
    assert_found_is_defined(case, {**options, "options": given._replace(**kept)})


def assert_found_is_defined(case: Case, options: dict[str, Any]) -> None:
    """That a kernel serves a call, in float32, and gives and stores what the definition does."""
    found, expected = case.plain.clone(), case.plain.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "by_definition", None)
        q = rope.rope_and_store(case.qkv, plain_cache(found), case.slots, **options)
    wanted = reference.rope_and_store(case.qkv, plain_cache(expected), case.slots, **options)
    torch.testing.assert_close((q, found), (wanted, expected), rtol=4e-6, atol=4e-6)


def test_heads_of_512_numbers() -> None:
    """Gemma 4's, with as many angles as pairs, and in a cache of 8 bits."""
    case = Case(norm="rms", norms_values=True, num_tokens=3, num_heads=3, num_kv_heads=1, head_dim=512, rotary_dim=512)
    assert_found_is_defined(case, structs(case.options))
    k, v = numbers(2, 3, 2, 512)
    expected, found = (empty_heads("fp8_e4m3", 2, 2, 4, 512, is_packed=False) for _ in range(2))
    slots = torch.tensor([5, -1, 0])
    reference.store_kv(k, v, expected, slots)
    rope.store_kv(k, v, found, slots)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_norms_in_different_places_are_computed_by_the_definition() -> None:
    case = Case(norm="rms", num_tokens=2, head_dim=16, rotary_dim=16)
    options = structs(case.options)
    given = options["options"]
    later = replace(given.q_norm, is_after_rotation=True)
    options["options"] = given._replace(q_norm=later)
    found, expected = case.plain.clone(), case.plain.clone()
    q = rope.rope_and_store(case.qkv, plain_cache(found), case.slots, **options)
    assert torch.equal(q, reference.rope_and_store(case.qkv, plain_cache(expected), case.slots, **options))
    assert torch.equal(found, expected)
