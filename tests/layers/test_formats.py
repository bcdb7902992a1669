"""Parts of different formats in one layer, and a format with only the four abstract methods in every kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels import cpu, recorded_steps
from pagewick.layers.context import LayerContext
from pagewick.layers.embedding import VocabParallelEmbedding, VocabParallelHead, WholeEmbedding
from pagewick.layers.expert_offload import OffloadedExperts
from pagewick.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from pagewick.layers.moe import MoeLayer, Router
from pagewick.quantization.experts import MixedExperts, SeparateExperts, StackedExperts
from pagewick.quantization.grouped_experts import GroupedExperts
from pagewick.quantization.method import LinearMethod
from pagewick.quantization.share import Part, Share, whole_rows
from pagewick.quantization.unquantized import UnquantizedMethod
from pagewick.quantization.weight import Weight
from tests.layers.ranks import on_ranks, single_context
from tests.layers.test_latent_attention import make_case
from tests.layers.test_moe import PREFIX, H, loaded, made, tokens
from tests.quantization.int8 import INT8, quantize, quantized

IN_FEATURES, HEAD_DIM = 23, 5
PLAIN = UnquantizedMethod()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formats(context: LayerContext, is_int8: Callable[[str], bool]) -> LayerContext:
    def choose(prefix: str) -> LinearMethod:
        return INT8 if is_int8(prefix) else PLAIN

    return replace(context, choose_method=choose)


def all_int8(context: LayerContext) -> LayerContext:
    return formats(context, lambda prefix: True)


def fill(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Load tensors, given by part and leaf; the layer must expect each of them once."""
    expected = list(layer.expected_weights())
    assert sorted(f"{part}.{name}" if part else name for part, name in expected) == sorted(tensors)
    for part, name in expected:
        layer.load_weight(name, tensors[f"{part}.{name}" if part else name], part)
    layer.finish_loading()


def stored(weights: dict[str, Tensor], int8_parts: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that a checkpoint holds of these parts, and the unquantized values."""
    tensors: dict[str, Tensor] = {}
    meant = dict(weights)
    for name, weight in weights.items():
        tensors[f"{name}.weight"] = weight
        if name in int8_parts:
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"], meant[name] = quantize(weight)
    return tensors, meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("which", list(product([False, True], repeat=3)))
def test_different_formats_in_qkv(which: tuple[bool, ...], world_size: int, dtype: torch.dtype) -> None:
    """The parts have biases, and both ranks hold one KV head. Neighbours of one format share a storage."""
    num_heads, num_kv_heads = 4, 1
    sizes = {"q_proj": num_heads * HEAD_DIM, "k_proj": num_kv_heads * HEAD_DIM, "v_proj": num_kv_heads * HEAD_DIM}
    weights = {name: random(size, IN_FEATURES, seed=size + len(name)).to(dtype) for name, size in sizes.items()}
    int8_parts = [name for name, is_int8 in zip(sizes, which, strict=True) if is_int8]
    tensors, meant = stored(weights, int8_parts)
    tensors |= {f"{name}.bias": random(size, seed=size).to(dtype) for name, size in sizes.items()}
    x = random(2, 3, IN_FEATURES, seed=8).to(dtype)

    def act(context: LayerContext) -> tuple[Tensor, int]:
        context = formats(replace(context, dtype=dtype), lambda prefix: prefix.removeprefix("m.") in int8_parts)
        layer = QKVParallelLinear(context, "m", IN_FEATURES, HEAD_DIM, num_heads, num_kv_heads, bias=True)
        fill(layer, tensors)
        assert layer.weight.num_parameters == (num_heads // world_size + 2) * HEAD_DIM * IN_FEATURES
        return layer(x), len(layer.weight.storages)

    shares = on_ranks(world_size, act)
    num_runs = 1 + (which[0] != which[1]) + (which[1] != which[2])
    expected = [functional.linear(x.float(), meant[name].float(), tensors[f"{name}.bias"].float()) for name in sizes]
    rtol, atol = (0.0, 1e-4) if dtype == torch.float32 else (2**-8, 1e-3)
    split = [sizes["q_proj"] // world_size, HEAD_DIM, HEAD_DIM]
    queries = []
    for found, num_storages in shares:
        assert (num_storages, found.dtype, found.shape) == (num_runs, dtype, (2, 3, sum(split)))
        q, k, v = torch.split(found.float(), split, dim=-1)
        queries.append(q)
        torch.testing.assert_close(k, expected[1], rtol=rtol, atol=atol)
        torch.testing.assert_close(v, expected[2], rtol=rtol, atol=atol)
    torch.testing.assert_close(torch.cat(queries, -1), expected[0], rtol=rtol, atol=atol)


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("place", "plain"), [(0, "gate"), (1, "up")])
def test_a_part_has_the_bits_of_a_layer_of_its_own(plain: str, place: int, dtype: torch.dtype) -> None:
    weights = {name: random(37, IN_FEATURES, seed=seed).to(dtype) for seed, name in enumerate(["gate", "up"])}
    x = random(7, IN_FEATURES, seed=8).to(dtype)
    context = formats(replace(single_context(), dtype=dtype), lambda prefix: plain not in prefix)
    layer = MergedColumnParallelLinear(context, "mlp", IN_FEATURES, dict.fromkeys(weights, 37))
    fill(layer, stored(weights, set(weights) - {plain})[0])
    alone = MergedColumnParallelLinear(replace(single_context(), dtype=dtype), "mlp", IN_FEATURES, {plain: 37})
    fill(alone, {f"{plain}.weight": weights[plain]})
    assert torch.equal(layer(x).chunk(2, dim=-1)[place], alone(x))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", ["fused", "by_head"])
def test_one_tensor_that_holds_all_parts(layout: str, world_size: int) -> None:
    """A rank keeps several ranges of the tensor's rows and scales."""
    weight, scale, meant = quantize(random(3 * 4 * HEAD_DIM, IN_FEATURES))
    x = random(3, IN_FEATURES, seed=8)

    def act(context: LayerContext) -> list[Tensor]:
        layer = QKVParallelLinear(all_int8(context), "m", IN_FEATURES, HEAD_DIM, 4, 4, layout=layout)  # type: ignore[arg-type]
        fill(layer, {"qkv_proj.weight": weight, "qkv_proj.weight_scale": scale})
        assert len(layer.weight.storages) == 1
        return list(layer(x).view(3, 3, -1, HEAD_DIM).unbind(1))

    shares = on_ranks(world_size, act)
    whole = functional.linear(x, meant).view(3, *((3, 4) if layout == "fused" else (4, 3)), HEAD_DIM)
    for kind in range(3):
        expected = whole[:, kind] if layout == "fused" else whole[:, :, kind]
        torch.testing.assert_close(torch.cat([share[kind] for share in shares], 1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gate_and_up_in_one_tensor(world_size: int) -> None:
    weight, scale, meant = quantize(random(2 * 9, IN_FEATURES))
    x = random(3, IN_FEATURES, seed=8)

    def act(context: LayerContext) -> tuple[Tensor, ...]:
        layer = MergedColumnParallelLinear(
            all_int8(context), "mlp", IN_FEATURES, {"gate_proj": 9, "up_proj": 9}, fused_name="gate_up_proj"
        )
        fill(layer, {"gate_up_proj.weight": weight, "gate_up_proj.weight_scale": scale})
        return layer(x).chunk(2, dim=-1)  # type: ignore[no-any-return]

    gates, ups = zip(*on_ranks(world_size, act), strict=True)
    found = torch.cat([*gates, *ups], -1)
    torch.testing.assert_close(found, functional.linear(x, meant), rtol=0, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_columns_are_divided_among_ranks(world_size: int) -> None:
    weight, scale, meant = quantize(random(11, IN_FEATURES))
    x = random(3, IN_FEATURES, seed=8)

    def act(context: LayerContext) -> Tensor:
        layer = RowParallelLinear(all_int8(context), "o", IN_FEATURES, 11)
        fill(layer, {"weight": weight, "weight_scale": scale})
        found: Tensor = layer(x[:, slice(*layer.share.columns)])
        return found

    for found in on_ranks(world_size, act):
        torch.testing.assert_close(found, functional.linear(x, meant), rtol=0, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_vocabulary(world_size: int) -> None:
    """Test an embedding, a tied one, and a separate head."""
    vocab_size = 13
    weight, scale, meant = quantize(random(vocab_size, IN_FEATURES))
    tensors = {"weight": weight, "weight_scale": scale}
    token_ids, x = torch.tensor([0, 12, 5, 5, 7]), random(3, IN_FEATURES, seed=8)

    def act(context: LayerContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        context = all_int8(context)
        sizes = vocab_size, IN_FEATURES
        embedding = VocabParallelEmbedding(context, "embed", *sizes)
        tied = VocabParallelEmbedding(context, "embed", *sizes, is_head=True)
        head = VocabParallelHead(context, "lm_head", IN_FEATURES, vocab_size)
        for layer in (embedding, tied, head):
            fill(layer, tensors)
        return embedding(token_ids), tied(token_ids), tied.logits(x), head.logits(x)

    for *embedded, tied_logits, logits in on_ranks(world_size, act):
        for found in embedded:
            torch.testing.assert_close(found, meant[token_ids], rtol=0, atol=1e-5)
        for found in (tied_logits, logits):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, functional.linear(x, meant), rtol=0, atol=1e-4)


def test_positions() -> None:
    weight, scale, meant = quantize(random(9, IN_FEATURES))
    layer = WholeEmbedding(all_int8(single_context()), "wpe", 9, IN_FEATURES)
    fill(layer, {"weight": weight, "weight_scale": scale})
    positions = torch.tensor([8, 0, 3])
    torch.testing.assert_close(layer(positions), meant[positions], rtol=0, atol=1e-5)


def test_a_router_sums_in_float32() -> None:
    """In a bfloat16 model, logits are nearer to the exact sums than bfloat16 numbers can be."""
    weight, scale, meant = quantize(random(7, IN_FEATURES))
    context = replace(all_int8(single_context()), dtype=torch.bfloat16)
    layer = Router(context, "gate", IN_FEATURES, 7, has_bias=True)
    fill(layer, {"weight": weight, "weight_scale": scale, "e_score_correction_bias": torch.ones(7)})
    x = random(50, IN_FEATURES, seed=8).to(torch.bfloat16)
    found, expected = layer(x), functional.linear(x.double(), meant.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert (expected.to(torch.bfloat16).double() - expected).abs().max() > 1e-3


def int8_moe(family: str, is_int8: Callable[[str], bool]) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return a MoeConfig, a checkpoint of it that is partly int8, and an unquantized one of the same values."""
    _, config, tensors = made(family)
    stored_tensors, meant = quantized(tensors)
    for name, tensor in tensors.items():
        if not is_int8(name) and tensor.ndim == 2:
            stored_tensors[name] = meant[name] = tensor
            del stored_tensors[f"{name}_scale"]
    return config, stored_tensors, meant


WHICH: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "experts": lambda name: "experts." in name,
    "gates": lambda name: "experts." in name and "gate_proj" in name,
    "down": lambda name: "experts." in name and "down_proj" in name,
    "some": lambda name: "experts.1." in name or ("experts.3." in name and "up_proj" in name),
    "others": lambda name: "experts." not in name,
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("which", "per_rank"),
    # Experts of different formats are refused in host memory.
    [(which, per_rank) for which in WHICH for per_rank in (0, 2) if which != "some" or not per_rank],
)
@pytest.mark.parametrize("family", ["qwen2", "deepseek-v3"])
def test_experts(family: str, which: str, world_size: int, per_rank: int) -> None:
    """Test resident and offloaded experts; qwen2 has a gated shared expert, deepseek-v3 a router bias."""
    is_int8 = WHICH[which]
    config, tensors, meant = int8_moe(family, is_int8)
    steps = [tokens(count) for count in (1, 19, 2, 40)]
    plain = loaded(single_context(), config, meant)

    def act(context: LayerContext) -> list[Tensor]:
        context = formats(context, lambda prefix: is_int8(prefix.removeprefix(f"{PREFIX}.")))
        layer = loaded(replace(context, num_experts_offload_per_rank=per_rank), config, tensors)
        finish(layer)
        store = layer.experts.store
        # The "others" of these layers are unquantized and keep one storage.
        first = {"all": SeparateExperts, "experts": SeparateExperts, "gates": StackedExperts, "some": MixedExperts}
        assert isinstance(store.gate_up, first.get(which, GroupedExperts))
        kind = {"all": SeparateExperts, "experts": SeparateExperts, "down": SeparateExperts, "some": MixedExperts}
        assert isinstance(store.down, kind.get(which, GroupedExperts))
        found = [layer(x) for x in steps]
        assert isinstance(store, OffloadedExperts) == (per_rank > 0)
        assert not isinstance(store, OffloadedExperts) or store.num_copies > 2
        return found

    for found in on_ranks(world_size, act):
        for x, given in zip(steps, found, strict=True):
            torch.testing.assert_close(given, plain(x), rtol=0, atol=1e-4)


def finish(layer: nn.Module) -> None:
    for module in layer.modules():
        if callable(act := getattr(module, "finish_loading", None)):
            act()


def test_bytes_of_an_offloaded_int8_expert() -> None:
    config, tensors, _ = int8_moe("mixtral", WHICH["all"])
    layer = loaded(replace(all_int8(single_context()), num_experts_offload_per_rank=3), config, tensors)
    store, size = layer.experts.store, config.intermediate_size
    assert isinstance(store, OffloadedExperts)
    # One byte for each number, and four for each row.
    assert store.bytes_per_expert == 3 * H * size + 4 * (2 * size + H)
    assert store.host_bytes == 4 * store.bytes_per_expert


def test_a_layout_that_cannot_be_copied_is_refused() -> None:
    class Elsewhere(SeparateExperts):
        def in_host_memory(self, count: int) -> SeparateExperts:
            return SeparateExperts(count, self.share, [PLAIN, PLAIN], torch.float32, torch.device("cpu"))

    config, gate_up = made("mixtral")[1], Share((Part("a", 9, ((0, 9),)), Part("b", 9, ((0, 9),))), H, (0, H))
    experts = Elsewhere(4, gate_up, [INT8, INT8], torch.float32, torch.device("cpu"))
    down = SeparateExperts(4, whole_rows(H, 9), [INT8], torch.float32, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"held by Int8Method\(\) have another layout in host memory.*leave out --num"
    ):
        OffloadedExperts(config, experts, down).finish()


def test_experts_of_different_formats_cannot_trade_places() -> None:
    _, config, _ = made("mixtral")
    context = formats(single_context(), lambda prefix: prefix.endswith("experts.3.down_proj"))
    with pytest.raises(ConfigError, match=r"different formats \(Unquantized.*Int8.*trade places; leave out --num-exp"):
        MoeLayer(replace(context, num_experts_offload_per_rank=2), PREFIX, H, config)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["v2-lite", "v2"])
def test_latent_attention(name: str, world_size: int) -> None:
    """Compare every projection with unquantized weights, which test_latent_attention.py compares with transformers."""
    case = make_case(name)
    tensors, meant = quantized(case.theirs.state_dict())
    expected = replace(case, theirs=Tensors(meant))
    whole = expected.run(expected.build(single_context()), [21])
    given = replace(case, theirs=Tensors(tensors))
    for found in on_ranks(world_size, lambda context: given.run(given.build(all_int8(context)), [13, 8])):
        torch.testing.assert_close(found, whole, rtol=0, atol=5e-4)


class Tensors(nn.Module):
    """Stands in for a module of which only the tensors are needed."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self._tensors


def test_shapes_and_kinds_are_checked_in_every_format() -> None:
    layer: Linear = MergedColumnParallelLinear(
        formats(single_context(), lambda prefix: prefix == "mlp.up"), "mlp", IN_FEATURES, {"gate": 4, "up": 4}
    )
    for name, part, tensor, message in (
        ("weight", "up", torch.zeros(4, IN_FEATURES + 1, dtype=torch.int8), r"\[4, 24\].*\[4, 23\]"),
        ("weight_scale", "up", torch.zeros(5), r"\[5\].*\[4\]"),
        ("weight", "up", torch.zeros(4, IN_FEATURES), "not torch.int8"),
        ("weight", "gate", torch.zeros(4, IN_FEATURES, dtype=torch.int8), "a quantized weight"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            layer.load_weight(name, tensor, part)


@dataclass(frozen=True)
class Named(UnquantizedMethod):
    """A format that a layer takes for another one, although the bits are the same."""

    name: str


def mixed_weight(methods: Iterable[LinearMethod], weight: Tensor, num_first: int) -> Weight:
    parts = [
        Part("first", num_first, ((0, num_first),)),
        Part("second", len(weight) - num_first, ((0, len(weight) - num_first),)),
    ]
    made = Weight(Share(parts, IN_FEATURES, (0, IN_FEATURES)), list(methods), torch.float32, torch.device("cpu"))
    made.load("first", "weight", weight[:num_first])
    made.load("second", "weight", weight[num_first:])
    made.finish()
    return made


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_storages_side_by_side_give_the_bits_of_one(shape: tuple[int, ...], out_dtype: torch.dtype | None) -> None:
    weight, x, bias = random(29, IN_FEATURES), random(*shape, IN_FEATURES, seed=1), random(29, seed=2)
    joined = mixed_weight([PLAIN, PLAIN], weight, 11)
    apart = mixed_weight([Named("one"), Named("two")], weight, 11)
    assert (len(joined.storages), len(apart.storages)) == (1, 2)
    assert torch.equal(apart.linear(x, bias, out_dtype=out_dtype), joined.linear(x, bias, out_dtype=out_dtype))


@pytest.mark.skipif(not recorded_steps.can_record(torch.device("cpu")), reason="needs the native library: make install")
def test_storages_side_by_side_can_be_recorded() -> None:
    weight, x = random(29, IN_FEATURES), random(3, IN_FEATURES, seed=1)
    apart = mixed_weight([Named("one"), Named("two")], weight, 11)
    (result,), recorded = recorded_steps.record(lambda: [apart.linear(x)], recorded_steps.StepMemory())
    assert isinstance(recorded, recorded_steps.RecordedStep), recorded
    x.copy_(random(3, IN_FEATURES, seed=2))
    recorded.replay()
    assert torch.equal(result, apart.linear(x))
