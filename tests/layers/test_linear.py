"""The ranks' shares of each layer give the whole layer together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewick.errors import ModelLoadError
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import (
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tests.layers.ranks import on_ranks, single_context

WORLD_SIZES = [1, 2, 3, 4]
IN_FEATURES = 24


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: Linear, weights: dict[str | None, Tensor], biases: dict[str | None, Tensor]) -> None:
    """Load every part's tensors; the layer must expect all of them and no others."""
    tensors = {(part, "weight"): tensor for part, tensor in weights.items()}
    tensors |= {(part, "bias"): tensor for part, tensor in biases.items()}
    assert sorted(map(str, layer.expected_weights())) == sorted(map(str, tensors))
    for (part, name), tensor in tensors.items():
        layer.load_weight(name, tensor, part)
    layer.finish_loading()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicated(world_size: int, bias: bool) -> None:
    weight, x = random(10, IN_FEATURES), random(5, IN_FEATURES, seed=1)
    biases: dict[str | None, Tensor] = {None: random(10, seed=2)} if bias else {}

    def act(context: LayerContext) -> Tensor:
        layer = ReplicatedLinear(context, "layer", IN_FEATURES, 10, bias=bias)
        fill(layer, {None: weight}, biases)
        found: Tensor = layer(x)
        return found

    for found in on_ranks(world_size, act):
        torch.testing.assert_close(found, functional.linear(x, weight, biases.get(None)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sizes", [(8, 8), (10, 7), (3, 12)])
def test_merged_columns(sizes: tuple[int, int], world_size: int, bias: bool) -> None:
    """Each part is cut separately; a rank's output is its share of the first part, then its share of the second."""
    parts = dict(zip(["gate_proj", "up_proj"], sizes, strict=True))
    weights: dict[str | None, Tensor] = {
        name: random(size, IN_FEATURES, seed=size + place) for place, (name, size) in enumerate(parts.items())
    }
    biases: dict[str | None, Tensor] = {name: random(size, seed=size) for name, size in parts.items()} if bias else {}
    x = random(2, 3, IN_FEATURES, seed=9)

    def act(context: LayerContext) -> list[Tensor]:
        layer = MergedColumnParallelLinear(context, "model.mlp", IN_FEATURES, parts, bias=bias)
        fill(layer, weights, biases)
        kept = [-(-(size - context.tp_rank) // world_size) for size in sizes]  # differ by one at most
        assert layer.weight.unpack().shape == (sum(kept), IN_FEATURES)
        assert len(layer.weight.storages) == 1
        return list(layer(x).split(kept, dim=-1))

    shares = on_ranks(world_size, act)
    for place, name in enumerate(parts):
        found = torch.cat([share[place] for share in shares], dim=-1)
        torch.testing.assert_close(found, functional.linear(x, weights[name], biases.get(name)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("in_features", "multiple"), [(24, 1), (24, 6), (13, 1), (20, 4)])
def test_rows(in_features: int, multiple: int, world_size: int, bias: bool) -> None:
    weight, x = random(10, in_features), random(5, in_features, seed=1)
    biases: dict[str | None, Tensor] = {None: random(10, seed=2)} if bias else {}
    expected = functional.linear(x, weight, biases.get(None))
    starts: list[int] = []

    def act(context: LayerContext) -> Tensor:
        layer = RowParallelLinear(context, "layer", in_features, 10, bias=bias, multiple=multiple)
        fill(layer, {None: weight}, biases)
        start, stop = layer.share.columns
        starts.append(start)
        found: Tensor = layer(x[:, start:stop].clone())
        return found

    found = on_ranks(world_size, act)
    assert len(set(starts)) == world_size and all(start % multiple == 0 for start in starts)
    for each in found:
        torch.testing.assert_close(each, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(each, found[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 12])
def test_queries_keys_and_values(num_kv_heads: int, world_size: int, bias: bool) -> None:
    """Each rank has an equal share of the query heads, and the KV head that each of them reads."""
    num_heads, head_dim = 12, 4
    sizes = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    weights: dict[str | None, Tensor] = {
        name: random(size * head_dim, IN_FEATURES, seed=seed) for seed, (name, size) in enumerate(sizes.items())
    }
    biases: dict[str | None, Tensor] = (
        {name: random(size * head_dim, seed=size) for name, size in sizes.items()} if bias else {}
    )
    x = random(5, IN_FEATURES, seed=9)

    def act(context: LayerContext) -> tuple[int, int, Tensor]:
        layer = QKVParallelLinear(context, "model.self_attn", IN_FEATURES, head_dim, num_heads, num_kv_heads, bias=bias)
        fill(layer, weights, biases)
        return layer.num_heads, layer.num_kv_heads, layer(x)

    whole = {
        name: functional.linear(x, weight, biases.get(name)).view(5, -1, head_dim) for name, weight in weights.items()
    }
    first_head = 0
    for heads, kv_heads, found in on_ranks(world_size, act):
        assert heads == num_heads // world_size and heads % kv_heads == 0
        assert kv_heads >= num_kv_heads / world_size
        q, k, v = torch.split(found.view(5, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
        torch.testing.assert_close(q, whole["q_proj"][:, first_head : first_head + heads])
        for head in range(heads):
            reads = (first_head + head) // (num_heads // num_kv_heads)
            stored = head // (heads // kv_heads)
            torch.testing.assert_close(k[:, stored], whole["k_proj"][:, reads])
            torch.testing.assert_close(v[:, stored], whole["v_proj"][:, reads])
        first_head += heads
    assert first_head == num_heads


@pytest.mark.parametrize(
    "shape", [(10, IN_FEATURES + 1), (9, IN_FEATURES), (11, IN_FEATURES), (IN_FEATURES, 10), (10,)]
)
def test_a_weight_of_another_shape_is_an_error_with_both_shapes(shape: tuple[int, ...]) -> None:
    layer = ReplicatedLinear(single_context(), "layer", IN_FEATURES, 10, bias=True)
    with pytest.raises(ModelLoadError, match="shape is") as info:
        layer.load_weight("weight", torch.zeros(shape), None)
    assert str(list(shape)) in str(info.value) and str([10, IN_FEATURES]) in str(info.value)


@pytest.mark.parametrize("shape", [(9,), (11,), (10, 1), ()])
def test_a_bias_of_another_shape_is_an_error_with_both_shapes(shape: tuple[int, ...]) -> None:
    layer = ReplicatedLinear(single_context(), "layer", IN_FEATURES, 10, bias=True)
    with pytest.raises(ModelLoadError, match=r"\[10\]") as info:
        layer.load_weight("bias", torch.zeros(shape), None)
    assert str(list(shape)) in str(info.value)
