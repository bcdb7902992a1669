"""Generated from csrc/*.h and csrc/ops.cpp by structs_from_headers.py; `make structs` writes it anew.

Arguments are given by name. mypy knows their names; a name that a struct does not have raises AttributeError.
"""

# fmt: off
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING

Address = int | None

ABI_VERSION = 13
PANEL_ROWS = 64


class DType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Status(IntEnum):
    OK = 0
    BAD_LENGTHS = 1
    BAD_BLOCK_ID = 2
    BAD_ROW = 3


class Activation(IntEnum):
    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    QUICK_GELU = 4
    RELU2 = 5


class Elementwise(IntEnum):
    ADD = 0
    SCALE = 1
    SOFT_CAP = 2


class Scoring(IntEnum):
    SOFTMAX = 0
    SIGMOID = 1


class GroupScore(IntEnum):
    MAX = 0
    SUM_OF_TWO = 1


class ActivationArgs(Structure):
    __slots__ = ()
    _fields_ = (("x", c_void_p), ("out", c_void_p), ("num_rows", c_int64), ("size", c_int64), ("x_stride", c_int64),
        ("dtype", c_int32), ("kind", c_int32), ("is_gated", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, x: Address, out: Address, num_rows: int, size: int, x_stride: int, dtype: int, kind: int,
            is_gated: int) -> None: ...


class AttentionArgs(Structure):
    __slots__ = ()
    _fields_ = (("q", c_void_p), ("kv_cache", c_void_p), ("block_tables", c_void_p), ("context_lens", c_void_p),
        ("cu_seqlens_q", c_void_p), ("sinks", c_void_p), ("out", c_void_p), ("num_tokens", c_int64),
        ("num_seqs", c_int64), ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64),
        ("num_blocks", c_int64), ("block_size", c_int64), ("max_blocks", c_int64), ("block_table_stride", c_int64),
        ("q_stride", c_int64), ("sliding_window", c_int64), ("softmax_scale", c_float), ("logit_soft_cap", c_float),
        ("q_dtype", c_int32), ("kv_dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, q: Address, kv_cache: Address, block_tables: Address, context_lens: Address,
            cu_seqlens_q: Address, sinks: Address, out: Address, num_tokens: int, num_seqs: int, num_heads: int,
            num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, max_blocks: int,
            block_table_stride: int, q_stride: int, sliding_window: int, softmax_scale: float, logit_soft_cap: float,
            q_dtype: int, kv_dtype: int) -> None: ...


class StoreKvArgs(Structure):
    __slots__ = ()
    _fields_ = (("k", c_void_p), ("v", c_void_p), ("slot_mapping", c_void_p), ("kv_cache", c_void_p),
        ("num_tokens", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("num_blocks", c_int64),
        ("block_size", c_int64), ("k_stride", c_int64), ("v_stride", c_int64), ("dtype", c_int32),
        ("kv_dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, k: Address, v: Address, slot_mapping: Address, kv_cache: Address, num_tokens: int,
            num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, k_stride: int, v_stride: int,
            dtype: int, kv_dtype: int) -> None: ...


class ElementwiseArgs(Structure):
    __slots__ = ()
    _fields_ = (("x", c_void_p), ("other", c_void_p), ("out", c_void_p), ("num_rows", c_int64), ("size", c_int64),
        ("x_stride", c_int64), ("other_stride", c_int64), ("factor", c_float), ("dtype", c_int32), ("kind", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, x: Address, other: Address, out: Address, num_rows: int, size: int, x_stride: int,
            other_stride: int, factor: float, dtype: int, kind: int) -> None: ...


class ArgmaxArgs(Structure):
    __slots__ = ()
    _fields_ = (("logits", c_void_p), ("token_ids", c_void_p), ("values", c_void_p), ("num_rows", c_int64),
        ("vocab_size", c_int64), ("stride", c_int64))
    if TYPE_CHECKING:
        def __init__(self, *, logits: Address, token_ids: Address, values: Address, num_rows: int, vocab_size: int,
            stride: int) -> None: ...


class LogSoftmaxArgs(Structure):
    __slots__ = ()
    _fields_ = (("logits", c_void_p), ("max", c_void_p), ("log_sum", c_void_p), ("num_rows", c_int64),
        ("vocab_size", c_int64), ("stride", c_int64))
    if TYPE_CHECKING:
        def __init__(self, *, logits: Address, max: Address, log_sum: Address, num_rows: int, vocab_size: int,
            stride: int) -> None: ...


class SampleArgs(Structure):
    __slots__ = ()
    _fields_ = (("logits", c_void_p), ("temperature", c_void_p), ("top_k", c_void_p), ("top_p", c_void_p),
        ("uniform", c_void_p), ("token_ids", c_void_p), ("num_rows", c_int64), ("vocab_size", c_int64),
        ("stride", c_int64))
    if TYPE_CHECKING:
        def __init__(self, *, logits: Address, temperature: Address, top_k: Address, top_p: Address, uniform: Address,
            token_ids: Address, num_rows: int, vocab_size: int, stride: int) -> None: ...


class LinearArgs(Structure):
    __slots__ = ()
    _fields_ = (("x", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("out", c_void_p), ("num_rows", c_int64),
        ("out_features", c_int64), ("in_features", c_int64), ("x_stride", c_int64), ("out_stride", c_int64),
        ("dtype", c_int32), ("out_dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, x: Address, weight: Address, bias: Address, out: Address, num_rows: int,
            out_features: int, in_features: int, x_stride: int, out_stride: int, dtype: int,
            out_dtype: int) -> None: ...


class PackArgs(Structure):
    __slots__ = ()
    _fields_ = (("rows", c_void_p), ("weight", c_void_p), ("first_row", c_int64), ("num_rows", c_int64),
        ("in_features", c_int64), ("row_stride", c_int64), ("dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, rows: Address, weight: Address, first_row: int, num_rows: int, in_features: int,
            row_stride: int, dtype: int) -> None: ...


class GatherArgs(Structure):
    __slots__ = ()
    _fields_ = (("weight", c_void_p), ("row_ids", c_void_p), ("out", c_void_p), ("num_rows", c_int64),
        ("out_features", c_int64), ("in_features", c_int64), ("dtype", c_int32), ("is_packed", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, weight: Address, row_ids: Address, out: Address, num_rows: int, out_features: int,
            in_features: int, dtype: int, is_packed: int) -> None: ...


class LatentAttentionArgs(Structure):
    __slots__ = ()
    _fields_ = (("q_latent", c_void_p), ("q_rope", c_void_p), ("cache", c_void_p), ("block_tables", c_void_p),
        ("context_lens", c_void_p), ("cu_seqlens_q", c_void_p), ("out", c_void_p), ("num_tokens", c_int64),
        ("num_seqs", c_int64), ("num_heads", c_int64), ("latent_dim", c_int64), ("rope_dim", c_int64),
        ("num_blocks", c_int64), ("block_size", c_int64), ("max_blocks", c_int64), ("block_table_stride", c_int64),
        ("softmax_scale", c_float), ("dtype", c_int32), ("cache_dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, q_latent: Address, q_rope: Address, cache: Address, block_tables: Address,
            context_lens: Address, cu_seqlens_q: Address, out: Address, num_tokens: int, num_seqs: int, num_heads: int,
            latent_dim: int, rope_dim: int, num_blocks: int, block_size: int, max_blocks: int, block_table_stride: int,
            softmax_scale: float, dtype: int, cache_dtype: int) -> None: ...


class StoreLatentArgs(Structure):
    __slots__ = ()
    _fields_ = (("q", c_void_p), ("latents", c_void_p), ("norm", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("slot_mapping", c_void_p), ("q_rope", c_void_p), ("cache", c_void_p), ("num_tokens", c_int64),
        ("num_heads", c_int64), ("nope_dim", c_int64), ("latent_dim", c_int64), ("rope_dim", c_int64),
        ("q_stride", c_int64), ("latent_stride", c_int64), ("angle_stride", c_int64), ("num_blocks", c_int64),
        ("block_size", c_int64), ("norm_eps", c_float), ("dtype", c_int32), ("cache_dtype", c_int32),
        ("is_interleaved", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, q: Address, latents: Address, norm: Address, cos: Address, sin: Address,
            slot_mapping: Address, q_rope: Address, cache: Address, num_tokens: int, num_heads: int, nope_dim: int,
            latent_dim: int, rope_dim: int, q_stride: int, latent_stride: int, angle_stride: int, num_blocks: int,
            block_size: int, norm_eps: float, dtype: int, cache_dtype: int, is_interleaved: int) -> None: ...


class RouteArgs(Structure):
    __slots__ = ()
    _fields_ = (("logits", c_void_p), ("bias", c_void_p), ("expert_ids", c_void_p), ("weights", c_void_p),
        ("num_tokens", c_int64), ("num_experts", c_int64), ("top_k", c_int64), ("logits_stride", c_int64),
        ("num_groups", c_int64), ("top_k_groups", c_int64), ("scaling", c_float), ("scoring", c_int32),
        ("group_score", c_int32), ("renormalize", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, logits: Address, bias: Address, expert_ids: Address, weights: Address, num_tokens: int,
            num_experts: int, top_k: int, logits_stride: int, num_groups: int, top_k_groups: int, scaling: float,
            scoring: int, group_score: int, renormalize: int) -> None: ...


class GroupedLinearArgs(Structure):
    __slots__ = ()
    _fields_ = (("x", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("expert_ids", c_void_p),
        ("grouped", c_void_p), ("out", c_void_p), ("num_tokens", c_int64), ("top_k", c_int64), ("num_experts", c_int64),
        ("out_features", c_int64), ("in_features", c_int64), ("x_stride", c_int64), ("dtype", c_int32),
        ("is_per_choice", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, x: Address, weight: Address, bias: Address, expert_ids: Address, grouped: Address,
            out: Address, num_tokens: int, top_k: int, num_experts: int, out_features: int, in_features: int,
            x_stride: int, dtype: int, is_per_choice: int) -> None: ...


class CombineArgs(Structure):
    __slots__ = ()
    _fields_ = (("y", c_void_p), ("places", c_void_p), ("weights", c_void_p), ("shared", c_void_p),
        ("shared_gate", c_void_p), ("out", c_void_p), ("num_tokens", c_int64), ("top_k", c_int64),
        ("hidden_size", c_int64), ("shared_stride", c_int64), ("dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, y: Address, places: Address, weights: Address, shared: Address, shared_gate: Address,
            out: Address, num_tokens: int, top_k: int, hidden_size: int, shared_stride: int, dtype: int) -> None: ...


class FusedMoeArgs(Structure):
    __slots__ = ()
    _fields_ = (("route", RouteArgs), ("gate_up", GroupedLinearArgs), ("down", GroupedLinearArgs),
        ("combine", CombineArgs), ("activated", c_void_p), ("num_tokens", c_int64), ("chunk", c_int64),
        ("activation", c_int32), ("is_gated", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, route: RouteArgs, gate_up: GroupedLinearArgs, down: GroupedLinearArgs,
            combine: CombineArgs, activated: Address, num_tokens: int, chunk: int, activation: int,
            is_gated: int) -> None: ...


class NormArgs(Structure):
    __slots__ = ()
    _fields_ = (("x", c_void_p), ("residual", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("out", c_void_p),
        ("new_residual", c_void_p), ("num_rows", c_int64), ("hidden_size", c_int64), ("x_stride", c_int64),
        ("residual_stride", c_int64), ("eps", c_float), ("weight_offset", c_float), ("dtype", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, x: Address, residual: Address, weight: Address, bias: Address, out: Address,
            new_residual: Address, num_rows: int, hidden_size: int, x_stride: int, residual_stride: int, eps: float,
            weight_offset: float, dtype: int) -> None: ...


class HeadNormArgs(Structure):
    __slots__ = ()
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("stride", c_int64), ("eps", c_float), ("offset", c_float),
        ("is_layer_norm", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, weight: Address, bias: Address, stride: int, eps: float, offset: float,
            is_layer_norm: int) -> None: ...


class RopeStoreArgs(Structure):
    __slots__ = ()
    _fields_ = (("qkv", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("slot_mapping", c_void_p), ("q", c_void_p),
        ("cache", c_void_p), ("q_norm", HeadNormArgs), ("k_norm", HeadNormArgs), ("num_tokens", c_int64),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("rotary_dim", c_int64),
        ("qkv_stride", c_int64), ("angle_stride", c_int64), ("num_blocks", c_int64), ("block_size", c_int64),
        ("dtype", c_int32), ("cache_dtype", c_int32), ("is_interleaved", c_int32))
    if TYPE_CHECKING:
        def __init__(self, *, qkv: Address, cos: Address, sin: Address, slot_mapping: Address, q: Address,
            cache: Address, q_norm: HeadNormArgs, k_norm: HeadNormArgs, num_tokens: int, num_heads: int,
            num_kv_heads: int, head_dim: int, rotary_dim: int, qkv_stride: int, angle_stride: int, num_blocks: int,
            block_size: int, dtype: int, cache_dtype: int, is_interleaved: int) -> None: ...


class RotaryAnglesArgs(Structure):
    __slots__ = ()
    _fields_ = (("positions", c_void_p), ("frequencies", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("num_tokens", c_int64), ("num_frequencies", c_int64), ("scale", c_float))
    if TYPE_CHECKING:
        def __init__(self, *, positions: Address, frequencies: Address, cos: Address, sin: Address, num_tokens: int,
            num_frequencies: int, scale: float) -> None: ...


class DynamicAnglesArgs(Structure):
    __slots__ = ()
    _fields_ = (("positions", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("num_tokens", c_int64),
        ("rotary_dim", c_int64), ("original_length", c_int64), ("theta", c_double), ("factor", c_double))
    if TYPE_CHECKING:
        def __init__(self, *, positions: Address, cos: Address, sin: Address, num_tokens: int, rotary_dim: int,
            original_length: int, theta: float, factor: float) -> None: ...


# The argument struct of each operation.
OPERATIONS: dict[str, type[Structure]] = {
    "rms_norm": NormArgs,
    "layer_norm": NormArgs,
    "linear": LinearArgs,
    "pack_rows": PackArgs,
    "gather_rows": GatherArgs,
    "activation": ActivationArgs,
    "rope_and_store": RopeStoreArgs,
    "rotary_angles": RotaryAnglesArgs,
    "argmax_rows": ArgmaxArgs,
    "log_softmax_stats": LogSoftmaxArgs,
    "sample_tokens": SampleArgs,
    "paged_attention": AttentionArgs,
    "store_kv": StoreKvArgs,
    "route": RouteArgs,
    "grouped_linear": GroupedLinearArgs,
    "combine": CombineArgs,
    "fused_moe": FusedMoeArgs,
    "elementwise": ElementwiseArgs,
    "dynamic_rotary_angles": DynamicAnglesArgs,
    "store_latent": StoreLatentArgs,
    "latent_attention": LatentAttentionArgs,
}
