"""Layers whose parts are stored in ggml's formats, alike and mixed, whole and on two ranks, against the definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewick.errors import ConfigError
from pagewick.expert_routing import Routing
from pagewick.kernels import cpu, reference
from pagewick.kernels.options import StoredQuantized
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from pagewick.layers.expert_offload import OffloadedExperts
from pagewick.layers.latent_attention import LatentProjection
from pagewick.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from pagewick.layers.moe import MoeLayer
from pagewick.quantization import method_chooser
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.quantization.experts import MixedExperts, StackedExperts
from pagewick.quantization.grouped_experts import GroupedExperts
from tests.layers.ranks import on_ranks, single_context
from tests.weights.gguf.random_models import dequantized, random_blocks

H, HEAD_DIM = 256, 32
needs_library = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")


def known(*mixes: str) -> list[str]:
    return [mix for mix in mixes if set(mix.replace("/", " ").split()) <= {*BLOCK_FORMATS, "F16", "F32"}]


FORMATS = known("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "int4_g128", "fp8_g128")


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensor: rows of blocks, or numbers, and the numbers that it stands for."""

    format: str
    tensor: Tensor
    numbers: Tensor

    def product(self, x: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Multiply x by some of the rows and columns, in float32, as the definition says."""
        numbers = self.numbers[rows, columns]
        if self.format not in BLOCK_FORMATS:
            return functional.linear(x.float(), numbers.float())
        size, num_bytes = BLOCK_FORMATS[self.format]
        first, last = columns.start or 0, columns.stop or self.numbers.shape[1]
        data = self.tensor[rows, first // size * num_bytes : last // size * num_bytes].contiguous()
        return reference.quantized_linear(
            x, StoredQuantized(data, *numbers.shape, self.format, False), None, torch.float32
        )


def stored(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> Stored:
    if kind in BLOCK_FORMATS:
        blocks = random_blocks(kind, num_rows, num_columns, std=num_columns**-0.5, seed=seed)
        return Stored(kind, blocks, dequantized(kind, blocks))
    numbers = random(num_rows, num_columns, seed=seed) * num_columns**-0.5
    tensor = numbers.half() if kind == "F16" else numbers
    return Stored(kind, tensor, tensor.float())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def context_for(context: LayerContext, tensors: Mapping[str, Stored]) -> LayerContext:
    """Choose formats as for a checkpoint with these tensors, given by their names without `.weight`."""
    types = {f"{name}.weight": s.format if s.format in BLOCK_FORMATS else s.tensor.dtype for name, s in tensors.items()}
    return replace(context, choose_method=method_chooser(types))


def load(layer: Any, prefix: str, tensors: Mapping[str, Stored]) -> None:
    """Load a layer whose checkpoint name is `prefix`; it must expect all tensors."""
    left = set(tensors)
    for path, module in layer.named_modules():
        own = ".".join(name for name in (prefix, path) if name)
        for part, leaf in getattr(module, "expected_weights", list)():
            # Parts are named beside a submodule, but below the layer itself.
            owner = own if part is None else ".".join([*(own if not path else own.rpartition(".")[0]).split("."), part])
            module.load_weight(leaf, tensors[owner].tensor, part)
            left.remove(owner)
        if hasattr(module, "finish_loading"):
            module.finish_loading()
    assert not left


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "mix",
    known(
        "Q8_0 Q8_0 Q8_0",
        "Q8_0 F16 F32",
        "Q4_K Q4_K Q6_K",
        "Q4_0 Q4_1 Q8_0",
        "Q5_K F32 Q5_K",
        "int4_g64 int4_g64 fp8_g32",
    ),
)
def test_queries_keys_and_values(mix: str, world_size: int) -> None:
    """Two ranks share one KV head. Neighbours of one format share a storage."""
    formats, sizes = mix.split(), {"q_proj": 4 * HEAD_DIM, "k_proj": HEAD_DIM, "v_proj": HEAD_DIM}
    tensors = {f"m.{n}": stored(f, sizes[n], H, i) for i, (n, f) in enumerate(zip(sizes, formats, strict=True))}
    x = random(2, 3, H, seed=8)

    def act(context: LayerContext) -> list[Tensor]:
        layer = QKVParallelLinear(context_for(context, tensors), "m", H, HEAD_DIM, 4, 1)
        load(layer, "m", tensors)
        # Without blocks, both have one format: that of activations.
        is_plain = [None if f in ("F16", "F32") else f for f in formats]
        assert len(layer.weight.storages) == 1 + sum(a != b for a, b in pairwise(is_plain))
        return list(layer(x).split([4 * HEAD_DIM // world_size, HEAD_DIM, HEAD_DIM], dim=-1))

    queries = []
    q, k, v = (tensor.product(x) for tensor in tensors.values())
    for found in on_ranks(world_size, act):
        queries.append(found[0])
        close(found[1], k)
        close(found[2], v)
    close(torch.cat(queries, dim=-1), q)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mix", known("Q8_0 Q8_0", "F16 Q8_0", "Q4_K Q6_K", "Q4_0 Q5_1"))
def test_gate_and_up(mix: str, world_size: int) -> None:
    tensors = {
        f"mlp.{n}": stored(f, 90, H, i) for i, (n, f) in enumerate(zip(("gate", "up"), mix.split(), strict=True))
    }
    x = random(3, H, seed=8)

    def act(context: LayerContext) -> tuple[Tensor, Tensor]:
        layer = MergedColumnParallelLinear(context_for(context, tensors), "mlp", H, {"gate": 90, "up": 90})
        load(layer, "mlp", tensors)
        gate, up = layer(x).chunk(2, dim=-1)
        return gate, up

    for name, found in zip(("gate", "up"), zip(*on_ranks(world_size, act), strict=True), strict=True):
        close(torch.cat(found, dim=-1), tensors[f"mlp.{name}"].product(x))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_that_hold_all_parts(name: str, world_size: int) -> None:
    """A rank keeps several ranges of rows: as in Phi-3, GLM-4 and StarCoder."""
    fused, both = stored(name, 3 * 4 * HEAD_DIM, H), stored(name, 2 * 90, H, 1)
    x = random(3, H, seed=8)

    def act(context: LayerContext) -> list[Tensor]:
        found = []
        for layout in ("fused", "by_head"):
            tensors = {"m.qkv_proj": fused}
            layer = QKVParallelLinear(context_for(context, tensors), "m", H, HEAD_DIM, 4, 4, layout=layout)  # type: ignore[arg-type]
            load(layer, "m", tensors)
            found.append(layer(x).view(3, 3, -1, HEAD_DIM))
        tensors = {"m.gate_up_proj": both}
        sizes = {"gate_proj": 90, "up_proj": 90}
        gate_up = MergedColumnParallelLinear(context_for(context, tensors), "m", H, sizes, fused_name="gate_up_proj")
        load(gate_up, "m", tensors)
        return [*found, gate_up(x).view(3, 2, -1)]

    first, second, third = zip(*on_ranks(world_size, act), strict=True)
    whole = fused.product(x)
    close(torch.cat(first, dim=2), whole.view(3, 3, 4, HEAD_DIM))
    close(torch.cat(second, dim=2), whole.view(3, 4, 3, HEAD_DIM).transpose(1, 2))
    close(torch.cat(third, dim=2), both.product(x).view(3, 2, 90))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_vocabulary(name: str, world_size: int) -> None:
    """Rows of an embedding are looked up as numbers; as a head, tied or not, the weight is multiplied."""
    tensors = {"embed": stored(name, 71, H)}
    token_ids, x = torch.tensor([0, 70, 35, 36, 36]), random(3, H, seed=8)

    def act(context: LayerContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        context = context_for(context, tensors)
        embedding = VocabParallelEmbedding(context, "embed", 71, H)
        tied = VocabParallelEmbedding(context, "embed", 71, H, is_head=True)
        head = VocabParallelHead(context, "embed", H, 71)
        for layer in (embedding, tied, head):
            load(layer, "embed", tensors)
        return embedding(token_ids), tied(token_ids), tied.logits(x), head.logits(x)

    for *embedded, tied_logits, logits in on_ranks(world_size, act):
        assert all(torch.equal(found, tensors["embed"].numbers[token_ids]) for found in embedded)
        for found in (tied_logits, logits):
            assert found.dtype == torch.float32
            close(found, tensors["embed"].product(x))


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_divided_between_blocks(name: str) -> None:
    """Each rank quantizes the activations of its own columns: only the order of the sums differs from one rank's."""
    weight, x = stored(name, 33, 512), random(3, 512, seed=8)

    def act(context: LayerContext) -> Tensor:
        layer = RowParallelLinear(context_for(context, {"o": weight}), "o", 512, 33)
        load(layer, "o", {"o": weight})
        found: Tensor = layer(x[:, slice(*layer.share.columns)])
        return found

    halves = [weight.product(x[:, half], columns=half) for half in (slice(0, 256), slice(256, 512))]
    for found in on_ranks(2, act):
        close(found, halves[0] + halves[1], 1e-5)
        close(found, weight.product(x))


@pytest.mark.parametrize(("name", "columns", "ranks"), [("Q8_0", 96, 2), *(("Q4_K", 768, 2) for _ in known("Q4_K"))])
def test_columns_are_not_cut_inside_a_block(name: str, columns: int, ranks: int) -> None:
    weight = stored(name, 8, columns)

    def act(context: LayerContext) -> None:
        load(RowParallelLinear(context_for(context, {"o": weight}), "o", columns, 8), "o", {"o": weight})

    with pytest.raises(ConfigError, match=f"cannot cut {columns} input columns at 0:{columns // 2}.*3"):
        on_ranks(ranks, act)
    on_ranks(3, act)


PREFIX, SIZE = "model.layers.3.mlp", 512
CONFIG = MoeConfig(
    num_experts=6, intermediate_size=SIZE, routing=Routing(top_k=2, renormalize=True), shared_intermediate_size=SIZE,
    has_shared_gate=True,
)  # fmt: skip
# The formats of gate, up and down projections, first those of the experts, then of the shared expert; / separates those
# of different experts.
MIXES = known(
    "Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0", "Q8_0 F16 Q8_0 F32 Q8_0 F16", "Q4_K Q4_K Q6_K Q4_K Q4_K Q6_K",
    "Q4_K Q6_K Q5_K Q8_0 Q4_0 Q6_K", "Q8_0 Q4_K Q4_0 Q8_0 Q8_0 Q8_0", "Q4_K/Q6_K Q4_K Q6_K/Q5_0 Q8_0 Q8_0 Q8_0",
    "Q4_0 Q4_0 Q4_1 Q8_0 Q8_0 Q5_1", "F16 F16 Q8_0 Q8_0 Q8_0 F32",
    "int4_g128 int4_g128 fp8_g128 fp8_g32 fp8_g32 int4_g32",
)  # fmt: skip


def experts(mix: str) -> dict[str, Stored]:
    owners = [*(f"experts.{expert}" for expert in range(CONFIG.num_experts)), "shared_expert"]
    tensors = {"gate": stored("F32", CONFIG.num_experts, H), "shared_expert_gate": stored("F32", 1, H, 1)}
    for number, owner in enumerate(owners):
        formats = mix.split()[3:] if owner == "shared_expert" else mix.split()[:3]
        for index, name in enumerate(("gate", "up", "down")):
            shape = (H, SIZE) if name == "down" else (SIZE, H)
            kinds = formats[index].split("/")
            tensors[f"{owner}.{name}_proj"] = stored(kinds[number % 3 % len(kinds)], *shape, 3 * number + index)
    return {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}


def moe_layer(context: LayerContext, tensors: Mapping[str, Stored]) -> MoeLayer:
    layer = MoeLayer(context_for(context, tensors), PREFIX, H, CONFIG)
    load(layer, PREFIX, tensors)
    return layer


def one_by_one(tensors: Mapping[str, Stored], x: Tensor) -> Tensor:
    """The layer's output [T, H], expert by expert, as the definition says."""

    def expert(owner: str, row: Tensor) -> Tensor:
        gate, up = (tensors[f"{PREFIX}.{owner}.{name}_proj"].product(row) for name in ("gate", "up"))
        return tensors[f"{PREFIX}.{owner}.down_proj"].product(functional.silu(gate) * up)

    probabilities = tensors[f"{PREFIX}.gate"].product(x).softmax(-1)
    weights, chosen = probabilities.topk(CONFIG.routing.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for token in range(len(x)):
        row = x[token : token + 1]
        found = [w * expert(f"experts.{e}", row) for w, e in zip(weights[token], chosen[token].tolist(), strict=True)]
        gate = tensors[f"{PREFIX}.shared_expert_gate"].product(row).sigmoid()
        rows.append(sum(found) + gate * expert("shared_expert", row))
    return torch.cat(rows)


def test_experts_of_different_formats_are_refused_in_host_memory() -> None:
    tensors = experts(next(mix for mix in MIXES if "/" in mix))

    def act(context: LayerContext) -> MoeLayer:
        return moe_layer(replace(context, num_experts_offload_per_rank=2), tensors)

    with pytest.raises(ConfigError, match=r"different formats .* leave out --num-experts-offload-per-rank"):
        on_ranks(1, act)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("mix", "per_rank"),
    # Experts of different formats are refused in host memory.
    [(mix, per_rank) for mix in MIXES for per_rank in (0, 2) if "/" not in mix or not per_rank],
)
def test_experts(mix: str, world_size: int, per_rank: int) -> None:
    tensors, steps = experts(mix), [random(count, H, seed=count) for count in (1, 7, 2, 3)]

    def act(context: LayerContext) -> list[Tensor]:
        layer = moe_layer(replace(context, num_experts_offload_per_rank=per_rank), tensors)
        found = [layer(x) for x in steps]
        store = layer.experts.store
        assert isinstance(store, OffloadedExperts) == (per_rank > 0)
        assert not isinstance(store, OffloadedExperts) or store.num_copies > 2
        return found

    for answers in on_ranks(world_size, act):
        for x, found in zip(steps, answers, strict=True):
            # A last bit of an activation may decide how it is rounded to 8 bits.
            close(found, one_by_one(tensors, x), 1e-2)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
def test_a_token_has_the_same_bits_in_any_batch_and_anywhere(mix: str, dtype: torch.dtype) -> None:
    tensors, x = experts(mix), random(50, H, seed=4).to(dtype)
    layer = moe_layer(replace(single_context(), dtype=dtype), tensors)
    layers = [layer]
    if "/" not in mix:
        layers.append(moe_layer(replace(single_context(), dtype=dtype, num_experts_offload_per_rank=3), tensors))
    together = layer(x)
    for found in layers:
        assert torch.equal(torch.cat([found(row) for row in x.split(1)]), together)
        assert torch.equal(torch.cat([found(rows) for rows in x.split(7)]), together)


@needs_library
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_is_recorded(mix: str) -> None:
    """A step recorded with some tokens is right for others, which use other experts."""
    tensors, x = experts(mix), random(3, H)
    layer = moe_layer(single_context(), tensors)
    gate, up, _ = ["F16" if name == "F32" else name for name in mix.split()[:3]]
    kind = MixedExperts if "/" in gate else GroupedExperts if gate == up else StackedExperts
    assert type(layer.experts.store.gate_up) is kind
    with torch.inference_mode():
        (found,), recorded = record(lambda: [layer(x)], StepMemory())
        if kind is MixedExperts:
            # Which formats are multiplied is known within a step only.
            assert isinstance(recorded, str)
            return
        assert isinstance(recorded, RecordedStep), recorded
        x.copy_(random(3, H, seed=1))
        recorded.replay()
        assert torch.equal(found, layer(x))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_latents_become_keys_and_values(name: str, world_size: int) -> None:
    """kv_b_proj is multiplied transposed, which no format allows: its numbers are used."""
    config = MlaConfig(
        num_heads=4, q_lora_rank=None, kv_lora_rank=H, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=40,
        softmax_scale=1.0,
    )  # fmt: skip
    tensors = {"kv_b": stored(name, 4 * 64, H)}
    queries, latents = random(5, 4, 24), random(5, 4, H, seed=1)

    def act(context: LayerContext) -> tuple[Tensor, Tensor]:
        layer = LatentProjection(context_for(context, tensors), "kv_b", config)
        load(layer, "kv_b", tensors)
        heads = slice(context.tp_rank * layer.num_heads, (context.tp_rank + 1) * layer.num_heads)
        return layer.queries.linear(queries[:, heads]), layer.values.linear(latents[:, heads])

    numbers = tensors["kv_b"].numbers.view(4, 64, H)
    keys, values = zip(*on_ranks(world_size, act), strict=True)
    close(torch.cat(keys, 1), torch.einsum("thd,hdr->thr", queries, numbers[:, :24]))
    close(torch.cat(values, 1), torch.einsum("thr,hdr->thd", latents, numbers[:, 24:]))
