"""Attention to selected blocks of tokens, in plain PyTorch; a part of `reference`.

A block is `ratio` consecutive tokens of a sequence, from a multiple of ratio on (Qwen4-Exp, MiniMax-M3). Every token is
computed with tensors whose shapes depend on it alone, so that bits depend neither on the other sequences nor on how a
prompt is cut.

Dimensions: T tokens, B sequences, H query heads, KVH key/value heads, D elements of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import AttentionMetadata, ScoreOptions, SelectedKeys


def block_attention(
    q: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scores: ScoreOptions,
    selected: SelectedKeys,
    ratio: int,
) -> Tensor:
    """Compute causal attention of a ragged batch q [T, H, D] to selected blocks: [T, H, D] in q.dtype.

    A token at position p sees the blocks whose numbers in the sequence are the first selected.counts of its
    selected.slots, all of which end at p or before it, and the tokens behind the last block that ends there. Slots are
    [T, top_k], or [T, KVH, top_k], where each KV head has its own. Query head h reads KV head h // (H / KVH). A score
    is scores.softmax_scale * (q . k); there are no windows, caps or sinks.
    Everything is computed in float32 and rounded once. Raises ValueError for a packed cache and one of 8-bit numbers.
    """
    if cache.is_packed or cache.scales is not None:
        raise ValueError(f"no attention to blocks of a packed cache, or one of {cache.dtype} with scales")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads, head_dim = cache.num_kv_heads, q.shape[2]
    within = torch.arange(ratio, device=q.device)
    heads = torch.arange(num_kv_heads, device=q.device).unsqueeze(1)
    slots = selected.slots if selected.slots.dim() == 3 else selected.slots.unsqueeze(1)
    slots = slots.expand(-1, num_kv_heads, -1)
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    counts = selected.counts.tolist()
    for b, context_len in enumerate(lengths):
        for token in range(starts[b], starts[b + 1]):
            num_seen = context_len - (starts[b + 1] - 1 - token)
            numbers = slots[token, :, : counts[token]].long()
            tail = torch.arange(num_seen // ratio * ratio, num_seen, device=q.device).expand(num_kv_heads, -1)
            seen = torch.cat(((numbers.unsqueeze(2) * ratio + within).flatten(1), tail), dim=1)
            block_ids = metadata.block_tables[b][seen // cache.block_size].long()
            keys, values = (cache.data[block_ids, which, heads, seen % cache.block_size].to(dtype) for which in (0, 1))
            # A copy lies at the same distance from a cache line, wherever the token is in the batch.
            queries = q[token].to(dtype, copy=True).view(num_kv_heads, -1, head_dim)
            logits = (queries @ keys.transpose(1, 2)) * scores.softmax_scale
            out[token] = (logits.softmax(-1) @ values).view(-1, head_dim).to(q.dtype)
    return out
