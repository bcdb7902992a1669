"""Products of experts in Triton: interpreted, against their definition choice by choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.block_formats import unpack
from pagewick.kernels.options import Identities, MoeBiases, SharedOutput, StoredExperts
from pagewick.kernels.triton.layouts import pack_rows, packed_shape
from tests.deep import IS_DEEP
from tests.kernels.block_rows import random_rows
from tests.kernels.triton.harness import assert_close

pytest.importorskip("triton")
from pagewick.kernels.triton.grouping import group, sorted_group
from pagewick.kernels.triton.moe import add_low_rank, fused_moe, grouped_linear, kind_for_choices

E, N, K = 5, 19, 256


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def some_ids(num_tokens: int, top_k: int, num_experts: int = E) -> Tensor:
    """Ids [T, A] int32, different in a row; the last expert has none, and others far more than some."""
    favour = torch.linspace(0, 3, num_experts - 1)
    return (random(num_tokens, num_experts - 1) + favour).topk(top_k).indices.to(torch.int32)


def quantized_experts(
    name: str, num_rows: int = N, num_columns: int = K, seed: int = 0
) -> tuple[StoredExperts, Tensor]:
    """Packed experts and their numbers [E, N, K]."""
    data = torch.zeros(E, *packed_shape(name, num_rows, num_columns), dtype=torch.uint8)
    numbers = []
    for expert in range(E):
        rows = random_rows(name, num_rows, num_columns, seed + expert)
        pack_rows(name, rows, data[expert], 0)
        numbers.append(unpack(name, rows).numbers())
    return StoredExperts(data, E, num_rows, num_columns, True, name), torch.stack(numbers)


def plain_experts(num_rows: int = N, num_columns: int = K, dtype: torch.dtype = torch.float32) -> StoredExperts:
    return StoredExperts(random(E, num_rows, num_columns, dtype=dtype) / 8, E, num_rows, num_columns, False)


def by_definition(x: Tensor, numbers: Tensor, expert_ids: Tensor, bias: Tensor | None) -> Tensor:
    chosen = expert_ids.flatten().long()
    rows = x if len(x) == len(chosen) else x.repeat_interleave(expert_ids.shape[1], dim=0)
    found = torch.einsum("ck,cnk->cn", rows.double(), numbers.double()[chosen])
    return found if bias is None else found + bias.double()[chosen]


# Choices: so few that each has its own program, and tiles of several experts.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 3), (9, 4), (23, 1)])
def test_plain_experts(num_tokens: int, top_k: int, dtype: torch.dtype) -> None:
    weight, ids, bias = plain_experts(dtype=dtype), some_ids(num_tokens, top_k), random(E, N, dtype=dtype)
    x = random(num_tokens, K, dtype=dtype)
    assert_close(grouped_linear(x, weight, ids, bias), by_definition(x, weight.data, ids, bias), absolute=2e-5)
    of_choices = random(num_tokens * top_k, K, dtype=dtype)
    found = grouped_linear(of_choices, weight, ids)
    assert_close(found, by_definition(of_choices, weight.data, ids, None), absolute=2e-5)


@pytest.mark.parametrize("name", ["Q4_K", "int4_g64"])
@pytest.mark.parametrize("num_tokens", [2, 9])
def test_quantized_experts(name: str, num_tokens: int) -> None:
    weight, numbers = quantized_experts(name)
    ids, x = some_ids(num_tokens, 3), random(num_tokens, K, dtype=torch.float16)
    expected = by_definition(x, numbers, ids, None)
    assert_close(grouped_linear(x, weight, ids), expected, absolute=2**-11 * float(expected.abs().max()))


def test_columns_that_fill_no_tile_and_rows_that_lie_apart() -> None:
    weight, ids = plain_experts(3, 33, torch.float16), some_ids(9, 2)
    x = random(9, 66, dtype=torch.float16)[:, ::2]
    wide = torch.zeros(18, 9, dtype=torch.float16)
    assert grouped_linear(x, weight, ids, out=wide[:, 2:5]).data_ptr() == wide[:, 2:5].data_ptr()
    assert_close(wide[:, 2:5], by_definition(x, weight.data, ids, None), absolute=2e-3)
    assert not wide[:, :2].any() and not wide[:, 5:].any()


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_an_id_of_no_expert_makes_its_row_nan(num_tokens: int) -> None:
    weight, ids = plain_experts(dtype=torch.float16), some_ids(num_tokens, 2)
    x = random(num_tokens, K, dtype=torch.float16)
    expected = by_definition(x, weight.data, ids, None)
    ids[1, 0], ids[2, 1] = E, -1
    found = grouped_linear(x, weight, ids)
    is_bad = torch.zeros(2 * num_tokens, dtype=torch.bool)
    is_bad[[2, 5]] = True
    assert found[is_bad].isnan().all()
    assert_close(found[~is_bad], expected[~is_bad], absolute=2e-5)


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, torch.float32), (11, torch.float32), (11, torch.float16)])
@pytest.mark.parametrize(("is_gated", "activation"), [(True, "silu"), (False, "silu"), (False, "relu2")])
def test_a_layer_of_experts(num_tokens: int, dtype: torch.dtype, is_gated: bool, activation: str) -> None:
    routing = Routing(top_k=3, renormalize=True, weighs_inputs=activation == "relu2")
    hidden, inner = 64, 33
    gate_up = plain_experts(2 * inner if is_gated else inner, hidden, dtype)
    down = plain_experts(hidden, inner, dtype)
    x, logits = random(num_tokens, hidden, dtype=dtype), random(num_tokens, E, seed=5)
    biases = MoeBiases(random(E), random(E, gate_up.num_rows, dtype=dtype), random(E, hidden, dtype=dtype))
    shared = SharedOutput(random(num_tokens, hidden, dtype=dtype, seed=9), random(num_tokens))
    options: Any = {"activation": activation, "biases": biases, "shared": shared}
    expected = reference.fused_moe(x, logits, gate_up, down, routing, **options)
    found = fused_moe(x, logits, gate_up, down, routing, **options)
    assert_close(found, expected, absolute=1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("is_added", [True, False])
def test_experts_that_return_their_input(is_added: bool) -> None:
    gate_up, down = plain_experts(66, 64, torch.float32), plain_experts(64, 33, torch.float32)
    x, logits = random(11, 64), random(11, E + 3, seed=5)
    options: Any = {"identities": Identities(3, x if is_added else None)}
    expected = reference.fused_moe(x, logits, gate_up, down, Routing(top_k=3), **options)
    assert_close(fused_moe(x, logits, gate_up, down, Routing(top_k=3), **options), expected, absolute=1e-4)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [("Q4_K", 1), ("Q8_0", 1), ("int4_g128", 1), ("fp8_g128", 1), ("Q4_K", 11)]
    + ([("Q8_0", 11), ("int4_g128", 11), ("fp8_g128", 11)] if IS_DEEP else []),
)
def test_quantized_experts_without_gates(name: str, num_tokens: int) -> None:
    (up, numbers), (down, down_numbers) = quantized_experts(name, K, K, 1), quantized_experts(name, 33, K, 9)
    x, logits = random(num_tokens, K) / 16, random(num_tokens, E, seed=5)
    routing = Routing(top_k=3, scoring="sigmoid", renormalize=True)
    weights, ids = logits.sigmoid().double().topk(3)
    ids = ids.to(torch.int32)
    activated = by_definition(x, numbers, ids, None).clamp(min=0).square()
    rows = by_definition(activated, down_numbers, ids, None).view(num_tokens, 3, -1)
    expected = ((weights / weights.sum(-1, keepdim=True))[..., None] * rows).sum(1)
    found = fused_moe(x, logits, up, down, routing, activation="relu2")
    assert_close(found, expected, absolute=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("rows_of_tile", [1, 4, 16])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (7, 3), (40, 4)])
def test_tiles_hold_every_choice_once_and_none_has_two_experts(num_tokens: int, top_k: int, rows_of_tile: int) -> None:
    ids = some_ids(num_tokens, top_k, 6)
    ids[0, 0] = 77
    grouping = sorted_group(ids, 6, rows_of_tile)
    places = []
    for expert, start, end in grouping.tiles.tolist():
        assert end - start <= rows_of_tile
        for place in range(start, end):
            found = int(ids.flatten()[grouping.order[place]])
            assert expert == (6 if found == 77 else found)
            places.append(place)
    assert sorted(places) == list(range(ids.numel()))
    assert sorted(grouping.order.tolist()) == list(range(ids.numel()))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 1, 2), (7, 3, 15), (40, 4, 16), (33, 4, 200)])
def test_one_launch_groups_as_a_sort_does(num_tokens: int, top_k: int, num_experts: int) -> None:
    ids = some_ids(num_tokens, top_k, num_experts)
    ids[0, 0], ids[num_tokens // 2, top_k - 1] = -1, num_experts
    for rows_of_tile in (1, 16):
        found, expected = group(ids, num_experts, rows_of_tile), sorted_group(ids, num_experts, rows_of_tile)
        assert torch.equal(found.order, expected.order)
        assert torch.equal(found.tiles, expected.tiles)


def test_the_worst_choices_have_enough_tiles() -> None:
    """Every expert has one choice more than fills a tile, and one choice has none."""
    ids = torch.cat([torch.arange(6).repeat(17), torch.tensor([99])]).int()
    tiles = group(ids, 6, 16).tiles
    assert int((tiles[:, 2] - tiles[:, 1]).clamp(min=0).sum()) == len(ids)


def test_the_kind_of_tile_follows_the_choices_of_an_expert() -> None:
    kinds = [kind_for_choices(number, 8, torch.bfloat16) for number in (1, 16, 17, 128, 129, 2048, 2049)]
    assert kinds == ["rows", "rows", "few", "few", "some", "some", "many"]
    assert kind_for_choices(2049, 8, torch.float32) == "rows"


def test_no_tokens_and_tensors_that_do_not_fit() -> None:
    weight = plain_experts()
    assert grouped_linear(random(0, K), weight, torch.zeros(0, 2, dtype=torch.int32)).shape == (0, N)
    with pytest.raises(ValueError, match="does not fit 256 inputs"):
        grouped_linear(random(3, K), weight, some_ids(2, 2))
    with pytest.raises(ValueError, match="no product of"):
        grouped_linear(random(2, K).half(), weight, some_ids(2, 2))
    with pytest.raises(ValueError, match="bias"):
        grouped_linear(random(2, K), weight, some_ids(2, 2), random(E, N + 1))
    with pytest.raises(ValueError, match="rows whole"):
        grouped_linear(random(2, K), weight, some_ids(2, 2), out=random(4, N + 1))


# So few rows that each has its own program, and tiles of several adapters. One rank of 16, and three side by side.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 9, 70])
@pytest.mark.parametrize("rank", [16, 48])
def test_adapters(rank: int, num_tokens: int, dtype: torch.dtype) -> None:
    down, up = plain_experts(rank, dtype=dtype), plain_experts(N, rank, dtype=dtype)
    down.data[-1] = up.data[-1] = 0
    x, y = random(num_tokens, K, dtype=dtype), random(num_tokens, N, dtype=dtype)
    ids = torch.arange(num_tokens, dtype=torch.int32) * 7 % E
    expected = reference.add_low_rank(y, x, down, up, ids)
    found = add_low_rank(y.clone(), x, down, up, ids)
    is_none = ids == E - 1
    assert torch.equal(found[is_none], y[is_none])
    torch.testing.assert_close(found, expected, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=1e-3)
