"""CacheSpec: what one layer keeps of a sequence, in terms the block manager can plan with. Imports no torch.

Three kinds of cache differ, for the engine, in one number: how many tokens before the next one must still be there.

    full attention       all of them              lookback None
    sliding window w     the w - 1 before it      lookback w - 1
    recurrent state      the state after the last lookback 1: the block that holds it

A block covers `block_size` consecutive tokens of a sequence. A recurrent layer writes its running state into the block
of its last token; when that block is complete, it holds a snapshot at a block boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Keys and values take whole multiples of so many elements: what the native library wants (kernels/kv_cache.py).
_DIM_UNIT = 16


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Layers of equal spec form a cache group and share block tables.

    block_bytes: bytes that one layer of one rank needs per block; the layout inside is its backend's.
    chunk_alignment: a chunk of a prompt, unless it is the last, must end at a multiple of so many tokens.
    prefix_reuse: "blocks": every complete block can serve another sequence; "snapshots": only one at whose end a
        step ended, because in the others nothing was written.
    """

    kind: str
    block_size: int
    block_bytes: int
    lookback: int | None = None
    chunk_alignment: int = 1
    prefix_reuse: Literal["blocks", "snapshots"] = "blocks"

    def windowed(self, window: int | None) -> CacheSpec:
        """The same for attention that sees `window` tokens, the new one included; None is all."""
        return self if window is None else replace(self, kind="sliding_window", lookback=window - 1)

    def num_blocks(self, num_tokens: int) -> int:
        """Logical blocks that cover the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def first_block(self, num_computed_tokens: int) -> int:
        """Index of the first logical block that token number `num_computed_tokens` (from 0) still looks at."""
        if self.lookback is None:
            return 0
        return max(0, num_computed_tokens - self.lookback) // self.block_size

    def completed_blocks(self, before: int, after: int) -> range:
        """Indices of the blocks that a step from `before` to `after` computed tokens leaves complete, for good."""
        if self.prefix_reuse == "snapshots":
            last = after // self.block_size
            return range(last - 1, last) if after % self.block_size == 0 else range(0)
        return range(before // self.block_size, after // self.block_size)


def full_attention_spec(num_kv_heads: int, head_dim: int, block_size: int, element_bytes: int) -> CacheSpec:
    """Keys and values of every token: 2 * num_kv_heads * head_dim elements each, the last rounded up to 16."""
    padded_head_dim = -(-head_dim // _DIM_UNIT) * _DIM_UNIT
    block_bytes = 2 * num_kv_heads * padded_head_dim * block_size * element_bytes
    return CacheSpec(kind="full_attention", block_size=block_size, block_bytes=block_bytes)


def latent_spec(kv_lora_rank: int, rope_dim: int, block_size: int, element_bytes: int) -> CacheSpec:
    """One latent of every token in place of keys and values per head: the same, and whole, on every rank.

    kv_lora_rank: elements of what keys and values are computed from. rope_dim: of the rotated key that all heads share.
    """
    block_bytes = (kv_lora_rank + rope_dim) * block_size * element_bytes
    return CacheSpec(kind="latent", block_size=block_size, block_bytes=block_bytes)
