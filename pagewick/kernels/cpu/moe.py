"""Mixtures of experts by the native library."""

import ctypes

import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels.cpu.activation import KINDS
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, NativeLibrary, as_rows, check_out, is_plain
from pagewick.kernels.cpu.matrix import packed_shape

# Scoring and GroupScore in csrc/moe.h
SCORINGS = {"softmax": 0, "sigmoid": 1}
GROUP_SCORES = {"max": 0, "sum_of_two": 1}
# Tokens of a fused call that are taken together: so many that an expert gets this many on average, and reading its
# weights takes less time than multiplying; the memory for what the experts give is bounded.
TOKENS_PER_EXPERT = 64
MIN_CHUNK = 256


class RouteArgs(ctypes.Structure):
    """RouteArgs in csrc/moe.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "expert_ids", "weights")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_experts", "top_k", "logits_stride")),
        *((name, ctypes.c_int64) for name in ("num_groups", "top_k_groups")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("scoring", "group_score", "renormalize")),
    )


class GroupedLinearArgs(ctypes.Structure):
    """GroupedLinearArgs in csrc/moe.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "expert_ids", "grouped", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "top_k", "num_experts", "out_features", "in_features")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dtype", "is_per_choice")),
    )


class CombineArgs(ctypes.Structure):
    """CombineArgs in csrc/moe.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "places", "weights", "shared", "shared_gate", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "top_k", "hidden_size", "shared_stride")),
        ("dtype", ctypes.c_int32),
    )


class FusedMoeArgs(ctypes.Structure):
    """FusedMoeArgs in csrc/moe.h."""

    _fields_ = (
        ("route", RouteArgs),
        ("gate_up", GroupedLinearArgs),
        ("down", GroupedLinearArgs),
        ("combine", CombineArgs),
        ("activated", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "chunk")),
        *((name, ctypes.c_int32) for name in ("activation", "is_gated")),
    )


def has_route(logits: Tensor) -> bool:
    """Whether route is native for these logits."""
    return logits.dtype == torch.float32 and is_plain(logits)


def has_combine(y: Tensor) -> bool:
    """Whether combine is native for y."""
    return y.dtype in DTYPES and is_plain(y)


def route(
    library: NativeLibrary,
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.route, written into the two tensors of `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    shape = (len(logits), routing.top_k)
    expert_ids, weights = out or (library.empty(shape, torch.int32), library.empty(shape, torch.float32))
    if expert_ids.shape != shape or expert_ids.dtype != torch.int32 or not expert_ids.is_contiguous():
        raise ValueError(f"expert_ids must be contiguous torch.int32 {list(shape)}")
    if weights.shape != shape or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights must be contiguous torch.float32 {list(shape)}")
    logits, _ = as_rows(logits)
    args = _route_args(logits, routing, bias, expert_ids, weights)
    library.run(library.operation("route"), args)
    return expert_ids, weights


def grouped_linear(
    library: NativeLibrary,
    x: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """reference.grouped_linear with packed weights [E, *packed_shape(out_features, K)].

    A row has the same bits as that of `linear` with its expert's weight. Written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together, IndexError for an id outside 0 .. E - 1.
    """
    shape = (expert_ids.numel(), out_features)
    grouped = library.empty(shape, x.dtype)
    out = library.empty(shape, x.dtype) if out is None else out
    check_out(grouped, out)
    x, _ = as_rows(x)
    args = _linear_args(x, weight, bias, expert_ids, grouped, out)
    if library.run(library.operation("grouped_linear"), args) == BAD_ROW:
        raise IndexError(f"an expert id is outside 0 .. {len(weight) - 1}")
    return out


def combine(
    library: NativeLibrary,
    y: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """reference.combine, written into `out` (contiguous) if given. Raises ValueError for tensors that do not fit."""
    num_tokens, top_k = weights.shape
    if y.shape[0] != num_tokens * top_k or not y.is_contiguous():
        raise ValueError(f"y {list(y.shape)} must be contiguous, with {top_k} rows for each of {num_tokens} tokens")
    out = library.empty((num_tokens, y.shape[1]), y.dtype) if out is None else out
    shared = None if shared is None else as_rows(shared)[0]
    args = _combine_args(y, weights, shared, shared_gate, out, num_tokens)
    library.run(library.operation("combine"), args)
    return out


def fused_moe(
    library: NativeLibrary,
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    *,
    intermediate_size: int,
    activation: str = "silu",
    is_gated: bool = True,
    router_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """All of a mixture's layer in one operation, which is recorded as one: as pagewick.kernels.moe.fused_moe says.

    gate_up, down: packed weights of the experts. Written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    num_tokens, hidden_size = x.shape
    num_experts = logits.shape[1]
    if len(logits) != num_tokens or len(gate_up) != num_experts or len(down) != num_experts:
        raise ValueError(
            f"x {list(x.shape)}, logits {list(logits.shape)} and weights of {len(gate_up)} and {len(down)} experts"
        )
    chunk = min(num_tokens, max(MIN_CHUNK, TOKENS_PER_EXPERT * num_experts // routing.top_k))
    choices = (chunk, routing.top_k)
    expert_ids, weights = library.empty(choices, torch.int32), library.empty(choices, torch.float32)
    first = library.empty((chunk * routing.top_k, intermediate_size * (2 if is_gated else 1)), x.dtype)
    activated = library.empty((chunk * routing.top_k, intermediate_size), x.dtype)
    second = library.empty((chunk * routing.top_k, hidden_size), x.dtype)
    out = library.empty(x.shape, x.dtype) if out is None else out
    x, logits = as_rows(x)[0], as_rows(logits)[0]
    shared = None if shared is None else as_rows(shared)[0]
    args = FusedMoeArgs(
        _route_args(logits, routing, router_bias, expert_ids, weights),
        _linear_args(x[:chunk], gate_up, gate_up_bias, expert_ids, first, None),
        _linear_args(activated, down, down_bias, expert_ids, second, None),
        _combine_args(second, weights, shared, shared_gate, out, num_tokens),
        activated.data_ptr(), num_tokens, chunk, KINDS[activation], int(is_gated),
    )  # fmt: skip
    library.run(library.operation("fused_moe"), args)
    return out


def _route_args(
    logits: Tensor, routing: Routing, bias: Tensor | None, expert_ids: Tensor, weights: Tensor
) -> RouteArgs:
    routing.check(logits.shape[1])
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be torch.float32, not {logits.dtype}")
    if bias is not None and (bias.shape != logits.shape[1:] or bias.dtype != logits.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must fit logits {list(logits.shape)}")
    return RouteArgs(
        logits.data_ptr(), _address(bias), expert_ids.data_ptr(), weights.data_ptr(),
        len(logits), logits.shape[1], routing.top_k, logits.stride(0), routing.num_groups, routing.top_k_groups,
        routing.scaling, SCORINGS[routing.scoring], GROUP_SCORES[routing.group_score], int(routing.renormalize),
    )  # fmt: skip


def _linear_args(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, grouped: Tensor, out: Tensor | None
) -> GroupedLinearArgs:
    num_tokens, top_k = expert_ids.shape
    out_features, in_features = grouped.shape[1], x.shape[1]
    if len(x) not in (num_tokens, num_tokens * top_k):
        raise ValueError(f"x {list(x.shape)} must have {num_tokens} rows, or {num_tokens * top_k}")
    if x.dtype not in DTYPES or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"no native product of {x.dtype} with {weight.dtype}")
    if weight.shape[1:] != packed_shape(out_features, in_features, x.dtype):
        raise ValueError(f"{in_features} inputs and {out_features} outputs do not fit weights {list(weight.shape)}")
    if expert_ids.dtype != torch.int32 or not expert_ids.is_contiguous():
        raise ValueError("expert_ids must be contiguous torch.int32")
    if bias is not None and (
        bias.shape != (len(weight), out_features) or bias.dtype != x.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must be {x.dtype} {[len(weight), out_features]}")
    return GroupedLinearArgs(
        x.data_ptr(), weight.data_ptr(), _address(bias), expert_ids.data_ptr(), grouped.data_ptr(), _address(out),
        num_tokens, top_k, len(weight), out_features, in_features, x.stride(0),
        DTYPES[x.dtype], int(len(x) == num_tokens * top_k),
    )  # fmt: skip


def _combine_args(
    y: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None, out: Tensor, num_tokens: int
) -> CombineArgs:
    if y.dtype not in DTYPES or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"no native sum of {y.dtype} with contiguous torch.float32 weights")
    if out.dtype != y.dtype or out.shape != (num_tokens, y.shape[1]) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {y.dtype} {[num_tokens, y.shape[1]]}")
    if shared is not None and (shared.shape != out.shape or shared.dtype != y.dtype):
        raise ValueError(f"shared {shared.dtype} {list(shared.shape)} must be {y.dtype} {list(out.shape)}")
    if shared_gate is not None and (
        shared is None
        or shared_gate.shape != out.shape[:1]
        or shared_gate.dtype != torch.float32
        or not shared_gate.is_contiguous()
    ):
        raise ValueError(f"shared_gate must be contiguous torch.float32 [{num_tokens}], beside shared")
    return CombineArgs(
        y.data_ptr(), None, weights.data_ptr(), _address(shared), _address(shared_gate), out.data_ptr(),
        *weights.shape, y.shape[1], 0 if shared is None else shared.stride(0), DTYPES[y.dtype],
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
