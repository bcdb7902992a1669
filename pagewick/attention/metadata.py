"""The places of a batch's sequences in a cache group, as operations take them."""

from __future__ import annotations

from pagewick.attention.backend import AttentionBatch, GroupBatch
from pagewick.kernels.options import AttentionMetadata


def metadata_of(group: GroupBatch, batch: AttentionBatch, num_tokens: int) -> AttentionMetadata:
    """Return the metadata of a batch for a cache group."""
    # Every sequence has a new token at least, those of padding included. A step of decoding has one of each: then a GPU
    # need not start the kernel for prompts.
    max_query_len = num_tokens - len(batch.context_lens) + 1
    return AttentionMetadata(group.block_tables, batch.context_lens, batch.cu_seqlens_q, max_query_len)
