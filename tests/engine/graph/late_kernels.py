"""The operations that are kernels of the device that computes late: those of Triton, queued as a whole.

Each has a function that returns the shapes and dtypes of its results for its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagewick.kernels.options import SelectedKeys, StreamWeights

Shapes = list[tuple[tuple[int, ...], torch.dtype]]
_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


def _like(*arguments: Any, **options: Any) -> Shapes:
    """Return the shape of a result that is like the first argument."""
    return [(arguments[0].shape, arguments[0].dtype)]


def _twice(*arguments: Any, **options: Any) -> Shapes:
    return 2 * _like(*arguments)


def _nothing(*arguments: Any, **options: Any) -> Shapes:
    return []


def _product(x: Any, weight: Any, bias: Any = None, out_dtype: Any = None, out: Any = None) -> Shapes:
    return [((*x.shape[:-1], weight.num_rows), out_dtype or x.dtype)]


def _stream_weights(products: Any, streams: Any, options: Any) -> Shapes:
    num_tokens, num_streams, _ = streams.shape
    kinds = [(num_streams,), (num_streams,), (num_streams, num_streams)]
    return [((num_tokens, *kind), _F32) for kind in kinds[: options.scales.shape[0]]]


def _routed(logits: Any, routing: Any, *more: Any) -> Shapes:
    shape = len(logits), routing.top_k
    return [(shape, _I32), (shape, _F32)]


# `linear` is cuBLAS's.
SHAPES: dict[str, Callable[..., Shapes]] = {
    "activation": _like,
    "add_layer_norm": _twice,
    "add_low_rank": _like,
    "add_rms_norm": _twice,
    "argmax_allowed": lambda x, masks: [(x.shape[:1], _I64), (x.shape[:1], _F32), (x.shape[:1], _F32)],
    "argmax_rows": lambda x: [(x.shape[:1], _I64), (x.shape[:1], _F32)],
    "block_attention": _like,
    "channel_scan": _like,
    "collapse_streams": lambda streams, weights: [((len(streams), streams.shape[2]), streams.dtype)],
    "combine": lambda y, weights, *shared: [((len(weights), y.shape[1]), y.dtype)],
    "compress_rows": _nothing,
    "edit_tokens": _nothing,
    "expand_streams": _like,
    "full_attention": _like,
    "fused_moe": lambda x, logits, gate_up, down, routing, **more: [((len(x), down.num_rows), x.dtype)],
    "gated_activation": lambda x, kind: [((*x.shape[:-1], x.shape[-1] // 2), x.dtype)],
    "gated_delta_net": lambda qkv, gate, *more: [(gate.shape, qkv.dtype)],
    "gather_blocks": lambda ids, caches: [((len(ids), sum(cache.shape[1] for cache in caches)), torch.uint8)],
    "gather_quantized_rows": lambda ids, weight, dtype: [((len(ids), weight.num_columns), dtype)],
    "gather_rows": lambda x, row_ids, num_rows, num_columns, is_packed: [((len(row_ids), num_columns), x.dtype)],
    "grouped_linear": lambda x, weight, ids, *more: [((ids.numel(), weight.num_rows), x.dtype)],
    "latent_attention": _like,
    "layer_norm": _like,
    "limit": _like,
    "linear": _product,
    "log_softmax_stats": lambda x: [(x.shape[:1], _F32)] * 2,
    "mask_rows": _like,
    "paged_attention": _like,
    "quantized_linear": _product,
    "rms_norm": _like,
    "root_logits": _like,
    "rope_and_store": lambda qkv, cache, slots, layout, *options: [
        ((len(qkv), layout.num_heads, layout.head_dim), qkv.dtype)
    ],
    "rope_and_store_latent": lambda q, latents, cache, slots, rotation, **more: [
        ((*q.shape[:2], 2 * rotation.cos.shape[-1]), q.dtype)
    ],
    "rotate_heads": _like,
    "route": _routed,
    "sample_tokens": lambda x, *options: [(x.shape[:1], _I64)],
    "scale": _like,
    "scatter_blocks": _nothing,
    "select_blocks": lambda q, *more, choice, **options: [
        (shape, _I32) for shape in ((*q.shape[:2], choice.top_k), (len(q),), (len(q) + 1,))
    ],
    "select_keys": lambda q, *more, top_k, **options: [
        (shape, _I32) for shape in ((len(q), top_k), (len(q),), (len(q) + 1,))
    ],
    "selective_scan": lambda xbc, gate, *more: [(gate.shape, xbc.dtype)],
    "short_convolution": lambda bcx, states, batch, options: [((len(bcx), len(options.weight)), bcx.dtype)],
    "sigmoid_gate": _like,
    "soft_cap": _like,
    "store_index_keys": _nothing,
    "store_kv": _nothing,
    "stream_weights": _stream_weights,
    "window_attention": _like,
}

# Results that are more than a tuple.
RESULTS: dict[str, Callable[..., Any]] = {
    "select_blocks": SelectedKeys,
    "select_keys": SelectedKeys,
    "stream_weights": StreamWeights,
}
