"""Products with experts in block formats: bit for bit those of single ones, whatever the tokens choose."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.matrix import Experts
from pagewick.kernels.options import Identities, MoeBiases, SharedOutput, StoredExperts
from pagewick.kernels.quantized import QuantizedExperts, QuantizedMatrix
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.block_rows import LAYOUTS, random_rows
from tests.kernels.conftest import NativeKernels, library_off
from tests.kernels.test_moe import loaded, random, some_experts

Kernels = ModuleType | NativeKernels
FORMATS = ("Q8_0", "Q4_1", "Q4_K", "Q6_K", "int4_g64", "fp8_g32")
# experts, top_k, tokens, inputs, outputs
SHAPES = [(1, 1, 1, 256, 1), (5, 3, 7, 512, 130), (4, 1, 90, 256, 65), (16, 4, 33, 256, 64)]


def rows_of(name: str, num_experts: int, num_rows: int, num_columns: int) -> Tensor:
    """Rows of blocks for each expert: [E, N, bytes]."""
    return random_rows(name, num_experts * num_rows, num_columns).view(num_experts, num_rows, -1)


def experts_of(name: str, rows: Tensor, num_columns: int, dtype: torch.dtype) -> QuantizedExperts:
    num_experts, num_rows, row_bytes = rows.shape
    experts = QuantizedExperts.empty(num_experts, num_rows, num_columns, name, row_bytes, dtype, "cpu")
    for data, stored in zip(experts.data, rows, strict=True):
        experts.matrix_in(data).load(stored, 0)
    return experts


@pytest.mark.parametrize("per_choice", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_the_definition(kernels: Kernels, name: str, per_choice: bool) -> None:
    for num_experts, top_k, num_tokens, inputs, outputs in SHAPES:
        rows = rows_of(name, num_experts, outputs, inputs)
        x, bias = random(num_tokens * top_k if per_choice else num_tokens, inputs), random(num_experts, outputs)
        expert_ids = some_experts(num_tokens, num_experts, top_k)
        plain = StoredExperts(rows, num_experts, outputs, inputs, False, name)
        expected = reference.grouped_linear(x, plain, expert_ids, bias)
        chosen = expert_ids.flatten().tolist()
        single = []
        for choice, expert in enumerate(chosen):
            weight = QuantizedMatrix(rows[expert], outputs, inputs, name, False, x.dtype, x.device)
            row = x[choice if per_choice else choice // top_k]
            single.append(reference.quantized_linear(row, weight, bias[expert]))
        assert torch.equal(expected, torch.stack(single))
        experts = plain if kernels is reference else experts_of(name, rows, inputs, x.dtype)
        found = kernels.grouped_linear(x, experts, expert_ids, bias)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()) + 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*LAYOUTS, "int4_g128", "fp8_g128"])
def test_products_have_the_bits_of_single_ones(native_bytes: NativeKernels, name: str, dtype: torch.dtype) -> None:
    for num_experts, top_k, num_tokens, inputs, outputs in SHAPES:
        experts = experts_of(name, rows_of(name, num_experts, outputs, inputs), inputs, dtype)
        wide = random(num_tokens, inputs + 9, dtype=dtype)
        x, expert_ids = wide[:, 3 : inputs + 3], some_experts(num_tokens, num_experts, top_k)
        rows = experts.linear(x, expert_ids)
        for choice, expert in enumerate(expert_ids.flatten().tolist()):
            if choice % 3 == 0:
                assert torch.equal(rows[choice], experts.matrix_in(experts.data[expert]).linear(x[choice // top_k]))
        for count in (2, 3):
            native_bytes.set_num_threads(count)
            assert torch.equal(experts.linear(x, expert_ids), rows)
        native_bytes.set_num_threads(1)


# Formats of the first and the second product; None: numbers.
PAIRS = [("Q8_0", "Q8_0"), ("Q4_K", "Q6_K"), ("Q4_0", None), (None, "Q5_K"), ("int4_g128", "fp8_g32")]


def weight_of(name: str | None, num_experts: int, outputs: int, inputs: int) -> Experts | QuantizedExperts:
    if name is None:
        return loaded(random(num_experts, outputs, inputs) / inputs**0.5)
    return experts_of(name, rows_of(name, num_experts, outputs, inputs), inputs, torch.float32)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_whole_layer_has_the_bits_of_its_operations(
    native_bytes: NativeKernels, pair: tuple[str | None, ...], is_gated: bool
) -> None:
    gate_up, down = weight_of(pair[0], 6, 512 if is_gated else 256, 256), weight_of(pair[1], 6, 256, 256)
    activate, activation = native_bytes.gated_activation if is_gated else native_bytes.activation, "relu2"
    routing, bias = Routing(top_k=2, renormalize=True), random(6)
    for num_tokens in (1, 5, 300):
        x, logits = random(num_tokens, 256) / 16, random(num_tokens, 6)
        shared = SharedOutput(random(num_tokens, 256, seed=1), random(num_tokens))
        ids, weights = native_bytes.route(logits, routing, bias)
        activated = activate(gate_up.linear(x, ids), activation)
        expected = native_bytes.combine(down.linear(activated, ids), weights, shared)
        for count in (1, 3):
            native_bytes.set_num_threads(count)
            found = native_bytes.fused_moe(
                x, logits, gate_up, down, routing, activation=activation, biases=MoeBiases(bias), shared=shared
            )
            assert torch.equal(found, expected)
        native_bytes.set_num_threads(1)


def test_experts_that_return_their_input(native_bytes: NativeKernels) -> None:
    """Rows of x are quantized also where those before them belong to no product."""
    gate_up, down = weight_of("Q8_0", 6, 512, 256), weight_of("Q4_K", 6, 256, 256)
    x, logits, routing = random(9, 256) / 16, random(9, 8), Routing(top_k=2, renormalize=True)
    logits[:7, :6] -= 20.0
    found = native_bytes.fused_moe(x, logits, gate_up, down, routing, identities=Identities(2, x))
    ids, weights = native_bytes.route(logits, routing)
    activated = native_bytes.gated_activation(gate_up.linear(x, ids.clamp(max=5)), "silu")
    rows = torch.where((ids >= 6).view(-1, 1), x.repeat_interleave(2, 0), down.linear(activated, ids.clamp(max=5)))
    assert torch.equal(found, native_bytes.combine(rows, weights))


def test_a_whole_layer_is_recorded(native_bytes: NativeKernels) -> None:
    """A step recorded with some tokens is right for others, which use other experts."""
    gate_up, down = weight_of("Q4_K", 6, 512, 256), weight_of("Q6_K", 6, 256, 256)
    x, logits, routing = random(3, 256), random(3, 6), Routing(top_k=2)
    act = lambda: [dispatched.fused_moe(x, logits, gate_up, down, routing)]  # noqa: E731
    (found,), recorded = record(act, StepMemory())
    assert isinstance(recorded, RecordedStep), recorded
    x.copy_(random(3, 256, seed=1))
    logits.copy_(random(3, 6, seed=1))
    recorded.replay()
    assert torch.equal(found, act()[0])


@pytest.mark.parametrize("wrong", [-1, 4])
def test_ids_that_no_expert_has(wrong: int) -> None:
    ids = torch.tensor([[0, wrong]], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"outside 0 \.\. 3"):
        weight_of("Q8_0", 4, 6, 32).linear(random(1, 32), ids)
    with library_off(), pytest.raises(IndexError, match=r"outside 0 \.\. 3"):
        weight_of("Q8_0", 4, 6, 32).linear(random(1, 32), ids)


def test_rows_that_do_not_fit(native_bytes: NativeKernels) -> None:
    experts, ids = weight_of("Q8_0", 4, 6, 64), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="32 inputs and 6 outputs do not fit"):
        experts.linear(random(1, 32), ids)
    # 70 columns fill as many whole blocks as 64.
    with pytest.raises(ValueError, match="70 inputs and 6 outputs do not fit"):
        experts.linear(random(1, 70), ids)
    with pytest.raises(ValueError, match="no native product"):
        experts.linear(random(1, 64).double(), ids)
