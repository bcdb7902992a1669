"""The choice of the tokens that sparse attention sees, in plain PyTorch; a part of `reference`.

DeepSeek-V3.2 (arXiv:2512.02556, section 2.1): an indexer with heads and keys of its own scores every earlier token, and
attention sees the best of them. A score is the sum over the index heads of weight * max(0, query . key). The factors
that the paper and its code multiply all scores with are left out, as they change no choice; so are the Hadamard
transform and the rounding to 8 bits of the published code, which transformers leaves out as well.

Dimensions: T tokens, B sequences, H index heads of I elements, of which the first R are rotated.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.options import AttentionMetadata, Rotation, SelectedKeys
from pagewick.kernels.reference_rope import rotate

# Queries of a long prompt are scored in slices of this many tokens, which bounds the size of the scores.
QUERY_SLICE = 64


def store_index_keys(keys: Tensor, cache: Tensor, slot_mapping: Tensor, *, rotation: Rotation) -> None:
    """Store the index keys of new tokens, rotated: keys [T, I], cache [num_blocks, block_size, I].

    slot_mapping: [T] int64, slot = block_id * block_size + offset; slot -1 stores nothing. Results are rounded once
    from float32 to the cache's dtype.
    """
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    rows = rotate(keys.to(torch.promote_types(keys.dtype, torch.float32)), *rotation)[stored]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows.to(cache.dtype)


def select_keys(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    tables: Tensor | None,
    *,
    rotation: Rotation,
    top_k: int,
    ratio: int = 1,
) -> SelectedKeys:
    """Choose the keys that each token of a ragged batch sees: all up to its own, or the top_k that score best.

    q: [T, H, I], not yet rotated. weights: [T, H] float32. cache: index keys, as store_index_keys leaves them, in the
    blocks of metadata; one for `ratio` tokens, which those tokens see that it ends with or before.
    tables: [B, max_blocks] int32, the blocks of another cache with the same block_size, in which the chosen ones are to
    be found; None: the slots are their numbers in the sequence. Queries are rounded to the cache's dtype after their
    rotation; products and sums are float32. Among equal scores, that of the earlier key counts as better; NaN counts as
    the worst score. A sequence's result does not depend on the other sequences.
    """
    num_tokens, dtype = len(q), torch.promote_types(q.dtype, torch.float32)
    cos, sin, interleaved = rotation
    turned = rotate(q.to(dtype), cos.unsqueeze(1), sin.unsqueeze(1), interleaved).to(cache.dtype).to(dtype)
    slots = torch.zeros(num_tokens, top_k, dtype=torch.int32, device=q.device)
    counts = torch.zeros(num_tokens, dtype=torch.int32, device=q.device)
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    block_size = cache.shape[1]
    for b, context_len in enumerate(lengths):
        for start in range(starts[b], starts[b + 1], QUERY_SLICE):
            end = min(start + QUERY_SLICE, starts[b + 1])
            # The number of tokens up to the first, itself included, and of keys that the last of them sees.
            num_tokens_seen = context_len - (starts[b + 1] - start) + 1
            num_keys = (num_tokens_seen + end - 1 - start) // ratio
            block_ids = metadata.block_tables[b][: -(-num_keys // block_size)].long()
            keys = cache[block_ids].flatten(0, 1)[:num_keys].to(dtype)
            products = torch.einsum("qhd,kd->qhk", turned[start:end], keys).relu_()
            scores = torch.einsum("qh,qhk->qk", weights[start:end].to(dtype), products)
            scores = scores.nan_to_num(nan=float("-inf"))
            for token in range(start, end):
                count = (num_tokens_seen + token - start) // ratio
                best = torch.arange(count, device=q.device)
                if count > top_k:
                    order = scores[token - start, :count].sort(descending=True, stable=True).indices
                    best = order[:top_k].sort().values
                if tables is not None:
                    best = tables[b][best // block_size] * block_size + best % block_size
                slots[token, : len(best)] = best.int()
                counts[token] = len(best)
    return SelectedKeys(slots, counts, torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device))


def select_blocks(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, *, rotation: Rotation, choice: BlockChoice
) -> SelectedKeys:
    """Choose the blocks of tokens that each token of a ragged batch sees, for each of H index heads on its own.

    A block is choice.size tokens of a sequence, which begin at a multiple of that number; the last one ends with the
    token. Its score is the greatest of query . key. A token sees its own block, the num_local - 1 before it, and of
    the others those that score best: choice.top_k blocks in all, or all of them. This is the choice of MiniMax-M3 as
    transformers has it; there is no publication.
    q: [T, H, I], not yet rotated. cache, metadata, rotation: as in select_keys. The slots of the result are
    [T, H, top_k] int32, the numbers of complete blocks, in their order; its counts are the same for all heads. An
    incomplete block at the token is not among them. Equal scores, and NaN: as in select_keys.
    """
    num_tokens, num_heads, dtype = len(q), q.shape[1], torch.promote_types(q.dtype, torch.float32)
    cos, sin, interleaved = rotation
    turned = rotate(q.to(dtype), cos.unsqueeze(1), sin.unsqueeze(1), interleaved).to(cache.dtype).to(dtype)
    slots = torch.zeros(num_tokens, num_heads, choice.top_k, dtype=torch.int32, device=q.device)
    counts = torch.zeros(num_tokens, dtype=torch.int32, device=q.device)
    for token, keys in _tokens(cache, metadata):
        num_complete, rest = divmod(len(keys), choice.size)
        # An incomplete block is the first of those that every token sees.
        num_local, top_k = (count - (rest > 0) for count in (choice.num_local, choice.top_k))
        products = torch.einsum("hd,kd->hk", turned[token], keys.to(dtype)).nan_to_num(nan=float("-inf"))
        scores = products[:, : num_complete * choice.size].view(num_heads, num_complete, choice.size).amax(-1)
        scores[:, max(0, num_complete - num_local) :] = float("inf")
        best = scores.sort(descending=True, stable=True).indices[:, :top_k].sort().values
        counts[token] = best.shape[1]
        slots[token, :, : best.shape[1]] = best
    return SelectedKeys(slots, counts, torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device))


def _tokens(cache: Tensor, metadata: AttentionMetadata) -> Iterator[tuple[int, Tensor]]:
    """Yield each token of a batch, and the keys up to its own."""
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    for b, context_len in enumerate(lengths):
        block_ids = metadata.block_tables[b][: -(-context_len // cache.shape[1])].long()
        keys = cache[block_ids].flatten(0, 1)
        for token in range(starts[b], starts[b + 1]):
            yield token, keys[: context_len - (starts[b + 1] - 1 - token)]
