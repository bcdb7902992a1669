"""Every operation in plain PyTorch: its definition, the fallback on any device, and the expected result in tests.

Layouts that only a backend can read (packed weights and caches) raise a ValueError here.

Dimensions: T tokens of the batch, B sequences, H query heads, KVH key/value heads, D head size,
V vocabulary, N rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import (
    NO_BIASES,
    PLAIN_HEADS,
    AttentionMetadata,
    HeadLayout,
    HeadOptions,
    Identities,
    MoeBiases,
    ScoreOptions,
    SharedOutput,
    StoredExperts,
    StoredMatrix,
)
from pagewick.kernels.reference_blocks import block_attention
from pagewick.kernels.reference_compressed import compress_rows, window_attention
from pagewick.kernels.reference_delta import gated_delta_net
from pagewick.kernels.reference_elementwise import (
    ACTIVATIONS,
    activation,
    add,
    compute_dtype,
    gated_activation,
    limit,
    multiply,
    scale,
    sigmoid_gate,
    soft_cap,
    widen,
    xielu,
)
from pagewick.kernels.reference_full import full_attention, rotate_heads
from pagewick.kernels.reference_hyper import collapse_streams, expand_streams, stream_weights
from pagewick.kernels.reference_index import select_blocks, select_keys, store_index_keys
from pagewick.kernels.reference_kv import gather_blocks, scatter_blocks, store_vectors, take_blocks
from pagewick.kernels.reference_mla import latent_attention, rope_and_store_latent
from pagewick.kernels.reference_moe import (
    combine,
    grouped_linear,
    is_gated,
    products_or_inputs,
    root_logits,
    route,
    weighed,
    with_weights,
)
from pagewick.kernels.reference_ngrams import ngram_rows, stream_similarities
from pagewick.kernels.reference_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from pagewick.kernels.reference_quantized import gather_quantized_rows, quantized_linear
from pagewick.kernels.reference_quantizers import quantize_weight
from pagewick.kernels.reference_rope import dynamic_rotary_angles, rotary_angles, turn_heads
from pagewick.kernels.reference_sampling import (
    argmax_allowed,
    argmax_rows,
    edit_tokens,
    log_softmax_stats,
    mask_min_p,
    mask_rows,
    philox_uniform,
    rank_tokens,
    sample_tokens,
)
from pagewick.kernels.reference_scan import channel_scan, selective_scan, short_convolution
from pagewick.kernels.reference_streams import correct_streams, gaussian_top_k, match_magnitude, mix_streams
from pagewick.kernels.reference_truncation import (
    mask_surprise,
    mask_top_k_top_p,
    mask_top_n_sigma,
    mask_typical_p,
    mask_xtc,
    surprise,
)

__all__ = [
    "ACTIVATIONS", "activation", "add", "add_layer_norm", "add_low_rank", "add_rms_norm", "argmax_allowed",
    "argmax_rows", "block_attention", "channel_scan", "collapse_streams", "combine", "compress_rows", "correct_streams",
    "dynamic_rotary_angles", "edit_tokens", "expand_streams", "full_attention", "fused_moe", "gated_activation",
    "gated_delta_net", "gather_blocks", "gather_columns", "gather_quantized_rows", "gather_rows", "gaussian_top_k",
    "grouped_linear", "latent_attention", "layer_norm", "limit", "linear", "log_softmax_stats", "mask_min_p",
    "mask_rows", "mask_surprise", "mask_top_k_top_p", "mask_top_n_sigma", "mask_typical_p", "mask_xtc",
    "match_magnitude", "mix_streams", "multiply", "ngram_rows", "paged_attention", "philox_uniform", "quantize_weight",
    "quantized_linear", "rank_tokens", "rms_norm", "root_logits", "rope_and_store", "rope_and_store_latent",
    "rotary_angles", "rotate_heads", "route", "sample_tokens", "scale", "scatter_blocks", "select_blocks",
    "select_keys", "selective_scan", "short_convolution", "sigmoid_gate", "soft_cap",
    "store_index_keys", "store_kv", "stream_similarities", "stream_weights", "surprise", "widen", "window_attention",
    "xielu",
]  # fmt: skip

# Queries of a long prefill are processed in slices of at most this size, which have at most this number of scores of
# all heads, unless one query has more.
QUERY_SLICE = 256
MAX_SCORES = 2**28


def linear(
    x: Tensor,
    weight: StoredMatrix,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [..., num_columns] times a weight transposed, plus bias [num_rows]: [..., num_rows] in out_dtype.

    The product is rounded to x.dtype first, except that an NVIDIA GPU gives float32 directly: 16 bits would make equal
    logits out of different ones. out_dtype: None is x's. out: a tensor of out_dtype to write the result to; its rows
    may lie apart.
    """
    if weight.is_packed:
        raise ValueError(f"no native product of {x.dtype} with {weight.data.dtype}")
    if out_dtype == torch.float32 and x.dtype != out_dtype and x.is_cuda and torch.version.hip is None:
        result = _product_in_float32(x, weight.data, bias)
    else:
        result = product(x, weight.data, bias)
    if out is not None:
        return out.copy_(result)
    return result if out_dtype is None else result.to(out_dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N]."""
    return F.linear(x, weight, bias)


def _product_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the unrounded product of bfloat16 or float16 tensors. Only CUDA has it (PyTorch 2.8 and later)."""
    result = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
    return result if bias is None else result.add_(bias)


def gather_rows(weight: Tensor, row_ids: Tensor, num_rows: int, num_columns: int, is_packed: bool) -> Tensor:
    """Return rows row_ids [n] int64 of a weight [num_rows, num_columns]: [n, num_columns].

    Raises IndexError for an id outside 0 .. num_rows - 1.
    """
    if is_packed:
        raise ValueError(f"no native operation reads packed rows of {weight.dtype}")
    return F.embedding(row_ids, weight)


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns [n] int64, each from 0 to H - 1, of x [..., H]: [..., n]."""
    return x.index_select(-1, columns)


def rope_and_store(
    qkv: Tensor, cache: KVCache, slot_mapping: Tensor, layout: HeadLayout, options: HeadOptions = PLAIN_HEADS
) -> Tensor:
    """Normalise and rotate the heads of qkv [T, (H + 2 KVH) * D]; store keys and values; return q [T, H, D].

    cache, slot_mapping: as in store_kv. With KVH 0 nothing is stored. Norms and rotation are computed in float32 and
    rounded once to qkv.dtype, and then to the cache's dtype.
    """
    if cache.is_packed:
        raise ValueError(f"no native operation stores {qkv.dtype} in a packed cache")
    num_heads, num_kv_heads, head_dim = layout
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    q, kv = heads[:, :num_heads], heads[:, num_heads:]
    k, v = kv.chunk(2, dim=1)
    turned_q = turn_heads(q, options.q_norm, options.rotation, options.q_scales)
    if num_kv_heads:
        v = turn_heads(v, options.v_norm, None)
        store_kv(turn_heads(k, options.k_norm, options.rotation), v, cache, slot_mapping)
    return turned_q


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
    """Apply a layer's experts to x [T, H] with router logits [T, E] float32: [T, H] in x.dtype.

    The result has the bits of `route`, `weighed`, `grouped_linear` with gate_up, the gated activation (or the plain
    one, if gate_up has as many rows as down has columns), `grouped_linear` with down and `combine`, one after the
    other. A token's result has the same bits whatever other tokens are there. E counts the identities, too, which have
    no weights; inputs are then not weighed. Raises ValueError for tensors that do not fit together.
    """
    function = gated_activation if is_gated(gate_up, down) else _activation
    chosen_ids, weights = route(logits, routing, biases.router, biases.scales)
    expert_ids = with_weights(chosen_ids, identities, gate_up.num_experts)
    x, weights = weighed(x, weights, routing)
    activated = function(grouped_linear(x, gate_up, expert_ids, biases.gate_up), activation)
    products = grouped_linear(activated, down, expert_ids, biases.down)
    return combine(products_or_inputs(products, chosen_ids, identities, gate_up.num_experts), weights, shared)


# For functions that have an argument of the same name.
_activation = activation


def add_low_rank(y: Tensor, x: Tensor, down: StoredExperts, up: StoredExperts, adapter_ids: Tensor) -> Tensor:
    """Return y [T, N] plus B (A x) for each row x of x [T, K], with the factors of the row's adapter.

    down: A [R, K] of each adapter; up: B [N, R]. adapter_ids: [T] int32. The last adapter stands for none: its factors
    are 0, and its rows keep their values. The products and the sum are each rounded to x.dtype, as by PEFT. Other
    implementations may overwrite y. Raises ValueError for tensors that do not fit together; an id must be that of an
    adapter.
    """
    if down.is_packed or up.is_packed:
        raise ValueError(f"no native product of {x.dtype} with {down.data.dtype}")
    if len(x) != len(y) or adapter_ids.shape != (len(y),) or up.num_experts != down.num_experts:
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)} and ids {list(adapter_ids.shape)} do not fit together")
    for adapter in range(down.num_experts - 1):
        changed = y + product(product(x, down.data[adapter], None), up.data[adapter], None)
        y = torch.where((adapter_ids == adapter).unsqueeze(1), changed, y)
    return y


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Write k, v [T, KVH, D] into a cache.

    slot_mapping: [T] int64, slot = block_id * block_size + offset; slot -1 stores nothing.
    """
    if cache.is_packed:
        raise ValueError(f"no native operation stores {k.dtype} in a packed cache")
    stored = slot_mapping >= 0
    if not bool(stored.all()):
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    block_ids, offsets = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    store_vectors(cache, 0, k, block_ids, offsets)
    store_vectors(cache, 1, v, block_ids, offsets)


def paged_attention(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scores: ScoreOptions) -> Tensor:
    """Compute causal attention of a ragged batch q [T, H, D] over paged keys and values: [T, H, D] in q.dtype.

    The queries of sequence b are its last q_len tokens: query i stands at position p =
    context_lens[b] - q_len + i and sees the keys up to its own, or to metadata.key_ends if that is given; with a
    sliding_window, only those from p - sliding_window + 1 on, or, if is_chunked, from the last multiple of
    sliding_window up to p on.
    Query head h reads KV head h // (H / KVH). Parts of the cache without visible keys are never read.
    A sequence's result does not depend on the other sequences.
    """
    if cache.is_packed:
        raise ValueError(f"no native attention of {q.dtype} over a packed cache")
    out = torch.empty_like(q)
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    for b, context_len in enumerate(lengths):
        step = max(1, min(QUERY_SLICE, MAX_SCORES // max(1, q.shape[1] * context_len)))
        for start in range(starts[b], starts[b + 1], step):
            end = min(start + step, starts[b + 1])
            position = context_len - (starts[b + 1] - start)
            positions = torch.arange(position, position + end - start, device=q.device)
            ends = positions + 1 if metadata.key_ends is None else metadata.key_ends[start:end]
            last = int(ends[-1])
            first_key = scores.first_key(position)
            first_block = first_key // cache.block_size
            block_ids = metadata.block_tables[b][first_block : -(-last // cache.block_size)].long()
            kv = take_blocks(cache.data, cache.scales, block_ids).permute(1, 2, 0, 3, 4).flatten(2, 3)
            offset = first_block * cache.block_size
            k, v = kv[:, :, first_key - offset : last - offset].to(compute_dtype(q))
            keys = torch.arange(first_key, last, device=q.device)
            hidden = keys >= ends[:, None]
            if window := scores.sliding_window:
                first_keys = positions - positions % window if scores.is_chunked else positions - window + 1
                hidden |= keys < first_keys[:, None]
            out[start:end] = _attend(q[start:end], k, v, hidden, scores)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, options: ScoreOptions) -> Tensor:
    """Compute attention of q [q_len, H, D] over k, v [KVH, keys, D], but for those that are hidden [q_len, keys]."""
    q_len, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_heads // num_kv_heads
    # The query heads of one KV head become rows of one product, so K and V are not repeated.
    rows = q.to(k.dtype).view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (rows @ k.transpose(1, 2)) * options.softmax_scale
    if cap := options.logit_soft_cap:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.view(num_kv_heads, group, q_len, -1).masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(scores.dtype).view(num_kv_heads, group, 1, 1).expand(-1, -1, q_len, 1)
        scores = torch.cat((scores, column), dim=-1)
    attended = scores.softmax(-1)[..., : k.shape[1]].flatten(1, 2) @ v
    return attended.view(num_kv_heads, group, q_len, head_dim).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
