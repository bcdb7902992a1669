"""Generated from csrc/*.h and csrc/ops.cpp by structs_from_headers.py; `make structs` writes it anew.

Arguments are given by name. mypy knows their names and types; a name that a struct does not have raises AttributeError.
"""

# fmt: off
# ruff: noqa: E702
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from types import new_class
from typing import Annotated, TypeVar, dataclass_transform, get_type_hints

Address = Annotated[int | None, c_void_p]
Int32 = Annotated[int, c_int32]
Int64 = Annotated[int, c_int64]
Float = Annotated[float, c_float]
Double = Annotated[float, c_double]

_Struct = TypeVar("_Struct", bound=Structure)


@dataclass_transform(kw_only_default=True)
def laid_out(struct: type[_Struct]) -> type[_Struct]:
    """Make the struct that is annotated: its fields, and no place for other names."""
    hints = get_type_hints(struct, include_extras=True).items()
    fields = [(name, getattr(hint, "__metadata__", (hint,))[0]) for name, hint in hints]
    members = {"__slots__": (), "_fields_": fields, "__module__": __name__}
    return new_class(struct.__name__, (Structure,), exec_body=lambda namespace: namespace.update(members))

ABI_VERSION = 34
MAX_STREAMS = 8
PANEL_ROWS = 64

class DType(IntEnum):
    FLOAT32 = 0; BFLOAT16 = 1; FLOAT16 = 2; INT8 = 3; FP8_E4M3 = 4; FP8_E5M2 = 5; INT4 = 6

class Status(IntEnum):
    OK = 0; BAD_LENGTHS = 1; BAD_BLOCK_ID = 2; BAD_ROW = 3

class Activation(IntEnum):
    SILU = 0; GELU = 1; GELU_TANH = 2; RELU = 3; QUICK_GELU = 4; RELU2 = 5; CLAMPED_SWISH = 6; SOFTPLUS = 7
    SILU_WITHIN7 = 8; SILU_WITHIN16 = 9; SILU_WITHIN4 = 10; SILU_WITHIN5 = 11; CLAMPED_SILU10 = 12

class Elementwise(IntEnum):
    ADD = 0; SCALE = 1; SOFT_CAP = 2; SIGMOID_GATE = 3; MULTIPLY = 4; LIMIT = 5

class Truncation(IntEnum):
    MIN_P = 0; SIGMAS = 1; TYPICAL_P = 2; TOP_P = 3; XTC = 4; SURPRISE = 5

class QuantizedFormat(IntEnum):
    Q4_0 = 0; Q4_1 = 1; Q5_0 = 2; Q5_1 = 3; Q8_0 = 4; INT8_G32 = 5; Q2_K = 6; Q3_K = 7; Q4_K = 8; Q5_K = 9; Q6_K = 10
    INT4_G32 = 11; INT4_G64 = 12; INT4_G128 = 13; FP8_G32 = 14; FP8_G128 = 15; MXFP4 = 16; IQ4_NL = 17; IQ4_G32 = 18
    IQ3_G32 = 19; IQ3S_G32 = 20; IQ2_G32 = 21; IQ2_G16 = 22; IQ1_G32 = 23; IQ1_G16 = 24; FP4_G16 = 25

class Scoring(IntEnum):
    SOFTMAX = 0; SIGMOID = 1; NEAR = 2

class GroupScore(IntEnum):
    MAX = 0; SUM_OF_TWO = 1

@laid_out
class ActivationArgs(Structure):
    x: Address; out: Address; num_rows: Int64; size: Int64; x_stride: Int64; dtype: Int32; kind: Int32; is_gated: Int32

@laid_out
class GaussianTopKArgs(Structure):
    x: Address; out: Address; num_rows: Int64; size: Int64; x_stride: Int64; factor: Float; dtype: Int32

@laid_out
class AttentionArgs(Structure):
    q: Address; kv_cache: Address; block_tables: Address; context_lens: Address; cu_seqlens_q: Address; sinks: Address
    key_ends: Address; out: Address; num_tokens: Int64; num_seqs: Int64; num_heads: Int64; num_kv_heads: Int64
    head_dim: Int64; num_blocks: Int64; block_size: Int64; max_blocks: Int64; block_table_stride: Int64
    q_stride: Int64; sliding_window: Int64; softmax_scale: Float; logit_soft_cap: Float; q_dtype: Int32
    kv_dtype: Int32; is_chunked: Int32

@laid_out
class StoreKvArgs(Structure):
    k: Address; v: Address; slot_mapping: Address; kv_cache: Address; num_tokens: Int64; num_kv_heads: Int64
    head_dim: Int64; num_blocks: Int64; block_size: Int64; k_stride: Int64; v_stride: Int64; k_scale: Float
    v_scale: Float; dtype: Int32; kv_dtype: Int32

@laid_out
class ChannelScanArgs(Structure):
    x: Address; gate: Address; dt: Address; keys: Address; queries: Address; log_decay: Address; skip: Address
    dt_bias: Address; states: Address; block_tables: Address; context_lens: Address; cu_seqlens_q: Address
    out: Address; num_tokens: Int64; num_seqs: Int64; num_blocks: Int64; block_floats: Int64; block_table_stride: Int64
    num_channels: Int64; state_dim: Int64; state_offset: Int64; x_stride: Int64; gate_stride: Int64; dt_stride: Int64
    key_stride: Int64; query_stride: Int64; dtype: Int32

@laid_out
class CompressRowsArgs(Structure):
    rows: Address; slot_mapping: Address; entry_slots: Address; block_tables: Address; context_lens: Address
    cu_seqlens_q: Address; cos: Address; sin: Address; bias: Address; norm_weight: Address; cache: Address
    entries: Address; num_tokens: Int64; num_seqs: Int64; dim: Int64; rope_dim: Int64; ratio: Int64; row_stride: Int64
    angle_stride: Int64; num_blocks: Int64; block_size: Int64; max_blocks: Int64; block_table_stride: Int64
    num_entry_blocks: Int64; entry_block_size: Int64; norm_eps: Float; dtype: Int32; norm_dtype: Int32
    cache_dtype: Int32; entry_dtype: Int32; has_overlap: Int32; is_interleaved: Int32

@laid_out
class ConvolutionArgs(Structure):
    bcx: Address; weight: Address; bias: Address; states: Address; block_tables: Address; context_lens: Address
    cu_seqlens_q: Address; out: Address; num_tokens: Int64; num_seqs: Int64; num_blocks: Int64; block_floats: Int64
    block_table_stride: Int64; num_channels: Int64; conv_width: Int64; bcx_stride: Int64; has_gates: Int32; dtype: Int32

@laid_out
class DeltaArgs(Structure):
    qkv: Address; gate: Address; beta: Address; decay: Address; conv_weight: Address; log_decay: Address
    dt_bias: Address; norm_weight: Address; states: Address; block_tables: Address; context_lens: Address
    cu_seqlens_q: Address; out: Address; num_tokens: Int64; num_seqs: Int64; num_blocks: Int64; block_floats: Int64
    block_table_stride: Int64; num_key_heads: Int64; num_value_heads: Int64; key_dim: Int64; value_dim: Int64
    conv_width: Int64; qkv_stride: Int64; gate_stride: Int64; beta_stride: Int64; decay_stride: Int64; norm_eps: Float
    strength: Float; decay_bound: Float; has_channel_decay: Int32; has_sigmoid_gate: Int32; dtype: Int32

@laid_out
class ElementwiseArgs(Structure):
    x: Address; other: Address; out: Address; num_rows: Int64; size: Int64; x_stride: Int64; other_stride: Int64
    other_repeat: Int64; factor: Float; dtype: Int32; kind: Int32

@laid_out
class XieluArgs(Structure):
    x: Address; out: Address; num_rows: Int64; size: Int64; x_stride: Int64; positive: Float; negative: Float
    beta: Float; eps: Float; dtype: Int32

@laid_out
class WidenArgs(Structure):
    x: Address; out: Address; num_rows: Int64; size: Int64; x_stride: Int64; dtype: Int32

@laid_out
class GatherColumnsArgs(Structure):
    x: Address; columns: Address; out: Address; num_rows: Int64; num_columns: Int64; size: Int64; x_stride: Int64
    dtype: Int32

@laid_out
class StreamWeightsArgs(Structure):
    products: Address; streams: Address; biases: Address; scales: Address; before: Address; after: Address
    mixing: Address; num_tokens: Int64; num_streams: Int64; size: Int64; product_stride: Int64; num_iterations: Int64
    eps: Double; norm_eps: Double; magnitude: Double; dtype: Int32

@laid_out
class CollapseStreamsArgs(Structure):
    streams: Address; weights: Address; out: Address; num_tokens: Int64; num_streams: Int64; size: Int64; dtype: Int32

@laid_out
class ExpandStreamsArgs(Structure):
    streams: Address; output: Address; after: Address; mixing: Address; out: Address; num_tokens: Int64
    num_streams: Int64; size: Int64; output_stride: Int64; dtype: Int32

@laid_out
class StoreIndexArgs(Structure):
    keys: Address; cos: Address; sin: Address; slot_mapping: Address; cache: Address; num_tokens: Int64; dim: Int64
    rope_dim: Int64; key_stride: Int64; angle_stride: Int64; num_blocks: Int64; block_size: Int64; dtype: Int32
    cache_dtype: Int32; is_interleaved: Int32

@laid_out
class SelectKeysArgs(Structure):
    q: Address; weights: Address; cos: Address; sin: Address; cache: Address; block_tables: Address
    target_tables: Address; context_lens: Address; cu_seqlens_q: Address; slots: Address; counts: Address
    starts: Address; num_tokens: Int64; num_seqs: Int64; num_heads: Int64; dim: Int64; rope_dim: Int64; q_stride: Int64
    angle_stride: Int64; num_blocks: Int64; block_size: Int64; max_blocks: Int64; block_table_stride: Int64
    target_table_stride: Int64; top_k: Int64; ratio: Int64; num_local: Int64; dtype: Int32; cache_dtype: Int32
    is_interleaved: Int32; has_blocks: Int32

@laid_out
class ArgmaxArgs(Structure):
    logits: Address; token_ids: Address; values: Address; num_rows: Int64; vocab_size: Int64; stride: Int64

@laid_out
class LogSoftmaxArgs(Structure):
    logits: Address; max: Address; log_sum: Address; num_rows: Int64; vocab_size: Int64; stride: Int64

@laid_out
class SampleArgs(Structure):
    logits: Address; temperature: Address; min_p: Address; top_k: Address; top_p: Address; uniform: Address
    masks: Address; token_ids: Address; num_rows: Int64; vocab_size: Int64; stride: Int64; mask_bytes: Int64

@laid_out
class MaskArgs(Structure):
    logits: Address; masks: Address; masked: Address; num_rows: Int64; vocab_size: Int64; stride: Int64
    mask_bytes: Int64

@laid_out
class AllowedArgs(Structure):
    logits: Address; masks: Address; token_ids: Address; values: Address; highest: Address; num_rows: Int64
    vocab_size: Int64; stride: Int64; mask_bytes: Int64

@laid_out
class TruncateArgs(Structure):
    logits: Address; temperature: Address; limits: Address; top_k: Address; masked: Address; num_rows: Int64
    vocab_size: Int64; stride: Int64; filter: Int32

@laid_out
class SurpriseArgs(Structure):
    logits: Address; temperature: Address; token_ids: Address; bits: Address; num_rows: Int64; vocab_size: Int64
    stride: Int64

@laid_out
class RankArgs(Structure):
    logits: Address; token_ids: Address; ranks: Address; top_ids: Address; top_logits: Address; num_rows: Int64
    vocab_size: Int64; stride: Int64; num_top: Int64

@laid_out
class LinearArgs(Structure):
    x: Address; weight: Address; bias: Address; out: Address; num_rows: Int64; out_features: Int64; in_features: Int64
    x_stride: Int64; out_stride: Int64; dtype: Int32; out_dtype: Int32

@laid_out
class PackArgs(Structure):
    rows: Address; weight: Address; first_row: Int64; num_rows: Int64; in_features: Int64; row_stride: Int64
    dtype: Int32

@laid_out
class GatherArgs(Structure):
    weight: Address; row_ids: Address; out: Address; num_rows: Int64; out_features: Int64; in_features: Int64
    dtype: Int32; is_packed: Int32

@laid_out
class LatentAttentionArgs(Structure):
    q_latent: Address; q_rope: Address; cache: Address; block_tables: Address; context_lens: Address
    cu_seqlens_q: Address; sinks: Address; out: Address; num_tokens: Int64; num_seqs: Int64; num_heads: Int64
    latent_dim: Int64; rope_dim: Int64; num_blocks: Int64; block_size: Int64; max_blocks: Int64
    block_table_stride: Int64; softmax_scale: Float; dtype: Int32; cache_dtype: Int32

@laid_out
class StoreLatentArgs(Structure):
    q: Address; latents: Address; norm: Address; cos: Address; sin: Address; slot_mapping: Address; q_rope: Address
    cache: Address; num_tokens: Int64; num_heads: Int64; nope_dim: Int64; latent_dim: Int64; rope_dim: Int64
    q_stride: Int64; latent_stride: Int64; angle_stride: Int64; num_blocks: Int64; block_size: Int64; norm_eps: Float
    dtype: Int32; cache_dtype: Int32; is_interleaved: Int32; has_key: Int32

@laid_out
class RouteArgs(Structure):
    logits: Address; bias: Address; scales: Address; expert_ids: Address; weights: Address; num_tokens: Int64
    num_experts: Int64; top_k: Int64; logits_stride: Int64; num_groups: Int64; top_k_groups: Int64; scaling: Float
    epsilon: Float; margin: Float; scoring: Int32; group_score: Int32; renormalize: Int32

@laid_out
class GroupedLinearArgs(Structure):
    x: Address; weight: Address; bias: Address; expert_ids: Address; grouped: Address; out: Address; num_tokens: Int64
    top_k: Int64; num_experts: Int64; out_features: Int64; in_features: Int64; x_stride: Int64; out_stride: Int64
    dtype: Int32; format: Int32; is_quantized: Int32; is_per_choice: Int32

@laid_out
class AddLowRankArgs(Structure):
    down: GroupedLinearArgs; up: GroupedLinearArgs; y: Address; out: Address; y_stride: Int64

@laid_out
class CombineArgs(Structure):
    y: Address; places: Address; weights: Address; shared: Address; shared_gate: Address; identity: Address
    out: Address; num_tokens: Int64; top_k: Int64; hidden_size: Int64; shared_stride: Int64; identity_stride: Int64
    num_products: Int64; dtype: Int32

@laid_out
class FusedMoeArgs(Structure):
    route: RouteArgs; gate_up: GroupedLinearArgs; down: GroupedLinearArgs; combine: CombineArgs; activated: Address
    weighed: Address; num_tokens: Int64; chunk: Int64; activation: Int32; is_gated: Int32

@laid_out
class RootLogitsArgs(Structure):
    logits: Address; bias: Address; ids: Address; out: Address; num_tokens: Int64; num_experts: Int64; top_k: Int64
    logits_stride: Int64

@laid_out
class NormArgs(Structure):
    x: Address; residual: Address; weight: Address; bias: Address; out: Address; new_residual: Address; num_rows: Int64
    hidden_size: Int64; x_stride: Int64; residual_stride: Int64; out_stride: Int64; eps: Float; weight_offset: Float
    has_wide_residual: Int32; dtype: Int32

@laid_out
class QuantizedLinearArgs(Structure):
    x: Address; weight: Address; bias: Address; out: Address; num_rows: Int64; out_features: Int64; in_features: Int64
    x_stride: Int64; out_stride: Int64; format: Int32; dtype: Int32; out_dtype: Int32

@laid_out
class PackQuantizedArgs(Structure):
    rows: Address; weight: Address; first_row: Int64; num_rows: Int64; num_blocks: Int64; row_stride: Int64
    format: Int32

@laid_out
class GatherQuantizedArgs(Structure):
    weight: Address; row_ids: Address; out: Address; num_rows: Int64; out_features: Int64; in_features: Int64
    format: Int32; dtype: Int32

@laid_out
class QuantizeWeightArgs(Structure):
    x: Address; importance: Address; rows: Address; num_rows: Int64; num_columns: Int64; x_stride: Int64; dtype: Int32
    format: Int32; search: Int32

@laid_out
class HeadNormArgs(Structure):
    weight: Address; bias: Address; stride: Int64; eps: Float; offset: Float; is_layer_norm: Int32
    is_after_rotation: Int32

@laid_out
class RopeStoreArgs(Structure):
    qkv: Address; cos: Address; sin: Address; q_scales: Address; slot_mapping: Address; q: Address; cache: Address
    q_norm: HeadNormArgs; k_norm: HeadNormArgs; v_norm: HeadNormArgs; num_tokens: Int64; num_heads: Int64
    num_kv_heads: Int64; head_dim: Int64; rotary_dim: Int64; qkv_stride: Int64; angle_stride: Int64; num_blocks: Int64
    block_size: Int64; k_scale: Float; v_scale: Float; dtype: Int32; cache_dtype: Int32; is_interleaved: Int32
    is_plain: Int32

@laid_out
class RotaryAnglesArgs(Structure):
    positions: Address; frequencies: Address; cos: Address; sin: Address; num_tokens: Int64; num_frequencies: Int64
    shift: Int64; scale: Float

@laid_out
class DynamicAnglesArgs(Structure):
    positions: Address; cos: Address; sin: Address; num_tokens: Int64; rotary_dim: Int64; original_length: Int64
    theta: Double; factor: Double

@laid_out
class RotateHeadsArgs(Structure):
    x: Address; cos: Address; sin: Address; out: Address; num_tokens: Int64; num_heads: Int64; head_dim: Int64
    rotary_dim: Int64; x_stride: Int64; angle_stride: Int64; dtype: Int32; is_interleaved: Int32

@laid_out
class ScanArgs(Structure):
    xbc: Address; gate: Address; dt: Address; conv_weight: Address; conv_bias: Address; log_decay: Address
    skip: Address; dt_bias: Address; norm_weight: Address; states: Address; block_tables: Address
    context_lens: Address; cu_seqlens_q: Address; out: Address; num_tokens: Int64; num_seqs: Int64; num_blocks: Int64
    block_floats: Int64; block_table_stride: Int64; num_heads: Int64; num_groups: Int64; head_dim: Int64
    state_dim: Int64; conv_width: Int64; num_norm_groups: Int64; xbc_stride: Int64; gate_stride: Int64
    dt_stride: Int64; norm_eps: Float; gate_scale: Float; dt_scale: Float; is_norm_first: Int32; dtype: Int32

@laid_out
class StreamsArgs(Structure):
    active: Address; others: Address; computed: Address; coefficients: Address; out_active: Address
    out_others: Address; num_tokens: Int64; num_others: Int64; size: Int64; active_stride: Int64
    computed_stride: Int64; dtype: Int32

@laid_out
class MagnitudeArgs(Structure):
    x: Address; target: Address; out: Address; num_rows: Int64; size: Int64; repeat: Int64; x_stride: Int64
    target_stride: Int64; least: Float; dtype: Int32

@laid_out
class WindowAttentionArgs(Structure):
    q: Address; cache: Address; entries: Address; block_tables: Address; context_lens: Address; cu_seqlens_q: Address
    entry_tables: Address; slots: Address; counts: Address; sinks: Address; out: Address; num_tokens: Int64
    num_seqs: Int64; num_heads: Int64; dim: Int64; window: Int64; ratio: Int64; top_k: Int64; num_blocks: Int64
    block_size: Int64; max_blocks: Int64; block_table_stride: Int64; num_entry_blocks: Int64; entry_block_size: Int64
    max_entry_blocks: Int64; entry_table_stride: Int64; softmax_scale: Float; dtype: Int32; cache_dtype: Int32

@laid_out
class BlockAttentionArgs(Structure):
    q: Address; cache: Address; block_tables: Address; context_lens: Address; cu_seqlens_q: Address; slots: Address
    counts: Address; out: Address; num_tokens: Int64; num_seqs: Int64; num_heads: Int64; num_kv_heads: Int64
    num_selections: Int64; dim: Int64; ratio: Int64; top_k: Int64; num_blocks: Int64; block_size: Int64
    max_blocks: Int64; block_table_stride: Int64; softmax_scale: Float; dtype: Int32; cache_dtype: Int32

# The argument struct of each operation.
OPERATIONS: dict[str, type[Structure]] = {
    "rms_norm": NormArgs, "layer_norm": NormArgs, "linear": LinearArgs, "pack_rows": PackArgs,
    "gather_rows": GatherArgs, "activation": ActivationArgs, "rope_and_store": RopeStoreArgs,
    "rotary_angles": RotaryAnglesArgs, "argmax_rows": ArgmaxArgs, "log_softmax_stats": LogSoftmaxArgs,
    "mask_rows": MaskArgs, "argmax_allowed": AllowedArgs, "sample_tokens": SampleArgs, "paged_attention": AttentionArgs,
    "store_kv": StoreKvArgs, "route": RouteArgs, "grouped_linear": GroupedLinearArgs, "combine": CombineArgs,
    "fused_moe": FusedMoeArgs, "add_low_rank": AddLowRankArgs, "elementwise": ElementwiseArgs,
    "dynamic_rotary_angles": DynamicAnglesArgs, "store_latent": StoreLatentArgs,
    "latent_attention": LatentAttentionArgs, "store_index_keys": StoreIndexArgs, "select_keys": SelectKeysArgs,
    "gated_delta_net": DeltaArgs, "selective_scan": ScanArgs, "short_convolution": ConvolutionArgs,
    "channel_scan": ChannelScanArgs, "quantized_linear": QuantizedLinearArgs, "pack_quantized_rows": PackQuantizedArgs,
    "gather_quantized_rows": GatherQuantizedArgs, "quantize_weight": QuantizeWeightArgs,
    "gather_columns": GatherColumnsArgs, "rank_tokens": RankArgs, "truncate_rows": TruncateArgs,
    "surprise": SurpriseArgs, "xielu": XieluArgs, "gaussian_top_k": GaussianTopKArgs, "mix_streams": StreamsArgs,
    "correct_streams": StreamsArgs, "match_magnitude": MagnitudeArgs, "stream_weights": StreamWeightsArgs,
    "collapse_streams": CollapseStreamsArgs, "expand_streams": ExpandStreamsArgs, "root_logits": RootLogitsArgs,
    "rotate_heads": RotateHeadsArgs, "widen": WidenArgs, "compress_rows": CompressRowsArgs,
    "window_attention": WindowAttentionArgs, "block_attention": BlockAttentionArgs
}
