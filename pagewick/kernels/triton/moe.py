"""Products of experts on GPUs: choices are sorted by expert on the device, and one launch multiplies all of them.

T: tokens; A: experts of a token; E: experts; N: outputs; K: inputs. A choice is one of a token's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import batch_invariance, reference
from pagewick.kernels.dispatch import Function
from pagewick.kernels.options import NO_BIASES, Identities, MoeBiases, SharedOutput, StoredExperts
from pagewick.kernels.reference_moe import is_gated, products_or_inputs, weighed, with_weights
from pagewick.kernels.triton import BACKEND, fp8_products
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.grouping import GROUPS, Grouping, group
from pagewick.kernels.triton.launches import (
    FEW,
    MANY,
    PLAIN,
    PRODUCTS,
    ROWS,
    SOME,
    Stored,
    kind_for,
    launch_product,
    tile_of,
)
from pagewick.kernels.triton.quantized import as_rows
from pagewick.kernels.triton.variant import Workload

_PLAIN = [variant for (_, name, dtype, out), variant in PRODUCTS.items() if name == PLAIN and dtype == out]
VARIANTS = (*GROUPS.values(), *_PLAIN)
# The first products of Qwen3-30B-A3B: 128 experts of 768 gates and ups and 2,048 inputs, 8 for each token.
_EXPERTS, _OUTPUTS, _INPUTS, _CHOSEN = 128, 1536, 2048, 8


def _workload(num_tokens: int) -> Workload:
    """Return a layer's first products, in bfloat16: each expert that any token chose is read once."""
    num_read = min(_EXPERTS, num_tokens * _CHOSEN)
    choices = num_tokens * _CHOSEN
    num_bytes = 2 * (num_read * _OUTPUTS * _INPUTS + num_tokens * _INPUTS + choices * _OUTPUTS)
    shape = f"{num_tokens} tokens, {_CHOSEN} of {_EXPERTS} experts {_OUTPUTS} x {_INPUTS}"
    return Workload("grouped_linear", shape, num_bytes, 2 * choices * _OUTPUTS * _INPUTS, num_tokens > 1)


WORKLOADS = tuple(_workload(num_tokens) for num_tokens in (1, 16, 512, 8192))


def grouped_linear(
    x: Tensor, weight: StoredExperts, expert_ids: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """reference.grouped_linear: [T * A, N] in x.dtype, sums in float32 and rounded once.

    With quantized weights the products are those of quantized_linear, and bits of a row depend on the number of
    choices; see kind_for_choices. A choice with an id outside 0 .. E - 1 becomes NaN: to raise IndexError, the call
    would have to wait for the GPU. Raises ValueError for tensors that do not fit together.
    """
    return _grouped_linear(x, weight, expert_ids, bias, out, None)


def fused_moe(
    x: Tensor,
    logits: Tensor,
    gate_up: StoredExperts,
    down: StoredExperts,
    routing: Routing,
    *,
    activation: str = "silu",
    biases: MoeBiases = NO_BIASES,
    shared: SharedOutput | None = None,
    identities: Identities | None = None,
) -> Tensor:
    """reference.fused_moe. Choices are sorted once for both products."""
    activate = _operation("gated_activation" if is_gated(gate_up, down) else "activation")
    chosen_ids, weights = _operation("route")(logits, routing, biases.router, biases.scales)
    expert_ids = with_weights(chosen_ids, identities, gate_up.num_experts)
    x, weights = weighed(x, weights, routing)
    kind = kind_for_choices(expert_ids.numel(), gate_up.num_experts, x.dtype)
    # Tiles of a kind have as many rows for both products.
    grouping = None if kind == ROWS else group(expert_ids, gate_up.num_experts, tile_of(kind, PLAIN).rows)
    activated = activate(_grouped_linear(x, gate_up, expert_ids, biases.gate_up, None, grouping), activation)
    products = _grouped_linear(activated, down, expert_ids, biases.down, None, grouping)
    products = products_or_inputs(products, chosen_ids, identities, gate_up.num_experts)
    result: Tensor = _operation("combine")(products, weights, shared)
    return result


def add_low_rank(y: Tensor, x: Tensor, down: StoredExperts, up: StoredExperts, adapter_ids: Tensor) -> Tensor:
    """reference.add_low_rank. Rows are sorted by adapter once for both products; y is overwritten.

    An id that is no adapter's makes NaN. Raises ValueError for tensors that do not fit together.
    """
    ids = adapter_ids.unsqueeze(1)
    kind = kind_for_choices(len(ids), down.num_experts, x.dtype)
    grouping = None if kind == ROWS else group(ids, down.num_experts, tile_of(kind, PLAIN).rows)
    inner = _grouped_linear(x, down, ids, None, None, grouping)
    return y.add_(_grouped_linear(inner, up, ids, None, None, grouping))


def kind_for_choices(num_choices: int, num_experts: int, dtype: torch.dtype) -> str:
    """Return the kind of tile by shapes alone: only the GPU knows which experts the tokens chose."""
    if dtype == torch.float32 or batch_invariance.is_required():
        return kind_for(num_choices, dtype)
    if num_choices <= 16:
        return ROWS
    each = num_choices / num_experts
    return FEW if each <= 16 else SOME if each <= 256 else MANY


def _grouped_linear(
    x: Tensor,
    weight: StoredExperts,
    expert_ids: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    grouping: Grouping | None,
) -> Tensor:
    """grouped_linear; grouping: the choices sorted for tiles of the kind for as many choices, if that has been done."""
    num_choices, num_experts = expert_ids.numel(), weight.num_experts
    if (weight.format is not None) != weight.is_packed:
        return by_definition(reference.grouped_linear, x, weight, expert_ids, bias, out)
    shape = (num_choices, weight.num_rows)
    _check(x, weight, expert_ids, bias)
    result = x.new_empty(shape) if out is None else out
    if result.shape != shape or result.dtype != x.dtype or (result.numel() and result.stride(1) != 1):
        raise ValueError(f"out {result.dtype} {list(result.shape)} must be {x.dtype} {list(shape)}, its rows whole")
    if not num_choices or not result.numel():
        return result
    kind = kind_for_choices(num_choices, num_experts, x.dtype)
    if kind != ROWS and grouping is None:
        grouping = group(expert_ids, num_experts, tile_of(kind, PLAIN).rows)
    stored = Stored(weight.data, weight.num_rows, weight.num_columns, weight.format or PLAIN, num_experts)
    per_row = num_choices // len(x)
    if fp8_products.serves(kind, stored, x.dtype):
        fp8_products.multiply(kind, as_rows(x), stored, bias, result, choices_per_row=per_row, grouping=grouping)
        return result
    ids = expert_ids.contiguous()
    launch_product(kind, as_rows(x), stored, bias, result, choices_per_row=per_row, expert_ids=ids, grouping=grouping)
    return result


def _check(x: Tensor, weight: StoredExperts, expert_ids: Tensor, bias: Tensor | None) -> None:
    num_experts, num_rows = weight.num_experts, weight.num_rows
    if x.shape[1] != weight.num_columns or len(x) not in (len(expert_ids), expert_ids.numel()):
        raise ValueError(f"x {list(x.shape)} does not fit {weight.num_columns} inputs and ids {list(expert_ids.shape)}")
    if (weight.format is None and weight.data.dtype != x.dtype) or not weight.data.is_contiguous():
        raise ValueError(f"no product of {x.dtype} with weights of {weight.data.dtype}")
    if bias is not None and (bias.shape != (num_experts, num_rows) or bias.dtype != x.dtype):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must be {x.dtype} {[num_experts, num_rows]}")


def _operation(name: str) -> Function:
    """Return the operation of this backend, or its definition."""
    function: Function = BACKEND.operations.get(name, getattr(reference, name))
    return function
