"""Choice of experts for each token, and the sum of their outputs.

Definitions: route, root_logits and combine of reference_moe.py. A program has all logits of a token in registers and
takes the best expert top_k times; keys are compared as integers (order.py), so ties go to the lowest id as in the
definition. A token's result depends on that token alone, bit for bit; combine adds in the order of the choices.

Dimensions: T tokens, E experts in G groups, A experts of a token, N outputs.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import reference
from pagewick.kernels.options import SharedOutput
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.order import id_of, ordered
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# Tiles of groups by experts of a group; the first that fits serves a call.
TILES = ((1, 32), (1, 64), (1, 128), (1, 256), (1, 512), (8, 16), (8, 32), (16, 32), (32, 32))
# The most experts of a token.
MAX_TOP_K = 32
COMBINE_BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _share_of_near(logits, is_left, is_best, margin):
    """Return the softmax of the best expert among those that are left and near it; all [1, BLOCK_E] but the result."""
    greatest = tl.sum(tl.sum(tl.where(is_best, logits, 0.0), axis=1), axis=0)
    # Whether an expert is near is a question of bits: the quotient is rounded as in the definition.
    distance = tl.math.div_rn(greatest - logits, tl.maximum(tl.abs(logits), greatest))
    # With a NaN, and of zeros, nothing is far.
    others = tl.where(is_left & ((distance > margin) == 0), logits, float("-inf"))
    # Infinity minus itself is NaN, as in the definition.
    weights = tl.where(is_left, tl.exp(others - tl.max(tl.max(others, axis=1), axis=0)), 0.0)
    share = tl.sum(tl.sum(tl.where(is_best, weights, 0.0), axis=1), axis=0)
    return share / tl.sum(tl.sum(weights, axis=1), axis=0)


@triton.jit
def route_tokens(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, row_stride, group_size, num_groups, top_k, top_k_groups, scaling,
    epsilon, margin, renormalize, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, MAX_TOP_K: tl.constexpr,
    SCORING: tl.constexpr, BY_SUM: tl.constexpr,
):  # fmt: skip
    """Write the ids [T, A] int32 and the weights [T, A] float32 of token program_id(0) of logits [T, E] float32.

    bias: [E] float32. SCORING: as in Routing; margin: of near, else None. BY_SUM: a group's score is the sum of its two
    best keys, not its best.
    """
    token = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    ids = groups[:, None] * group_size + members[None, :]
    inside = (groups < num_groups)[:, None] & (members < group_size)[None, :]
    closed: tl.constexpr = -0x8000000000000000
    logits = tl.load(logits_ptr + token * row_stride + ids, mask=inside, other=float("-inf"))
    if SCORING == "near":
        scores = logits
    elif SCORING == "softmax":
        # Infinity minus itself is NaN, as in the definition.
        weights = tl.where(inside, tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0)), 0.0)
        scores = weights / tl.sum(tl.sum(weights, axis=1), axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    if bias_ptr is not None:
        keys = scores + tl.load(bias_ptr + ids, mask=inside, other=0.0)
    elif BY_SUM:
        keys = scores
    else:
        keys = logits
    order = tl.where(inside, ordered(keys, ids), closed)
    if BLOCK_G > 1:
        first = tl.max(order, axis=1)
        is_first = order == first[:, None]
        group_keys = tl.sum(tl.where(is_first & inside, keys, 0.0), axis=1)
        if BY_SUM:
            rest = tl.where(is_first, closed, order)
            is_second = rest == tl.max(rest, axis=1)[:, None]
            group_keys += tl.sum(tl.where(is_second & inside, keys, 0.0), axis=1)
        group_order = tl.where(groups < num_groups, ordered(group_keys, groups), closed)
        is_open = tl.zeros((BLOCK_G,), tl.int32)
        for _ in range(top_k_groups):
            best = tl.max(group_order, axis=0)
            is_best = group_order == best
            is_open = tl.where(is_best, 1, is_open)
            group_order = tl.where(is_best, closed, group_order)
        order = tl.where((is_open != 0)[:, None], order, closed)
    places = tl.arange(0, MAX_TOP_K)
    chosen, chosen_weights = tl.zeros((MAX_TOP_K,), tl.int32), tl.zeros((MAX_TOP_K,), tl.float32)
    for place in range(top_k):
        best = tl.max(tl.max(order, axis=1), axis=0)
        is_best = order == best
        if SCORING == "near":
            weight = _share_of_near(logits, order != closed, is_best, margin)
        else:
            weight = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(places == place, id_of(best), chosen)
        chosen_weights = tl.where(places == place, weight, chosen_weights)
        order = tl.where(is_best, closed, order)
    if renormalize != 0:
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, axis=0) + epsilon)
    out = token * top_k + places
    tl.store(ids_ptr + out, chosen, mask=places < top_k)
    tl.store(weights_ptr + out, chosen_weights * scaling, mask=places < top_k)


@triton.jit
def _log_of_root(x):
    """Return the logarithm of the square root of softplus(x), and this root."""
    power = tl.exp(-tl.abs(x))
    above = 1.0 + power
    # log(1 + power), without what the sum cuts off (Kahan).
    rest = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
    softplus = tl.maximum(x, 0.0) + rest
    # Far below 0, it is its power of e.
    return 0.5 * tl.where(x < -16.0, x, tl.log(softplus)), tl.sqrt(softplus)


@triton.jit
def weigh_roots(
    logits_ptr, bias_ptr, choice_ptr, out_ptr, row_stride, choice_stride, num_experts, top_k, BLOCK_E: tl.constexpr
):
    """Write the logits of token program_id(0) to out [T, E], from its scores.

    bias: [E] float32, which chooses the experts; None: choice [T, A] int64 has their ids.
    """
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK_E)
    inside = ids < num_experts
    logits = tl.load(logits_ptr + token * row_stride + ids, mask=inside, other=0.0)
    log_scores, scores = _log_of_root(logits)
    counts = tl.zeros((BLOCK_E,), tl.float32)
    if bias_ptr is not None:
        closed: tl.constexpr = -0x8000000000000000
        keys = scores + tl.load(bias_ptr + ids, mask=inside, other=0.0)
        order = tl.where(inside, ordered(keys, ids), closed)
        for _ in range(top_k):
            is_best = order == tl.max(order, axis=0)
            counts = tl.where(is_best, 1.0, counts)
            order = tl.where(is_best, closed, order)
    else:
        for place in range(top_k):
            counts += tl.where(ids == tl.load(choice_ptr + token * choice_stride + place), 1.0, 0.0)
    several = tl.where(counts > 1.0, tl.log(tl.maximum(counts, 1.0)), 0.0)
    result = tl.where(counts > 0.0, log_scores + several, float("-inf"))
    tl.store(out_ptr + token * num_experts + ids, result, mask=inside)


@triton.jit
def combine_rows(
    y_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, num_outputs, top_k, shared_stride, BLOCK: tl.constexpr
):
    """Write BLOCK sums of token program_id(0) to out [T, N], of the rows of y [T * A, N] times weights [T, A] float32.

    shared: [T, N], added last, times the sigmoid of gate [T] float32 if there is one.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        row = token * top_k + choice
        y = tl.load(y_ptr + row * num_outputs + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row) * y
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * shared_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token)))
        total += shared
    tl.store(out_ptr + token * num_outputs + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def _route_variant(tile: tuple[int, int], scoring: str, by_sum: bool, has_bias: bool) -> Variant:
    numbers = dict.fromkeys(("row_stride", "group_size", "num_groups", "top_k", "top_k_groups", "renormalize"), "i32")
    signature = {
        "logits_ptr": "*fp32",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        **numbers,
        "scaling": "fp32",
        "epsilon": "fp32",
    }
    signature |= {"margin": "fp32"} if scoring == "near" else {}
    kind = f"{scoring}{'_sum' if by_sum else ''}{'_bias' if has_bias else ''}"
    return Variant(
        name=f"route_{kind}_{tile[0]}x{tile[1]}",
        kernel=route_tokens,
        signature=signature | ({"bias_ptr": "*fp32"} if has_bias else {}),
        constexprs={"BLOCK_G": tile[0], "BLOCK_E": tile[1], "MAX_TOP_K": MAX_TOP_K, "SCORING": scoring}
        | {"BY_SUM": by_sum}
        | ({} if scoring == "near" else {"margin": None})
        | ({} if has_bias else {"bias_ptr": None}),
        num_warps=1 if tile[0] * tile[1] <= 256 else 4,
        in_sample=(tile, scoring, by_sum, has_bias)
        in (((1, 128), "softmax", False, False), ((8, 32), "sigmoid", True, True), ((1, 32), "near", False, False)),
    )


def _root_variant(block: int, has_bias: bool) -> Variant:
    given, absent = ("bias_ptr", "choice_ptr") if has_bias else ("choice_ptr", "bias_ptr")
    numbers = dict.fromkeys(("row_stride", "choice_stride", "num_experts", "top_k"), "i32")
    return Variant(
        name=f"roots_{'bias' if has_bias else 'table'}_{block}",
        kernel=weigh_roots,
        signature={
            "logits_ptr": "*fp32", given: "*fp32" if has_bias else "*i64", "out_ptr": "*fp32", **numbers,
        },
        constexprs={absent: None, "BLOCK_E": block},
        num_warps=1 if block <= 256 else 4,
        in_sample=(block, has_bias) == (256, True),
    )  # fmt: skip


def _combine_variant(dtype: torch.dtype, shared: str) -> Variant:
    """shared: "", "shared" or "gated"."""
    number = f"*{TYPE_NAMES[dtype]}"
    signature = {"y_ptr": number, "weights_ptr": "*fp32", "out_ptr": number, "num_outputs": "i32:16", "top_k": "i32"}
    signature |= {"shared_stride": "i32:16"} | ({"shared_ptr": number} if shared else {})
    signature |= {"gate_ptr": "*fp32"} if shared == "gated" else {}
    absent = {name: None for name in ("shared_ptr", "gate_ptr") if name not in signature}
    return Variant(
        name=f"combine_{TYPE_NAMES[dtype]}{'_' if shared else ''}{shared}",
        kernel=combine_rows,
        signature=signature,
        constexprs=absent | {"BLOCK": COMBINE_BLOCK},
        num_warps=4,
        in_sample=dtype == torch.bfloat16 and shared == "gated",
    )


_ROUTES = {
    key: _route_variant(*key) for key in itertools.product(TILES, ("softmax", "sigmoid"), (False, True), (False, True))
}
_ROUTES |= {(tile, "near", False, False): _route_variant(tile, "near", False, False) for tile in TILES if tile[0] == 1}
_COMBINES = {key: _combine_variant(*key) for key in itertools.product(_DTYPES, ("", "shared", "gated"))}
_ROOTS = {key: _root_variant(*key) for key in itertools.product((32, 64, 128, 256, 512), (False, True))}
VARIANTS = (*_ROUTES.values(), *_ROOTS.values(), *_COMBINES.values())

# Qwen3-30B-A3B: 8 of 128 experts, 2,048 outputs.
WORKLOADS = tuple(
    workload
    for tokens in (1, 256, 8192)
    for workload in (
        Workload(
            "route", f"{tokens} tokens, 8 of 128 experts", tokens * (128 * 4 + 8 * 8), tokens * 128 * 8 * 3, False
        ),
        Workload("combine", f"{tokens} tokens of 8 x 2,048, bf16", tokens * 9 * 2048 * 2, tokens * 16 * 2048, False),
    )
)


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reference.route for logits [T, E] float32."""
    routing.check(logits.shape[-1])
    limited = routing.top_k_groups < routing.num_groups
    # Groups that are all open change nothing.
    num_groups = routing.num_groups if limited else 1
    size = logits.shape[-1] // num_groups
    tile = _tile_of(num_groups, size)
    if tile is None or not _is_routable(logits, routing, bias):
        return by_definition(reference.route, logits, routing, bias, scales)
    is_near = routing.scoring == "near"
    expert_ids = torch.empty((len(logits), routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty(expert_ids.shape, dtype=torch.float32, device=logits.device)
    by_sum = routing.group_score == "sum_of_two" and not is_near
    _ROUTES[tile, routing.scoring, by_sum, bias is not None].launch(
        (len(logits),), logits_ptr=logits, ids_ptr=expert_ids, weights_ptr=weights, row_stride=logits.stride(0),
        group_size=size, num_groups=num_groups, top_k=routing.top_k, top_k_groups=routing.top_k_groups,
        scaling=routing.scaling, epsilon=routing.epsilon, renormalize=int(routing.renormalize),
        **({} if bias is None else {"bias_ptr": bias}), **({"margin": routing.margin} if is_near else {}),
    )  # fmt: skip
    return expert_ids, weights if scales is None else weights * scales[expert_ids.long()]


def _tile_of(num_groups: int, size: int) -> tuple[int, int] | None:
    fitting = [
        tile for tile in TILES if (tile[0] > 1) == (num_groups > 1) and tile[0] >= num_groups and tile[1] >= size
    ]
    return fitting[0] if fitting else None


def _is_routable(logits: Tensor, routing: Routing, bias: Tensor | None) -> bool:
    fits = bias is None or (bias.dtype == torch.float32 and bias.shape == logits.shape[1:] and bias.is_contiguous())
    is_matrix = logits.dim() == 2 and logits.dtype == torch.float32 and logits.stride(1) == 1
    # The definition refuses a bias for experts near each other.
    return is_matrix and fits and routing.top_k <= MAX_TOP_K and (routing.scoring != "near" or bias is None)


def root_logits(logits: Tensor, choice: Tensor, top_k: int) -> Tensor:
    """reference.root_logits for logits [T, E] float32, in float32."""
    num_experts, has_bias = logits.shape[-1], choice.is_floating_point()
    block = max(32, triton.next_power_of_2(num_experts))
    dtype = torch.float32 if has_bias else torch.int64
    if (block, has_bias) not in _ROOTS or choice.dtype != dtype or choice.stride(-1) != 1 or logits.stride(1) != 1:
        return by_definition(reference.root_logits, logits, choice, top_k)
    out = torch.empty((len(logits), num_experts), dtype=torch.float32, device=logits.device)
    # A table's row names all experts of a token.
    number, given = (top_k, {"bias_ptr": choice}) if has_bias else (choice.shape[1], {"choice_ptr": choice})
    _ROOTS[block, has_bias].launch(
        (len(logits),), logits_ptr=logits, out_ptr=out, row_stride=logits.stride(0),
        choice_stride=0 if has_bias else choice.stride(0), num_experts=num_experts, top_k=number, **given,
    )  # fmt: skip
    return out


def combine(y: Tensor, weights: Tensor, shared: SharedOutput | None = None) -> Tensor:
    """reference.combine for y [T * A, N]."""
    output, gate = shared or (None, None)
    if not _is_combinable(y, weights, output, gate):
        return by_definition(reference.combine, y, weights, shared)
    num_tokens, top_k = weights.shape
    out = torch.empty((num_tokens, y.shape[1]), dtype=y.dtype, device=y.device)
    optional = {} if output is None else {"shared_ptr": output}
    optional |= {} if gate is None else {"gate_ptr": gate}
    _COMBINES[y.dtype, "" if output is None else "shared" if gate is None else "gated"].launch(
        (num_tokens, -(-y.shape[1] // COMBINE_BLOCK)), y_ptr=y, weights_ptr=weights, out_ptr=out,
        num_outputs=y.shape[1], top_k=top_k, shared_stride=0 if output is None else output.stride(0), **optional,
    )  # fmt: skip
    return out


def _is_combinable(y: Tensor, weights: Tensor, output: Tensor | None, gate: Tensor | None) -> bool:
    plain = y.dtype in _DTYPES and y.is_contiguous() and weights.dtype == torch.float32 and weights.is_contiguous()
    fits = output is None or (output.dtype == y.dtype and output.stride(1) == 1)
    return plain and fits and (gate is None or (gate.dtype == torch.float32 and gate.is_contiguous()))
