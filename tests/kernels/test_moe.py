"""Mixtures of experts against loops in float64 and transformers' routers, and bit for bit against single products."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.phimoe import modeling_phimoe as phimoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from pagewick import kernels as dispatched
from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.cpu import moe
from pagewick.kernels.matrix import Experts
from pagewick.kernels.options import Identities, MoeBiases, SharedOutput
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import NativeKernels, required_library

Kernels = ModuleType | NativeKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of a result.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# experts, top_k, tokens, inputs, outputs
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 1, 130, 33, 65),
    (2, 2, 7, 64, 64),
    (5, 3, 7, 97, 130),
    (8, 2, 130, 31, 63),
    (64, 8, 1, 128, 200),
    (64, 8, 7, 66, 1),
    (60, 4, 130, 1, 67),
    (4, 1, 300, 257, 129),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def some_experts(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Ids [T, A] int32, all different in a row; some experts have far more tokens than others."""
    favour = torch.linspace(0, 3, num_experts)
    return (random(num_tokens, num_experts) + favour).topk(top_k).indices.to(torch.int32)


def loaded(weight: Tensor) -> Experts:
    num_experts, outputs, inputs = weight.shape
    experts = Experts.empty(num_experts, outputs, inputs, weight.dtype, "cpu")
    for expert, rows in enumerate(weight):
        experts.load(expert, rows, 0)
    return experts


def plain(weight: Tensor) -> Experts:
    return Experts(weight, *weight.shape, is_packed=False)


def products(x: Tensor, weight: Tensor, expert_ids: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, in float64, choice by choice."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    rows = []
    for choice, expert in enumerate(expert_ids.flatten().tolist()):
        product = weight[expert] @ x[choice if len(x) == expert_ids.numel() else choice // expert_ids.shape[1]]
        rows.append(product if bias is None else product + bias[expert])
    return torch.stack(rows)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # Sums in fp32 are off by so much of the greatest result; below 2^-14, float16 has no finer steps than 2^-24.
    error = 2e-6 * (expected.abs().max().item() if expected.numel() else 0.0)
    subnormal = 2**-25 if dtype == torch.float16 else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=error + subnormal)


# --- products ---------------------------------------------------------------------------------------------------------


@functools.cache
def product_case(shape: tuple[int, ...], dtype: torch.dtype, per_choice: bool) -> tuple[Tensor, ...]:
    """x, weight, expert_ids, bias, and the result in float64."""
    num_experts, top_k, num_tokens, inputs, outputs = shape
    weight, bias = random(num_experts, outputs, inputs, dtype=dtype), random(num_experts, outputs, dtype=dtype)
    x = random(num_tokens * top_k if per_choice else num_tokens, inputs, dtype=dtype)
    expert_ids = some_experts(num_tokens, num_experts, top_k)
    return x, weight, expert_ids, bias, products(x, weight, expert_ids, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_choice", [False, True])
def test_products(kernels: Kernels, dtype: torch.dtype, per_choice: bool) -> None:
    for shape in SHAPES:
        x, weight, expert_ids, bias, expected = product_case(shape, dtype, per_choice)
        experts = plain(weight) if kernels is reference else loaded(weight)
        out = kernels.grouped_linear(x, experts, expert_ids, bias)
        assert_near(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_have_the_bits_of_single_ones(native: NativeKernels, dtype: torch.dtype) -> None:
    for num_experts, top_k, num_tokens, inputs, outputs in SHAPES:
        experts = loaded(random(num_experts, outputs, inputs, dtype=dtype))
        bias, x = random(num_experts, outputs, dtype=dtype), random(num_tokens, inputs, dtype=dtype)
        expert_ids = some_experts(num_tokens, num_experts, top_k)
        rows = experts.linear(x, expert_ids, bias)
        for choice in range(0, num_tokens * top_k, 5):
            expert = int(expert_ids.flatten()[choice])
            assert torch.equal(rows[choice], experts.matrix(expert).linear(x[choice // top_k], bias[expert]))
        for count in (2, 3):
            native.set_num_threads(count)
            assert torch.equal(experts.linear(x, expert_ids, bias), rows)
        native.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 700])
def test_all_tokens_go_to_one_expert(native: NativeKernels, num_tokens: int, dtype: torch.dtype) -> None:
    experts = loaded(random(7, 100, 66, dtype=dtype))
    x = random(num_tokens, 66, dtype=dtype)
    expert_ids = torch.full((num_tokens, 1), 5, dtype=torch.int32)
    expected = experts.matrix(5).linear(x)
    for count in (1, 2, 3):
        native.set_num_threads(count)
        assert torch.equal(experts.linear(x, expert_ids), expected)


def test_an_expert_may_be_chosen_twice(native: NativeKernels) -> None:
    experts, x = loaded(random(3, 5, 9)), random(2, 9)
    rows = experts.linear(x, torch.tensor([[2, 2], [0, 2]], dtype=torch.int32))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[3], experts.matrix(2).linear(x[1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor(native: NativeKernels, dtype: torch.dtype) -> None:
    experts, wide = loaded(random(4, 70, 35, dtype=dtype)), random(9, 80, dtype=dtype)
    expert_ids = some_experts(9, 4, 2)
    x = wide[:, 7:42]
    assert torch.equal(experts.linear(x, expert_ids), experts.linear(x.contiguous(), expert_ids))
    turned = wide[:, 7:42].T.contiguous().T
    assert torch.equal(experts.linear(turned, expert_ids), experts.linear(x, expert_ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens(kernels: Kernels, dtype: torch.dtype) -> None:
    weight, x, logits = random(4, 6, 5, dtype=dtype), random(0, 5, dtype=dtype), random(0, 4)
    expert_ids, weights = kernels.route(logits, Routing(top_k=2))
    assert (expert_ids.shape, weights.shape) == ((0, 2), (0, 2))
    assert loaded(weight).linear(x, expert_ids).shape == (0, 6)
    assert reference.grouped_linear(x, plain(weight), expert_ids).shape == (0, 6)
    assert kernels.combine(random(0, 6, dtype=dtype), weights).shape == (0, 6)
    gate_up, down = loaded(random(4, 6, 5, dtype=dtype)), loaded(random(4, 5, 3, dtype=dtype))
    assert dispatched.fused_moe(x, logits, gate_up, down, Routing(top_k=2)).shape == (0, 5)


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -(2**31)])
def test_ids_that_no_expert_has(wrong: int) -> None:
    weight, x = random(4, 6, 5), random(2, 5)
    expert_ids = torch.tensor([[0, 1], [2, wrong]], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"outside 0 \.\. 3"):
        loaded(weight).linear(x, expert_ids)
    with pytest.raises(IndexError, match=r"outside 0 \.\. 3"):
        reference.grouped_linear(x, plain(weight), expert_ids)


def test_weights_come_in_parts(native: NativeKernels) -> None:
    for dtype in DTYPES:
        weight = random(3, 150, 37, dtype=dtype)
        experts = Experts.empty(3, 150, 37, dtype, "cpu")
        for expert, first in itertools.product((2, 0, 1), (130, 0, 63)):
            end = {130: 150, 0: 63, 63: 130}[first]
            experts.load(expert, weight[expert, first:end].float(), first)
        assert torch.equal(torch.stack([experts.matrix(expert).plain() for expert in range(3)]), weight)


def test_weights_that_do_not_fit() -> None:
    experts = Experts.empty(3, 10, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match="no expert 3 among 3"):
        experts.load(3, torch.zeros(1, 4), 0)
    with pytest.raises(ValueError, match="do not fit"):
        experts.load(0, torch.zeros(2, 4), 9)
    with pytest.raises(ValueError, match="do not fit"):
        experts.linear(torch.zeros(1, 5), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="must have 2 rows, or 4"):
        experts.linear(torch.zeros(3, 4), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"torch\.int32"):
        experts.linear(torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.int64))


# --- routing ----------------------------------------------------------------------------------------------------------


def their_router(
    family: ModuleType, name: str, logits: Tensor, *, renormalize: bool = False, **fields: Any
) -> tuple[Tensor, Tensor]:
    """Ids and weights of a router of transformers, whose weight is the identity; sorted by id."""
    num_experts = logits.shape[1]
    config = SimpleNamespace(
        num_experts=num_experts, num_local_experts=num_experts, hidden_size=num_experts, norm_topk_prob=renormalize,
        n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=1.0,
    )  # fmt: skip
    bias = fields.pop("bias", None)
    vars(config).update(fields)
    router = getattr(family, name)(config)
    torch.nn.init.eye_(router.weight)
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, weights, expert_ids = router(logits)
    return by_id(expert_ids, weights)


def by_id(expert_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = expert_ids.argsort(-1)
    return expert_ids.gather(-1, order).to(torch.int64), weights.gather(-1, order)


def assert_same_routes(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert actual[0].dtype == torch.int32
    ids, weights = by_id(*actual)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (64, 8), (67, 67)])
def test_routes_of_mixtral_and_qwen(kernels: Kernels, num_experts: int, top_k: int) -> None:
    logits = 2 * random(37, num_experts)
    theirs = their_router(mixtral, "MixtralTopKRouter", logits, num_experts_per_tok=top_k)
    assert_same_routes(kernels.route(logits, Routing(top_k=top_k, renormalize=True)), theirs)
    theirs = their_router(qwen3_moe, "Qwen3MoeTopKRouter", logits, num_experts_per_tok=top_k)
    assert_same_routes(kernels.route(logits, Routing(top_k=top_k)), theirs)


@pytest.mark.parametrize(("groups", "top_k_groups"), [(1, 1), (8, 3), (16, 1), (5, 4)])
def test_routes_of_deepseek_v2(kernels: Kernels, groups: int, top_k_groups: int) -> None:
    logits = 2 * random(37, groups * 10)
    theirs = their_router(
        deepseek_v2, "DeepseekV2TopkRouter", logits, num_experts_per_tok=6, n_group=groups, topk_group=top_k_groups,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0,
    )  # fmt: skip
    routing = Routing(top_k=6, num_groups=groups, top_k_groups=top_k_groups, scaling=16.0)
    assert_same_routes(kernels.route(logits, routing), theirs)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("groups", "top_k_groups"), [(1, 1), (8, 4), (16, 3), (2, 2)])
def test_routes_of_deepseek_v3(kernels: Kernels, groups: int, top_k_groups: int, renormalize: bool) -> None:
    logits, bias = 2 * random(37, groups * 8), random(groups * 8) / 4
    theirs = their_router(
        deepseek_v3, "DeepseekV3TopkRouter", logits, num_experts_per_tok=8, n_group=groups, topk_group=top_k_groups,
        bias=bias, renormalize=renormalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    routing = Routing(
        top_k=8, scoring="sigmoid", renormalize=renormalize, num_groups=groups, top_k_groups=top_k_groups,
        group_score="sum_of_two", scaling=2.5,
    )  # fmt: skip
    assert_same_routes(kernels.route(logits, routing, bias), theirs)


@pytest.mark.parametrize("margin", [0.02, 0.6, 1.5])
def test_routes_of_phi_moe(kernels: Kernels, margin: float) -> None:
    """Logits of both signs: the second choice may be below 0, too."""
    logits = 2 * random(300, 7) - torch.linspace(0, 4, 300)[:, None]
    weights, expert_ids = phimoe.sparsemixer(logits, jitter_eps=margin / 2, training=False)
    found = kernels.route(logits, Routing(top_k=2, scoring="near", margin=margin))
    assert_same_routes(found, by_id(expert_ids, weights))
    # Some weights are 1, because nothing is near, and with a wide margin most are not.
    shares = (found[1] > 0.999).float().mean()
    assert 0.0 < float(shares) < 1.0 and (margin < 0.1) == (float(shares) > 0.8)


def test_experts_near_each_other_know_no_bias(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="a bias is added to scores"):
        kernels.route(torch.zeros(2, 6), Routing(top_k=2, scoring="near"), torch.zeros(6))
    with pytest.raises(ValueError, match="have no groups"):
        Routing(top_k=2, scoring="near", num_groups=2)


def test_the_best_come_first_and_the_lowest_id_among_equals(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0] * 6, [-500.0, 100.0, -400.0, -300.0, 0.0, -350.0]])
    assert kernels.route(logits, Routing(top_k=4))[0].tolist() == [[1, 2, 4, 3], [0, 1, 2, 3], [1, 4, 3, 5]]
    grouped = Routing(top_k=3, num_groups=3, top_k_groups=2)
    assert kernels.route(logits, grouped)[0].tolist() == [[1, 2, 3], [0, 1, 2], [1, 4, 5]]
    by_sums = Routing(top_k=2, scoring="sigmoid", num_groups=3, top_k_groups=1, group_score="sum_of_two")
    assert kernels.route(logits, by_sums)[0].tolist() == [[2, 3], [0, 1], [1, 0]]


def test_a_bias_changes_the_choice_but_no_weight(kernels: Kernels) -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 2.0, 0.0, 1.0])
    expert_ids, weights = kernels.route(logits, Routing(top_k=2, scoring="sigmoid", scaling=3.0), bias)
    assert (expert_ids.tolist(), weights.tolist()) == ([[1, 3]], [[1.5, 1.5]])


def test_a_number_is_added_to_the_sum_of_weights(kernels: Kernels) -> None:
    logits = random(9, 20)
    plain, found = (
        kernels.route(logits, Routing(top_k=3, scoring="sigmoid", renormalize=is_normed, epsilon=0.25))[1]
        for is_normed in (False, True)
    )
    torch.testing.assert_close(found, plain / (plain.sum(-1, keepdim=True) + 0.25), rtol=1e-6, atol=0)


def test_weights_may_have_factors_of_their_experts(kernels: Kernels) -> None:
    logits, scales = random(9, 20), random(20, seed=1)
    routing = Routing(top_k=3, renormalize=True, scaling=0.5)
    expert_ids, weights = kernels.route(logits, routing)
    scaled_ids, scaled = kernels.route(logits, routing, None, scales)
    assert torch.equal(scaled_ids, expert_ids)
    assert torch.equal(scaled, weights * scales[expert_ids.long()])


def test_logits_without_bounds(kernels: Kernels) -> None:
    infinity, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[-infinity] * 5, [nan] * 5, [0.0, nan, 1.0, nan, 2.0], [-infinity, 0.0, -infinity, 0.0, -1.0]]
    )
    for routing in (Routing(top_k=3, renormalize=True), Routing(top_k=3, scoring="sigmoid", renormalize=True)):
        expert_ids, weights = kernels.route(logits, routing)
        assert expert_ids.tolist() == [[0, 1, 2], [0, 1, 2], [1, 3, 4], [1, 3, 4]]
        assert weights[1].isnan().all()
        assert weights[3].isfinite().all()
    assert (
        kernels.route(torch.full((1, 3), -1e30), Routing(top_k=2, scoring="sigmoid", renormalize=True))[1].eq(0).all()
    )


def test_a_route_is_its_tokens_own(native: NativeKernels) -> None:
    logits = random(300, 64)
    wide = torch.full((300, 70), float("nan"))
    wide[:, 3:67] = logits
    routing = Routing(top_k=8, renormalize=True, num_groups=8, top_k_groups=5)
    expert_ids, weights = native.route(logits, routing)
    for count in (2, 3):
        native.set_num_threads(count)
        again = native.route(wide[:, 3:67], routing)
        assert torch.equal(again[0], expert_ids)
        assert torch.equal(again[1], weights)
    alone = [native.route(logits[i : i + 1], routing) for i in range(300)]
    assert torch.equal(torch.cat([ids for ids, _ in alone]), expert_ids)
    assert torch.equal(torch.cat([weights for _, weights in alone]), weights)


def test_routings_that_contradict_themselves(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        Routing(top_k=0)
    with pytest.raises(ValueError, match=r"top_k_groups must be 1 \.\. num_groups \(2\), not 3"):
        Routing(top_k=1, num_groups=2, top_k_groups=3)
    for routing, message in (
        (Routing(top_k=7), "top_k 7 experts are not in 1 groups of 6"),
        (Routing(top_k=4, num_groups=3, top_k_groups=1), "top_k 4 experts are not in 1 groups of 2"),
        (Routing(top_k=1, num_groups=4), "6 experts do not make 4 equal groups"),
        (Routing(top_k=1, num_groups=6, group_score="sum_of_two"), "no best two"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.route(torch.zeros(2, 6), routing)


# --- sums and the whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "top_k", "size"), [(1, 1, 1), (7, 8, 65), (130, 3, 100), (2, 2, 4099)])
def test_sums(kernels: Kernels, num_tokens: int, top_k: int, size: int, dtype: torch.dtype) -> None:
    y, weights = random(num_tokens * top_k, size, dtype=dtype), random(num_tokens, top_k)
    shared, gate = random(num_tokens, size + 3, dtype=dtype)[:, 1:-2], 3 * random(num_tokens, seed=1)
    expected = (weights.double()[:, :, None] * y.double().view(num_tokens, top_k, size)).sum(1)
    assert_near(kernels.combine(y, weights), expected, dtype)
    assert_near(kernels.combine(y, weights, SharedOutput(shared)), expected + shared.double(), dtype)
    gated = expected + gate.double().sigmoid()[:, None] * shared.double()
    assert_near(kernels.combine(y, weights, SharedOutput(shared, gate)), gated, dtype)


def test_sums_are_in_the_order_of_the_choices(kernels: Kernels) -> None:
    y = torch.tensor([[1.0], [1e8], [-1e8], [1e8], [-1e8], [1.0]])
    assert kernels.combine(y, torch.ones(2, 3)).tolist() == [[0.0], [1.0]]
    assert kernels.combine(y, torch.ones(2, 3), SharedOutput(torch.tensor([[5.0], [0.5]]))).tolist() == [[5.0], [1.5]]


class Layer:
    """A mixture with everything that a model may want of it."""

    def __init__(
        self,
        dtype: torch.dtype,
        num_experts: int,
        top_k: int,
        hidden: int,
        inner: int,
        gated: bool,
        activation: str = "silu",
    ) -> None:
        self.weights = (
            random(num_experts, inner * (2 if gated else 1), hidden, dtype=dtype) / hidden**0.5,
            random(num_experts, hidden, inner, dtype=dtype) / inner**0.5,
        )
        self.biases = tuple(random(*weight.shape[:2], dtype=dtype) for weight in self.weights)
        self.gate_up, self.down = map(loaded, self.weights)
        self.routing = Routing(top_k=top_k, renormalize=True, scoring="sigmoid")
        self.router_bias = random(num_experts)
        self.is_gated, self.activation = gated, activation

    def inputs(self, num_tokens: int) -> dict[str, Tensor]:
        hidden, dtype = self.down.num_rows, self.weights[0].dtype
        return {
            "x": random(num_tokens, hidden, dtype=dtype),
            "logits": random(num_tokens, self.down.num_experts),
            "shared": random(num_tokens, hidden, dtype=dtype, seed=1),
            "shared_gate": random(num_tokens, seed=2),
        }

    def fused(self, x: Tensor, logits: Tensor, shared: Tensor, shared_gate: Tensor) -> Tensor:
        return dispatched.fused_moe(
            x, logits, self.gate_up, self.down, self.routing, activation=self.activation,
            biases=MoeBiases(self.router_bias, *self.biases), shared=SharedOutput(shared, shared_gate),
        )  # fmt: skip

    def in_steps(self, x: Tensor, logits: Tensor, shared: Tensor, shared_gate: Tensor) -> Tensor:
        expert_ids, weights = dispatched.route(logits, self.routing, self.router_bias)
        if self.routing.weighs_inputs:
            x = (x.float()[:, None] * weights[:, :, None]).to(x.dtype).flatten(0, 1)
            weights = torch.ones_like(weights)
        inner = self.gate_up.linear(x, expert_ids, self.biases[0])
        activated = (dispatched.gated_activation if self.is_gated else dispatched.activation)(inner, self.activation)
        given = self.down.linear(activated, expert_ids, self.biases[1])
        return dispatched.combine(given, weights, SharedOutput(shared, shared_gate))

    def in_float64(self, x: Tensor, logits: Tensor, shared: Tensor, shared_gate: Tensor) -> Tensor:
        expert_ids, weights = reference.route(logits, self.routing, self.router_bias)
        if self.routing.weighs_inputs:
            x = (x.double()[:, None] * weights.double()[:, :, None]).flatten(0, 1)
            weights = torch.ones_like(weights)
        inner = products(x, self.weights[0], expert_ids, self.biases[0])
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            activated = gate * gate.sigmoid() * up
        else:
            activated = inner.clamp(min=0) ** 2 if self.activation == "relu2" else inner * inner.sigmoid()
        y = products(activated, self.weights[1], expert_ids, self.biases[1])
        total = (weights.double()[:, :, None] * y.view(*weights.shape, -1)).sum(1)
        return total + shared_gate.double().sigmoid()[:, None] * shared.double()


@functools.cache
def layer_case(
    dtype: torch.dtype, shape: tuple[int, int, int, int], num_tokens: int, gated: bool, activation: str
) -> tuple[Layer, dict[str, Tensor], Tensor]:
    """A layer, what goes in, and what should come out."""
    layer = Layer(dtype, *shape, gated, activation)
    inputs = layer.inputs(num_tokens)
    return layer, inputs, layer.in_float64(**inputs)


@pytest.mark.parametrize(("gated", "activation"), [(False, "silu"), (True, "silu"), (False, "relu2")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 33, 65), (8, 2, 64, 31), (64, 8, 40, 24)])
def test_a_whole_layer(
    native: NativeKernels, shape: tuple[int, int, int, int], dtype: torch.dtype, gated: bool, activation: str
) -> None:
    for num_tokens in (1, 7, 130):
        layer, inputs, expected = layer_case(dtype, shape, num_tokens, gated, activation)
        out = layer.fused(**inputs)
        # Rounded three times on the way, to half a unit each, of numbers up to the size of the greatest result.
        error = (3 * ROUNDING[dtype] + 2e-6) * expected.abs().max().item()
        torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=error)
        assert torch.equal(layer.in_steps(**inputs), out)
        for token in range(0, num_tokens, 11):
            alone = {name: value[token : token + 1] for name, value in inputs.items()}
            assert torch.equal(layer.fused(**alone)[0], out[token])
        for count in (2, 3):
            native.set_num_threads(count)
            assert torch.equal(layer.fused(**inputs), out)
        native.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_of_inputs(native: NativeKernels, dtype: torch.dtype, top_k: int) -> None:
    layer = Layer(dtype, 5, top_k, 64, 31, True)
    layer.routing = Routing(top_k=top_k, scoring="sigmoid", weighs_inputs=True)
    inputs = layer.inputs(130)
    out, expected = layer.fused(**inputs), layer.in_float64(**inputs)
    # As in test_a_whole_layer, and the inputs are rounded once more.
    error = (4 * ROUNDING[dtype] + 2e-6) * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=error)
    assert torch.equal(layer.in_steps(**inputs), out)
    alone = {name: value[17:18] for name, value in inputs.items()}
    assert torch.equal(layer.fused(**alone)[0], out[17])
    native.set_num_threads(2)
    assert torch.equal(layer.fused(**inputs), out)
    native.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_added", [True, False])
def test_experts_that_return_their_input(native: NativeKernels, dtype: torch.dtype, is_added: bool) -> None:
    """The last 4 of 9; some tokens choose no others. On all ranks but one they add nothing."""
    layer = Layer(dtype, 5, 3, 64, 31, True)
    x, _, shared, gate = layer.inputs(300).values()
    logits, bias = random(300, 9), random(9) / 10
    logits[:40, :5] -= 20.0
    logits[:40, 5:] += 5.0
    identities = Identities(4, x if is_added else None)

    def fused(tokens: slice) -> Tensor:
        given = identities._replace(rows=x[tokens] if is_added else None)
        return dispatched.fused_moe(
            x[tokens], logits[tokens], layer.gate_up, layer.down, layer.routing,
            biases=MoeBiases(bias, *layer.biases), shared=SharedOutput(shared[tokens], gate[tokens]), identities=given,
        )  # fmt: skip

    out = fused(slice(None))
    ids, weights = reference.route(logits, layer.routing, bias)
    is_identity = ids >= 5
    assert is_identity[:40].all() and is_identity.any(1).sum() < 300
    inner = products(x, layer.weights[0], ids.masked_fill(is_identity, 0), layer.biases[0])
    first, up = inner.chunk(2, dim=-1)
    y = products(first * first.sigmoid() * up, layer.weights[1], ids.masked_fill(is_identity, 0), layer.biases[1])
    rows = torch.where(is_identity[:, :, None], x.double()[:, None] * is_added, y.view(300, 3, -1))
    expected = (weights.double()[:, :, None] * rows).sum(1) + gate.double().sigmoid()[:, None] * shared.double()
    # As in test_a_whole_layer.
    error = (3 * ROUNDING[dtype] + 2e-6) * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=error)
    for token in (0, 39, 40, 299):
        assert torch.equal(fused(slice(token, token + 1))[0], out[token])
    native.set_num_threads(3)
    assert torch.equal(fused(slice(None)), out)
    native.set_num_threads(1)


def test_a_long_prompt_is_taken_in_parts(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(torch.bfloat16, 5, 3, 33, 20, True)
    layer.routing = replace(layer.routing, weighs_inputs=True)
    inputs = layer.inputs(150)
    whole = layer.fused(**inputs)
    monkeypatch.setattr(moe, "MIN_CHUNK", 7)
    monkeypatch.setattr(moe, "TOKENS_PER_EXPERT", 1)
    assert torch.equal(layer.fused(**inputs), whole)


def test_other_experts_than_when_it_was_recorded() -> None:
    required_library()
    layer = Layer(torch.bfloat16, 8, 2, 33, 20, True)
    inputs = layer.inputs(6)
    (result,), recorded = record(lambda: [layer.fused(**inputs)], StepMemory())
    assert isinstance(recorded, RecordedStep), recorded
    before = result.clone()
    result.zero_()
    recorded.replay()
    assert torch.equal(result, before)
    inputs["logits"].copy_(random(6, 8, seed=9))
    recorded.replay()
    replayed = result.clone()
    assert torch.equal(replayed, layer.fused(**inputs))
    assert not torch.equal(replayed, before)


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize(("gated", "activation"), [(True, "silu"), (False, "relu2")])
def test_without_the_native_library(gated: bool, activation: str) -> None:
    layer = Layer(torch.float32, 8, 2, 33, 20, gated, activation)
    assert not layer.gate_up.is_packed
    inputs = layer.inputs(7)
    torch.testing.assert_close(layer.fused(**inputs).double(), layer.in_float64(**inputs), rtol=0, atol=2e-5)


def test_layers_that_do_not_fit_together() -> None:
    gate_up, down, narrow = loaded(random(3, 8, 5)), loaded(random(3, 5, 4)), loaded(random(3, 5, 3))
    x, logits, routing = random(2, 5), random(2, 3), Routing(top_k=2)
    with pytest.raises(ValueError, match="8 outputs of the first products do not fit 3 inputs"):
        dispatched.fused_moe(x, logits, gate_up, narrow, routing)
    required_library()
    with pytest.raises(ValueError, match="experts"):
        dispatched.fused_moe(x, random(2, 4), gate_up, down, routing)
    with pytest.raises(ValueError, match="experts"):
        dispatched.fused_moe(x, random(3, 3), gate_up, down, routing)
    with pytest.raises(ValueError, match="shared"):
        dispatched.fused_moe(x, logits, gate_up, down, routing, shared=SharedOutput(random(2, 4)))
    with pytest.raises(ValueError, match="gate of shared"):
        dispatched.fused_moe(x, logits, gate_up, down, routing, shared=SharedOutput(random(2, 5), random(3)))
    with pytest.raises(ValueError, match="bias"):
        dispatched.fused_moe(x, logits, gate_up, down, routing, biases=MoeBiases(random(4)))
    with pytest.raises(ValueError, match="native product"):
        dispatched.fused_moe(x.bfloat16(), logits, gate_up, down, routing)
