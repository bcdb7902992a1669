"""Mixtures of experts by the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, Operation, address, as_rows, empty, is_plain
from pagewick.kernels.cpu.elementwise import ACTIVATION_KINDS
from pagewick.kernels.cpu.matrix import packed_shape
from pagewick.kernels.cpu.quantized import FORMATS, LAYOUTS
from pagewick.kernels.cpu.structs import (
    CombineArgs,
    FusedMoeArgs,
    GroupedLinearArgs,
    GroupScore,
    RootLogitsArgs,
    RouteArgs,
    Scoring,
)
from pagewick.kernels.options import NO_BIASES, Identities, MoeBiases, SharedOutput, StoredExperts
from pagewick.kernels.reference_moe import is_gated, products_or_inputs, weighed, with_weights

_ROUTE = Operation("route", RouteArgs)
_ROOT_LOGITS = Operation("root_logits", RootLogitsArgs)
_GROUPED_LINEAR = Operation("grouped_linear", GroupedLinearArgs)
_COMBINE = Operation("combine", CombineArgs)
_FUSED_MOE = Operation("fused_moe", FusedMoeArgs)
_SCORINGS = {scoring.name.lower(): scoring.value for scoring in Scoring}
_GROUP_SCORES = {score.name.lower(): score.value for score in GroupScore}
# A fused call processes its tokens in chunks, which bounds the memory for the results of the experts. A chunk is large
# enough for an expert to get TOKENS_PER_EXPERT tokens on average; then reading its weights takes less time than
# multiplying.
TOKENS_PER_EXPERT = 64
MIN_CHUNK = 256


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reference.route. Raises ValueError for tensors that do not fit together."""
    if not is_plain(logits):
        return reference.route(logits, routing, bias, scales)
    shape = (len(logits), routing.top_k)
    expert_ids, weights = empty(shape, torch.int32), empty(shape, torch.float32)
    logits, _ = as_rows(logits)
    _ROUTE.run(_route_args(logits, routing, bias, scales, expert_ids, weights))
    return expert_ids, weights


def root_logits(logits: Tensor, choice: Tensor, top_k: int) -> Tensor:
    """reference.root_logits.

    Raises ValueError for tensors that do not fit together, IndexError for an id outside 0 .. E - 1.
    """
    if not is_plain(logits) or not logits.numel():
        return reference.root_logits(logits, choice, top_k)
    num_tokens, num_experts = logits.shape
    is_table = choice.dtype == torch.int64
    expected = (num_tokens, top_k) if is_table else (num_experts,)
    if choice.shape != expected or not choice.is_contiguous() or not (is_table or choice.dtype == torch.float32):
        raise ValueError(f"choice {choice.dtype} {list(choice.shape)} does not fit {list(logits.shape)} and {top_k}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be within 1 .. {num_experts}, not {top_k}")
    out = empty(logits.shape, torch.float32)
    logits, stride = as_rows(logits)
    args = RootLogitsArgs(
        logits=logits.data_ptr(), bias=None if is_table else choice.data_ptr(),
        ids=choice.data_ptr() if is_table else None, out=out.data_ptr(), num_tokens=num_tokens,
        num_experts=num_experts, top_k=top_k, logits_stride=stride,
    )  # fmt: skip
    if _ROOT_LOGITS.run(args) == BAD_ROW:
        raise IndexError(f"an expert id is outside 0 .. {num_experts - 1}")
    return out


def grouped_linear(
    x: Tensor, weight: StoredExperts, expert_ids: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """reference.grouped_linear with packed weights: a row has the bits that `linear` with its expert's weight gives.

    Raises ValueError for tensors that do not fit together, IndexError for an id outside 0 .. E - 1.
    """
    if not weight.is_packed:
        return reference.grouped_linear(x, weight, expert_ids, bias, out)
    shape = (expert_ids.numel(), weight.num_rows)
    grouped, out = empty(shape, x.dtype), empty(shape, x.dtype) if out is None else out
    if out.shape != shape or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out {out.dtype} {list(out.shape)} must be {x.dtype} {list(shape)}, its rows whole")
    x, _ = as_rows(x)
    if _GROUPED_LINEAR.run(linear_args(x, weight, bias, expert_ids, grouped, out)) == BAD_ROW:
        raise IndexError(f"an expert id is outside 0 .. {weight.num_experts - 1}")
    return out


def combine(y: Tensor, weights: Tensor, shared: SharedOutput | None = None) -> Tensor:
    """reference.combine. Raises ValueError for tensors that do not fit together."""
    if not is_plain(y):
        return reference.combine(y, weights, shared)
    num_tokens, top_k = weights.shape
    if y.shape[0] != num_tokens * top_k or not y.is_contiguous():
        raise ValueError(f"y {list(y.shape)} must be contiguous, with {top_k} rows for each of {num_tokens} tokens")
    out = empty((num_tokens, y.shape[1]), y.dtype)
    # The name keeps alive the rows that as_rows may have copied.
    shared = None if shared is None else SharedOutput(as_rows(shared.output)[0], shared.gate)
    _COMBINE.run(_combine_args(y, weights, shared, out, num_tokens))
    return out


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
    """reference.fused_moe as a single operation. Raises ValueError as it does."""
    gated = is_gated(gate_up, down)
    if not (gate_up.is_packed and down.is_packed):
        # A rank may have no share of the experts. Its result must still have the same bits in any batch.
        chosen_ids, weights = route(logits, routing, biases.router, biases.scales)
        expert_ids = with_weights(chosen_ids, identities, gate_up.num_experts)
        x, weights = weighed(x, weights, routing)
        function = reference.gated_activation if gated else reference.activation
        activated = function(grouped_linear(x, gate_up, expert_ids, biases.gate_up), activation)
        products = grouped_linear(activated, down, expert_ids, biases.down)
        return combine(products_or_inputs(products, chosen_ids, identities, gate_up.num_experts), weights, shared)
    num_tokens, hidden_size = x.shape
    num_identities, inputs_returned = identities or (0, None)
    num_experts, intermediate_size = logits.shape[1] - num_identities, down.num_columns
    if len(logits) != num_tokens or gate_up.num_experts != num_experts or down.num_experts != num_experts:
        raise ValueError(
            f"x {list(x.shape)}, logits {list(logits.shape)} and weights of {gate_up.num_experts} and "
            f"{down.num_experts} experts"
        )
    chunk = min(num_tokens, max(MIN_CHUNK, TOKENS_PER_EXPERT * num_experts // routing.top_k))
    choices = (chunk, routing.top_k)
    expert_ids, weights = empty(choices, torch.int32), empty(choices, torch.float32)
    first = empty((chunk * routing.top_k, gate_up.num_rows), x.dtype)
    activated = empty((chunk * routing.top_k, intermediate_size), x.dtype)
    second = empty((chunk * routing.top_k, hidden_size), x.dtype)
    inputs = empty((chunk * routing.top_k, hidden_size), x.dtype) if routing.weighs_inputs else None
    out = empty(x.shape, x.dtype)
    x, logits = as_rows(x)[0], as_rows(logits)[0]
    shared = None if shared is None else SharedOutput(as_rows(shared.output)[0], shared.gate)
    if inputs_returned is not None:
        if inputs_returned.shape != out.shape or inputs_returned.dtype != out.dtype:
            raise ValueError(f"the inputs that experts return are not {out.dtype} {list(out.shape)}")
        inputs_returned = as_rows(inputs_returned)[0]
    args = FusedMoeArgs(
        route=_route_args(logits, routing, biases.router, biases.scales, expert_ids, weights),
        gate_up=linear_args(x[:chunk], gate_up, biases.gate_up, expert_ids, first, None),
        down=linear_args(activated, down, biases.down, expert_ids, second, None),
        combine=_combine_args(second, weights, shared, out, num_tokens, inputs_returned),
        activated=activated.data_ptr(), weighed=address(inputs), num_tokens=num_tokens, chunk=chunk,
        activation=ACTIVATION_KINDS[activation], is_gated=gated,
    )  # fmt: skip
    _FUSED_MOE.run(args)
    return out


OPERATIONS = {
    route: (torch.float32,),
    root_logits: (torch.float32,),
    grouped_linear: DTYPES,
    combine: DTYPES,
    fused_moe: DTYPES,
}


def _route_args(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None,
    scales: Tensor | None,
    expert_ids: Tensor,
    weights: Tensor,
) -> RouteArgs:
    routing.check(logits.shape[1])
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be torch.float32, not {logits.dtype}")
    if bias is not None and routing.scoring == "near":
        raise ValueError("a bias is added to scores, and experts near each other have none")
    for name, each in (("bias", bias), ("scales", scales)):
        if each is not None and (
            each.shape != logits.shape[1:] or each.dtype != logits.dtype or not each.is_contiguous()
        ):
            raise ValueError(f"{name} {each.dtype} {list(each.shape)} must fit logits {list(logits.shape)}")
    return RouteArgs(
        logits=logits.data_ptr(), bias=address(bias), scales=address(scales), expert_ids=expert_ids.data_ptr(),
        weights=weights.data_ptr(), num_tokens=len(logits), num_experts=logits.shape[1], top_k=routing.top_k,
        logits_stride=logits.stride(0), num_groups=routing.num_groups, top_k_groups=routing.top_k_groups,
        scaling=routing.scaling, epsilon=routing.epsilon, margin=routing.margin, scoring=_SCORINGS[routing.scoring],
        group_score=_GROUP_SCORES[routing.group_score], renormalize=routing.renormalize,
    )  # fmt: skip


def linear_args(
    x: Tensor, weight: StoredExperts, bias: Tensor | None, expert_ids: Tensor, grouped: Tensor, out: Tensor | None
) -> GroupedLinearArgs:
    """Return the arguments of a product of experts. Raises ValueError for tensors that do not fit together."""
    num_tokens, top_k = expert_ids.shape
    num_experts, out_features, in_features = weight.num_experts, grouped.shape[1], x.shape[1]
    data = weight.data
    if len(x) not in (num_tokens, num_tokens * top_k):
        raise ValueError(f"x {list(x.shape)} must have {num_tokens} rows, or {num_tokens * top_k}")
    is_quantized = weight.format is not None
    if x.dtype not in DTYPES or data.dtype != (torch.uint8 if is_quantized else x.dtype) or not data.is_contiguous():
        raise ValueError(f"no native product of {x.dtype} with {data.dtype}")
    shape: tuple[int, ...] = packed_shape(out_features, in_features, x.dtype)
    if weight.format is not None:
        shape = LAYOUTS[weight.format].packed_shape(out_features, in_features)
    if (in_features, out_features) != (weight.num_columns, weight.num_rows) or data.shape != (num_experts, *shape):
        raise ValueError(f"{in_features} inputs and {out_features} outputs do not fit weights {list(data.shape)}")
    if expert_ids.dtype != torch.int32 or not expert_ids.is_contiguous():
        raise ValueError("expert_ids must be contiguous torch.int32")
    if bias is not None and (
        bias.shape != (num_experts, out_features) or bias.dtype != x.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must be {x.dtype} {[num_experts, out_features]}")
    return GroupedLinearArgs(
        x=x.data_ptr(), weight=data.data_ptr(), bias=address(bias), expert_ids=expert_ids.data_ptr(),
        grouped=grouped.data_ptr(), out=address(out), num_tokens=num_tokens, top_k=top_k, num_experts=num_experts,
        out_features=out_features, in_features=in_features, x_stride=x.stride(0),
        out_stride=0 if out is None else out.stride(0), dtype=DTYPES[x.dtype],
        format=FORMATS.get(weight.format or "", 0), is_quantized=is_quantized,
        is_per_choice=len(x) == num_tokens * top_k,
    )  # fmt: skip


def _combine_args(
    y: Tensor,
    weights: Tensor,
    shared: SharedOutput | None,
    out: Tensor,
    num_tokens: int,
    identity: Tensor | None = None,
) -> CombineArgs:
    output, gate = shared or (None, None)
    if y.dtype not in DTYPES or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"no native sum of {y.dtype} with contiguous torch.float32 weights")
    if out.dtype != y.dtype or out.shape != (num_tokens, y.shape[1]) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {y.dtype} {[num_tokens, y.shape[1]]}")
    if output is not None and (output.shape != out.shape or output.dtype != y.dtype):
        raise ValueError(f"shared {output.dtype} {list(output.shape)} must be {y.dtype} {list(out.shape)}")
    if gate is not None and (gate.shape != out.shape[:1] or gate.dtype != torch.float32 or not gate.is_contiguous()):
        raise ValueError(f"the gate of shared must be contiguous torch.float32 [{num_tokens}]")
    return CombineArgs(
        y=y.data_ptr(), places=None, weights=weights.data_ptr(), shared=address(output), shared_gate=address(gate),
        identity=address(identity), out=out.data_ptr(), num_tokens=weights.shape[0], top_k=weights.shape[1],
        hidden_size=y.shape[1], shared_stride=0 if output is None else output.stride(0),
        identity_stride=0 if identity is None else identity.stride(0), num_products=weights.numel(),
        dtype=DTYPES[y.dtype],
    )  # fmt: skip
