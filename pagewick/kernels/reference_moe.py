"""A mixture of experts in plain PyTorch; a part of `reference`.

Dimensions: T tokens, E experts, A experts of a token (top_k), K inputs and N outputs of an expert. A choice is one of a
token's experts; the choices of token t have the numbers t * A .. t * A + A - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagewick.expert_routing import Routing
from pagewick.kernels.options import Identities, SharedOutput, StoredExperts, StoredQuantized
from pagewick.kernels.reference_quantized import quantized_linear


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, best first, and their weights: [T, A] int32 and float32.

    logits: [T, E] float32. The best experts have the greatest score + bias [E] (float32; used for the choice only), and
    among equals the lowest id. Scores rise with logits, so without a bias the logits themselves are compared: different
    logits do not become equal by rounding. A NaN is greater than every number. scales: [E] float32, factors of the
    experts' weights, applied last.

    This is the routing of Mixtral, Qwen2-MoE and Qwen3-MoE (softmax), DeepSeek-V2 (softmax, groups), DeepSeek-V3
    (sigmoid, bias, groups by sum_of_two) and Phi-3.5-MoE (near) in transformers.

    Raises ValueError for a bias if weights are those of choices among the experts near them, which have no scores.
    """
    routing.check(logits.shape[-1])
    if routing.scoring == "near":
        if bias is not None:
            raise ValueError("a bias is added to scores, and experts near each other have none")
        expert_ids = _greatest(logits, routing)
        weights = _near_weights(logits, expert_ids, routing.margin)
    else:
        scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
        is_by_logits = bias is None and routing.group_score == "max"
        keys = logits if is_by_logits else scores if bias is None else scores + bias
        expert_ids = _greatest(keys, routing)
        weights = scores.gather(-1, expert_ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    weights = weights * routing.scaling
    return expert_ids.to(torch.int32), weights if scales is None else weights * scales[expert_ids]


def root_logits(logits: Tensor, choice: Tensor, top_k: int) -> Tensor:
    """Return logits [T, E] float32 whose softmax gives the weights of experts with scores sqrt(softplus(logit)).

    A token's chosen experts get the logarithms of their scores, all others minus infinity, so that `route` with softmax
    chooses these and gives each its share of the sum of their scores. choice: float32 [E]: the top_k experts with the
    greatest score + choice are chosen, and among equals the lowest id; or int64 [T, top_k]: those with these ids, of
    which one may repeat, and then counts as often. Everything is computed in float64, so that bits do not depend on the
    batch. This is the routing of DeepSeek V4 in transformers.
    """
    wide = logits.double()
    softplus = torch.nn.functional.softplus(wide)
    if choice.is_floating_point():
        keys = softplus.sqrt().to(torch.float32) + choice
        choice = keys.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    # The softplus of a number far below 0 is its power of e.
    log_scores = 0.5 * torch.where(wide < -30.0, wide, softplus.log())
    counts = torch.zeros_like(wide).scatter_add_(1, choice, torch.ones_like(choice, dtype=wide.dtype))
    return (log_scores + counts.log()).to(torch.float32)


def _near_weights(logits: Tensor, expert_ids: Tensor, margin: float) -> Tensor:
    """Return the softmax of each choice among the experts that are left and near it: [T, A] (arXiv:2409.12136)."""
    left, weights = logits, []
    for choice in range(expert_ids.shape[-1]):
        ids = expert_ids[:, choice, None]
        greatest = logits.gather(-1, ids)
        is_far = (greatest - logits) / torch.maximum(logits.abs(), greatest) > margin
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, ids))
        left = left.scatter(-1, ids, -torch.inf)
    return torch.cat(weights, -1)


def _greatest(keys: Tensor, routing: Routing) -> Tensor:
    """Return the ids [T, A] of the experts with the greatest keys [T, E] in the best groups."""
    order = keys.argsort(dim=-1, descending=True, stable=True)
    if routing.top_k_groups < routing.num_groups:
        size = keys.shape[1] // routing.num_groups
        grouped = keys.reshape(len(keys), routing.num_groups, size).sort(dim=-1, descending=True).values
        group_keys = grouped[..., 0] if routing.group_score == "max" else grouped[..., 0] + grouped[..., 1]
        groups = group_keys.argsort(dim=-1, descending=True, stable=True)[..., : routing.top_k_groups]
        is_open = torch.zeros_like(group_keys, dtype=torch.bool).scatter(-1, groups, True)
        is_open = is_open.repeat_interleave(size, dim=-1)
        # Experts of other groups come last; a stable sort keeps the order within both parts.
        is_closed = (~is_open.gather(-1, order)).to(torch.uint8)
        order = order.gather(-1, is_closed.argsort(dim=-1, stable=True))
    return order[..., : routing.top_k]


def grouped_linear(
    x: Tensor, weight: StoredExperts, expert_ids: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply each choice by its expert's weight [N, K] transposed and add its bias: [T * A, N] in x.dtype.

    With quantized weights the products are those of quantized_linear. x: [T, K], or [T * A, K] with a row for each
    choice; bias: [E, N]; expert_ids: [T, A] int32. out: a tensor to write the result to; its rows may lie apart.
    Raises IndexError for an id outside 0 .. E - 1.
    """
    if weight.is_packed:
        raise ValueError(f"no native product of {x.dtype} with {weight.data.dtype}")
    chosen, data = expert_ids.flatten(), weight.data
    if bool(((chosen < 0) | (chosen >= len(data))).any()):
        raise IndexError(f"an expert id is outside 0 .. {len(data) - 1}")
    rows = x if len(x) == len(chosen) else x.repeat_interleave(expert_ids.shape[1], dim=0)
    out = x.new_empty(len(chosen), weight.num_rows) if out is None else out
    for expert in sorted(set(chosen.tolist())):
        of_expert = chosen == expert
        out[of_expert] = _product(rows[of_expert], weight, expert, None if bias is None else bias[expert])
    return out


def _product(x: Tensor, weight: StoredExperts, expert: int, bias: Tensor | None) -> Tensor:
    data = weight.data[expert]
    if weight.format is None:
        return functional.linear(x, data, bias)
    stored = StoredQuantized(data, weight.num_rows, weight.num_columns, weight.format, False)
    return quantized_linear(x, stored, bias)


def combine(y: Tensor, weights: Tensor, shared: SharedOutput | None = None) -> Tensor:
    """Return the sum of each token's rows of y [T * A, N] times their weights [T, A] float32: [T, N] in y.dtype.

    shared is added last. Sums are in float32 and in the order of the choices, rounded once.
    """
    rows = y.to(torch.promote_types(y.dtype, torch.float32)).view(*weights.shape, y.shape[1])
    total = torch.zeros_like(rows[:, 0])
    for choice in range(weights.shape[1]):
        total = total + weights[:, choice, None] * rows[:, choice]
    if shared is not None:
        gate = shared.gate
        total = total + (shared.output if gate is None else gate.sigmoid()[:, None] * shared.output)
    return total.to(y.dtype)


def weighed(x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the inputs of the experts, and the weights [T, A] of their results, for x [T, K].

    If the routing weighs inputs, they have a row for each choice [T * A, K], which is x times its weight, rounded to
    x.dtype, and results have weights of 1. Otherwise they are x.
    """
    if not routing.weighs_inputs:
        return x, weights
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1), torch.ones_like(weights)


def with_weights(expert_ids: Tensor, identities: Identities | None, num_experts: int) -> Tensor:
    """Return ids [T, A] with the first expert's in place of those of experts without weights."""
    return expert_ids if identities is None else expert_ids.masked_fill(expert_ids >= num_experts, 0)


def products_or_inputs(products: Tensor, expert_ids: Tensor, identities: Identities | None, num_experts: int) -> Tensor:
    """Return products [T * A, H] with the token's row, or zeros, in place of those of experts without weights."""
    if identities is None:
        return products
    of_tokens = products.view(*expert_ids.shape, -1)
    is_identity = (expert_ids >= num_experts).unsqueeze(2)
    if identities.rows is None:
        return of_tokens.masked_fill(is_identity, 0).flatten(0, 1)
    return torch.where(is_identity, identities.rows.unsqueeze(1), of_tokens).flatten(0, 1)


def is_gated(gate_up: StoredExperts, down: StoredExperts) -> bool:
    """Whether the experts' first product computes gate and up together. Raises ValueError if the two do not fit."""
    gated = gate_up.num_rows == 2 * down.num_columns
    if not gated and gate_up.num_rows != down.num_columns:
        raise ValueError(f"{gate_up.num_rows} outputs of the first products do not fit {down.num_columns} inputs")
    return gated
