"""What a layer keeps of a sequence (KeptHeads, KeptLatents) and the blocks it takes (CacheSpec). Imports no torch.

A layer says what it keeps. An attention backend says which blocks that takes: their size, their layout and the numbers
in them. The block manager plans with the answer, in which the kinds of cache differ in one number, how many tokens
before the next one must still be there:

    full attention       all of them              lookback None
    sliding window w     the w - 1 before it      lookback w - 1
    running state        the state after the last lookback 1

A block of the first two kinds holds `block_size` consecutive tokens. A block of the third holds one state: a sequence
has the one that it goes on from. Where a step ends at a multiple of block_size tokens, its state is kept as a snapshot
from which other sequences can go on, and the next step writes to another block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

# Keys and values take whole multiples of so many elements: what the native library wants (kernels/kv_cache.py).
_NATIVE_DIM_UNIT: Final = 16
# A block that has scales is a multiple of so many bytes long, so that they can lie aligned in it.
_SCALE_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class KeptHeads:
    """Keys and values of every token for each of one rank's KV heads. window: tokens that each token sees, itself
    included; None is all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KeptLatents:
    """One latent of every token, of which keys and values of all heads are made, and the rotated key that they share.

    Every rank keeps them whole. Both sizes are in elements.
    """

    latent_dim: int
    rope_dim: int


Kept = KeptHeads | KeptLatents


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """How numbers are stored. num_scale_bytes: of the scales beside each token's vector of each head."""

    name: str
    element_bytes: int
    num_scale_bytes: int = 0


CACHE_DTYPES: Final = {
    dtype.name: dtype for dtype in (CacheDtype("float32", 4), CacheDtype("bfloat16", 2), CacheDtype("float16", 2))
}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Layers of equal spec form a cache group and share block tables.

    block_bytes: bytes that one layer of one rank needs per block, scales included.
    chunk_alignment: a chunk of a prompt, unless it is the last, must end at a multiple of so many tokens.
    prefix_reuse: "blocks": every complete block can serve another sequence; "snapshots": a block holds one state, and
        can serve another sequence if it is the state at a multiple of block_size tokens. Its lookback is 1.
    layout: names the layout inside a block, and changes whenever the same bytes come to mean something else.
    key_dtype, value_dtype: names of the CacheDtypes of keys and of values.
    """

    kind: str
    block_size: int
    block_bytes: int
    lookback: int | None = None
    chunk_alignment: int = 1
    prefix_reuse: Literal["blocks", "snapshots"] = "blocks"
    layout: str = ""
    key_dtype: str = ""
    value_dtype: str = ""

    @property
    def has_snapshots(self) -> bool:
        return self.prefix_reuse == "snapshots"

    def num_blocks(self, num_tokens: int) -> int:
        """Logical blocks that cover the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table_width(self, num_tokens: int) -> int:
        """Entries of the block table of a sequence of so many tokens."""
        return 2 if self.has_snapshots else self.num_blocks(num_tokens)

    def first_block(self, num_computed_tokens: int) -> int:
        """Index of the first logical block that token number `num_computed_tokens` (from 0) still looks at."""
        if self.lookback is None:
            return 0
        return max(0, num_computed_tokens - self.lookback) // self.block_size

    def completed_blocks(self, before: int, after: int) -> range:
        """Indices of the blocks that a step from `before` to `after` computed tokens leaves complete, for good."""
        if self.has_snapshots:
            last = after // self.block_size
            return range(last - 1, last) if after % self.block_size == 0 else range(0)
        return range(before // self.block_size, after // self.block_size)


def attention_spec(
    kept: Kept,
    block_size: int,
    key_dtype: CacheDtype,
    value_dtype: CacheDtype,
    *,
    layout: str,
    dim_unit: int = 1,
) -> CacheSpec:
    """The spec of blocks that hold nothing but what is kept and its scales, in any order.

    dim_unit: keys and values per head are padded to a multiple of so many elements. Latents are keys and values at
    once, and are stored as value_dtype says.
    """
    lookback = None
    if isinstance(kept, KeptLatents):
        kind = "latent"
        token_bytes = _vector_bytes(kept.latent_dim + kept.rope_dim, value_dtype)
        key_dtype = value_dtype
    else:
        kind = "full_attention" if kept.window is None else "sliding_window"
        lookback = None if kept.window is None else kept.window - 1
        padded_dim = -(-kept.head_dim // dim_unit) * dim_unit
        token_bytes = kept.num_kv_heads * sum(_vector_bytes(padded_dim, dtype) for dtype in (key_dtype, value_dtype))
    alignment = _SCALE_ALIGNMENT if key_dtype.num_scale_bytes or value_dtype.num_scale_bytes else 1
    return CacheSpec(
        kind=kind,
        block_size=block_size,
        block_bytes=-(-token_bytes * block_size // alignment) * alignment,
        lookback=lookback,
        layout=layout,
        key_dtype=key_dtype.name,
        value_dtype=value_dtype.name,
    )


def native_spec(kept: Kept, block_size: int, cache_dtype: str, *, layout: str = "") -> CacheSpec:
    """The spec of NativeBackend's blocks; cache_dtype: a name in CACHE_DTYPES.

    The layout depends on the native library, which takes torch to load; where it does not matter it stays empty.
    """
    dtype = CACHE_DTYPES[cache_dtype]
    return attention_spec(kept, block_size, dtype, dtype, layout=layout, dim_unit=_NATIVE_DIM_UNIT)


def _vector_bytes(dim: int, dtype: CacheDtype) -> int:
    return dim * dtype.element_bytes + dtype.num_scale_bytes
