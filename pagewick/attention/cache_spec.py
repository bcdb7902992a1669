"""CacheSpec: the blocks of the KV cache that a layer needs. Kept: the contents of a layer's blocks. Imports no torch.

A layer says what it keeps of a sequence. An attention backend says how it stores that in blocks: their size, their
layout and their dtypes. For the block manager, the kinds of cache differ only in the lookback: how many tokens before
the next token must still be in the cache.

    full attention       all of them              lookback None
    sliding window w     the w - 1 before it      lookback w - 1
    chunks of w          those of its chunk       lookback w - 1 at most
    running state        the state after the last lookback 1

With attention, a block holds `block_size` consecutive tokens. With a running state, a block holds one state, and a
sequence has one such block, from which it continues. After a step that ends at a multiple of block_size tokens, the
block is kept as a snapshot, from which other sequences can continue, and the next step writes to another block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from pagewick.errors import ConfigError

# The native library pads keys and values to a multiple of this number of elements (kernels/kv_cache.py).
_NATIVE_DIM_UNIT: Final = 16
# The size of a block with scales is a multiple of this number of bytes, so that the scales can be aligned.
_SCALE_ALIGNMENT: Final = 16
_LEAST_ROTATION: Final = 8
_STATE_ALIGNMENT: Final = 64
# Bytes of a state for each token between two snapshots, and the limits of this distance in tokens.
_SNAPSHOT_UNIT: Final = 4096
_LEAST_DISTANCE: Final = 32
_MOST_DISTANCE: Final = 1024


@dataclass(frozen=True, slots=True)
class KeptHeads:
    """A key and a value of every token, for each KV head of one rank.

    window: number of tokens that each token sees, itself included; None: all. is_chunked: the window is a chunk, which
    begins at the last multiple of its size. is_selective: each token sees a selection of the others.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    is_chunked: bool = False
    is_selective: bool = False


@dataclass(frozen=True, slots=True)
class KeptLatents:
    """A latent of every token, from which all heads compute keys and values, and the rotated key that they share.

    Every rank keeps both for all heads. Sizes are in elements. is_selective: each token sees a selection of the others.
    """

    latent_dim: int
    rope_dim: int
    is_selective: bool = False


@dataclass(frozen=True, slots=True)
class KeptIndexKeys:
    """A key of every token, by which others select it. Every rank keeps it. dim: its elements."""

    dim: int


@dataclass(frozen=True, slots=True)
class KeptRows:
    """A row of `dim` numbers for every `ratio` tokens. Every rank keeps it.

    It is a key that is its own value, an index key, or that from which these are compressed. lookback: how many tokens
    before the next one must still be there; None: all. A block covers a number of tokens that is a multiple of ratio.
    """

    dim: int
    lookback: int | None = None
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class KeptState:
    """One state of a sequence, however long it is. num_bytes: of a layer of one rank."""

    num_bytes: int


Kept = KeptHeads | KeptLatents | KeptIndexKeys | KeptRows


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """A dtype of the cache. num_scale_bytes: bytes of scales that are stored with each vector of a token and head."""

    name: str
    element_bits: int
    num_scale_bytes: int = 0

    def vector_bytes(self, dim: int) -> int:
        """Return the bytes of a vector of `dim` elements, an even number if they have 4 bits, and its scales."""
        return dim * self.element_bits // 8 + self.num_scale_bytes


CACHE_DTYPES: Final = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("float32", 32),
        CacheDtype("bfloat16", 16),
        CacheDtype("float16", 16),
        CacheDtype("int8", 8, num_scale_bytes=4),
        CacheDtype("fp8_e4m3", 8, num_scale_bytes=4),
        CacheDtype("fp8_e5m2", 8, num_scale_bytes=4),
        CacheDtype("int4", 4, num_scale_bytes=4),
    )
}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The blocks of a layer. Layers of equal spec form a cache group and share block tables.

    block_bytes: bytes that one layer of one rank needs per block, scales included.
    is_chunked: the lookback ends at the last multiple of lookback + 1 tokens.
    chunk_alignment: a chunk of a prompt, unless it is the last, must end at a multiple of this number of tokens.
    prefix_reuse: "blocks": every complete block can serve another sequence; "snapshots": a block holds one state, and
        can serve another sequence if it is the state at a multiple of block_size tokens. The lookback is 1.
    layout: name of the layout inside a block; another name whenever the meaning of the bytes changes.
    key_dtype, value_dtype: names of the CacheDtypes of keys and of values.
    """

    kind: str
    block_size: int
    block_bytes: int
    lookback: int | None = None
    is_chunked: bool = False
    chunk_alignment: int = 1
    prefix_reuse: Literal["blocks", "snapshots"] = "blocks"
    layout: str = ""
    key_dtype: str = ""
    value_dtype: str = ""

    @property
    def has_snapshots(self) -> bool:
        return self.prefix_reuse == "snapshots"

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of logical blocks that cover the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table_width(self, num_tokens: int) -> int:
        """Return the number of columns of the block tables of a batch (GroupBatch) with `num_tokens` tokens of each."""
        return 3 if self.has_snapshots else self.num_blocks(num_tokens)

    def first_block(self, num_computed_tokens: int) -> int:
        """Return the index of the first logical block that token number `num_computed_tokens` (from 0) reads."""
        if self.lookback is None:
            return 0
        if self.is_chunked:
            return (num_computed_tokens - num_computed_tokens % (self.lookback + 1)) // self.block_size
        return max(0, num_computed_tokens - self.lookback) // self.block_size

    def completed_blocks(self, before: int, after: int) -> range:
        """Return the indices of the blocks that a step from `before` to `after` computed tokens completes."""
        if self.has_snapshots:
            last = after // self.block_size
            return range(last - 1, last) if after % self.block_size == 0 else range(0)
        return range(before // self.block_size, after // self.block_size)


def attention_spec(
    kept: Kept, block_size: int, key_dtype: CacheDtype, value_dtype: CacheDtype, *, layout: str, dim_unit: int = 1
) -> CacheSpec:
    """Return the spec of blocks that hold only the kept vectors and their scales, in any order.

    dim_unit: the key and the value of a head are padded to a multiple of this number of elements. Latents serve as
    keys and as values, and are stored in value_dtype; a latent and the rotated key beside it are vectors of their own.
    So are index keys and other rows. Where these are one for several tokens, block_size is rounded up to a multiple.
    """
    kind, lookback, is_chunked = "full_attention", None, False
    if isinstance(kept, KeptIndexKeys):
        kind, key_dtype = "index_keys", value_dtype
        token_bytes = value_dtype.vector_bytes(kept.dim)
    elif isinstance(kept, KeptRows):
        kind, lookback, key_dtype = f"rows of {kept.ratio}", kept.lookback, value_dtype
        block_size = math.lcm(block_size, kept.ratio)
        return CacheSpec(
            kind=kind,
            block_size=block_size,
            block_bytes=block_size // kept.ratio * value_dtype.vector_bytes(kept.dim),
            lookback=lookback,
            layout=layout,
            key_dtype=key_dtype.name,
            value_dtype=value_dtype.name,
        )
    elif isinstance(kept, KeptLatents):
        kind, key_dtype = "latent", value_dtype
        token_bytes = value_dtype.vector_bytes(kept.latent_dim) + value_dtype.vector_bytes(kept.rope_dim)
    else:
        if kept.window is not None:
            kind, lookback = "chunked_attention" if kept.is_chunked else "sliding_window", kept.window - 1
        is_chunked = kept.is_chunked
        padded_dim = -(-kept.head_dim // dim_unit) * dim_unit
        token_bytes = kept.num_kv_heads * (key_dtype.vector_bytes(padded_dim) + value_dtype.vector_bytes(padded_dim))
    alignment = _SCALE_ALIGNMENT if key_dtype.num_scale_bytes or value_dtype.num_scale_bytes else 1
    return CacheSpec(
        kind=kind,
        block_size=block_size,
        block_bytes=-(-token_bytes * block_size // alignment) * alignment,
        lookback=lookback,
        is_chunked=is_chunked,
        layout=layout,
        key_dtype=key_dtype.name,
        value_dtype=value_dtype.name,
    )


def state_spec(kept: KeptState, *, layout: str = "") -> CacheSpec:
    """Return the spec of blocks that hold one state each. layout: as in CacheSpec.

    Snapshots lie so far apart that a layer's take about as much memory as the keys and values of a layer with attention
    whose tokens take _SNAPSHOT_UNIT bytes each.
    """
    distance = 1 << max(1, kept.num_bytes // _SNAPSHOT_UNIT).bit_length() - 1
    return CacheSpec(
        kind="running_state",
        block_size=min(max(distance, _LEAST_DISTANCE), _MOST_DISTANCE),
        block_bytes=-(-kept.num_bytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT,
        lookback=1,
        prefix_reuse="snapshots",
        layout=layout,
    )


def can_keep(kept: Kept, cache_dtype: str) -> bool:
    """Whether NativeBackend keeps this in a dtype: no numbers with scales where tokens see a selection, or as rows.

    Kernels read selected tokens as blocks of one token, which have no room for scales. Numbers of 4 bits are for heads
    of a multiple of 8 elements, which Hadamard matrices of that size can rotate.
    """
    is_selective = isinstance(kept, KeptIndexKeys | KeptRows) or kept.is_selective
    if is_selective and CACHE_DTYPES[cache_dtype].num_scale_bytes:
        return False
    return cache_dtype != "int4" or (isinstance(kept, KeptHeads) and kept.head_dim % _LEAST_ROTATION == 0)


def native_spec(kept: Kept, block_size: int, cache_dtype: str, *, layout: str = "") -> CacheSpec:
    """Return the spec of NativeBackend's blocks. cache_dtype: a name in CACHE_DTYPES.

    layout depends on the native library, which needs torch; callers that do not compare layouts leave it empty.
    Raises ConfigError for a dtype that cannot be kept.
    """
    dtype = CACHE_DTYPES[cache_dtype]
    if not can_keep(kept, cache_dtype):
        selects = isinstance(kept, KeptIndexKeys | KeptRows) or kept.is_selective
        part, others = "sparse attention", "bfloat16, float16 or float32"
        if not selects:
            part = f"heads of {kept.head_dim}" if isinstance(kept, KeptHeads) else "latent attention"
            others = f"int8 or {others}"
        raise ConfigError(
            f"--kv-cache-dtype {cache_dtype} does not go with the {part} of this model; "
            f"give {others}, or leave the flag out"
        )
    return attention_spec(kept, block_size, dtype, dtype, layout=layout, dim_unit=_NATIVE_DIM_UNIT)
