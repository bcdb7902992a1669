"""Attention to a window and to compressed entries, in plain PyTorch; a part of `reference`.

In DeepSeek V4 a token sees the last tokens by their keys, and earlier ones by entries, each of which stands for a
window of several tokens. A key, or an entry, is its own value.

Every step is computed with tensors whose shapes depend on one token, or one window, alone, so that bits depend neither
on the other sequences nor on how a prompt is cut.

Dimensions: T tokens, B sequences, H query heads, D elements of a key, r tokens of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata, CompressOptions, Entries, Rotation, ScoreOptions
from pagewick.kernels.reference_rope import rotate


def compress_rows(
    rows: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    metadata: AttentionMetadata,
    entries: Tensor,
    entry_slots: Tensor,
    *,
    rotation: Rotation,
    options: CompressOptions,
) -> None:
    """Store the rows of new tokens [T, C], and the entries of the windows that end at one of them.

    cache: [num_blocks, block_size, C], in the blocks of metadata; entries: [num_blocks, entries of a block, D].
    slot_mapping, entry_slots: [T] int64, block_id * tokens of a block + offset, in either cache; the entry of the
    window that ends at a token has its entry slot divided by r. A slot of -1 stores nothing. rotation: [T, R / 2], by
    the position of the first token of the window that ends at each token; of no meaning where none does.

    A row consists of values and gates, D of each; with options.overlaps of two kinds of values and of two kinds of
    gates: those that count in the entry of the next window come first. An entry is norm(sum over tokens of
    softmax(gate + bias) * value), the softmax of each element being taken over the tokens, then rotated. Rows are read
    from the cache as it has rounded them; everything else is float32 and rounded once to the dtype of entries.
    """
    stored = slot_mapping >= 0
    slots, block_size = slot_mapping[stored], cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows[stored].to(cache.dtype)
    ratio, places = options.ratio, entry_slots.tolist()
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    cos, sin, interleaved = rotation
    for b, context_len in enumerate(lengths):
        first = context_len - (starts[b + 1] - starts[b])
        for end in range((first // ratio + 1) * ratio, context_len + 1, ratio):
            token = starts[b] + end - 1 - first
            if places[token] < 0:
                continue
            positions = torch.arange(max(0, end - 2 * ratio) if options.overlaps else end - ratio, end)
            positions = positions.to(cache.device)
            block_ids = metadata.block_tables[b][positions // block_size].long()
            entry = _compressed(cache[block_ids, positions % block_size], options)
            turned = rotate(entry, cos[token], sin[token], interleaved)
            block_id, place = divmod(places[token] // ratio, entries.shape[1])
            entries[block_id, place] = turned.to(entries.dtype)


def _compressed(rows: Tensor, options: CompressOptions) -> Tensor:
    """Return the entry [D] of a window from the rows [n, C] of its tokens, and of those of the window before it."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    values, gates = wide.chunk(2, dim=-1)
    if not options.overlaps:
        gates = gates + options.bias
    else:
        num_earlier = len(rows) - options.ratio
        earlier_values, later_values = values.chunk(2, dim=-1)
        earlier_gates, later_gates = gates.chunk(2, dim=-1)
        earlier_bias, later_bias = options.bias.chunk(2, dim=-1)
        values = torch.cat((earlier_values[:num_earlier], later_values[num_earlier:]))
        gates = torch.cat((
            earlier_gates[:num_earlier] + earlier_bias[:num_earlier], later_gates[num_earlier:] + later_bias
        ))  # fmt: skip
    total = (gates.softmax(dim=0) * values).sum(dim=0)
    return total * torch.rsqrt(total.square().mean() + options.norm_eps) * options.norm_weight


def window_attention(
    q: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scores: ScoreOptions,
    entries: Entries | None = None,
) -> Tensor:
    """Compute attention of a ragged batch to a window of keys and to entries: [T, H, D] in q.dtype.

    q: [T, H, D]; cache: keys [num_blocks, block_size, D] in the blocks of metadata. A query sees the last
    scores.sliding_window tokens of its sequence up to itself, and the entries of `entries`; each sees one softmax over
    all of them, which has the logit scores.sinks of the head besides. A score is softmax_scale * (q . key); there is no
    soft cap, and the window slides. Everything is computed in float32 and rounded once.
    """
    assert scores.sliding_window is not None and scores.sinks is not None, "such layers have both"
    assert scores.logit_soft_cap is None and not scores.is_chunked, "no such layer has either"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtype, block_size = torch.promote_types(q.dtype, torch.float32), cache.shape[1]
    sinks = scores.sinks.to(dtype).unsqueeze(1)
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    counts = entries.selected.counts.tolist() if entries is not None and entries.selected is not None else []
    for b, context_len in enumerate(lengths):
        first = context_len - (starts[b + 1] - starts[b])
        for token in range(starts[b], starts[b + 1]):
            position = first + token - starts[b]
            seen = torch.arange(max(0, position + 1 - scores.sliding_window), position + 1, device=q.device)
            keys = cache[metadata.block_tables[b][seen // block_size].long(), seen % block_size]
            if entries is not None:
                of_block = entries.cache.shape[1]
                if entries.selected is not None:
                    slots = entries.selected.slots[token, : counts[token]].long()
                else:
                    indices = torch.arange((position + 1) // entries.ratio, device=q.device)
                    slots = entries.block_tables[b][indices // of_block].long() * of_block + indices % of_block
                keys = torch.cat((keys, entries.cache.flatten(0, 1)[slots]))
            keys = keys.to(dtype)
            # A copy lies at the same distance from a cache line, wherever the token is in the batch.
            logits = (q[token].to(dtype, copy=True) @ keys.t()) * scores.softmax_scale
            weights = torch.cat((logits, sinks), dim=-1).softmax(-1)[:, :-1]
            out[token] = (weights.contiguous() @ keys).to(q.dtype)
    return out
