"""PrefixHasher names prefixes by a chained, keyed hash of their tokens. PrefixTree knows which prefixes are cached.

The hash key is secret, so that no client can make two prefixes collide: only equal ones share blocks. Two prefixes are
equal if they have the same salt, the same tokens and, as far as these lie in the prefix, the same extra keys.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from struct import Struct
from typing import Final

from pagewick.engine.sequence import Sequence as TokenSequence

HASH_BYTES = 16
# Start and end of a range of tokens, and the number of bytes of the key that follows.
_RANGE: Final = Struct("<III")
# Blocks with the same prefix are kept in lists of at most this length.
_MAX_CHUNK: Final = 1024


class PrefixHasher:
    """hash_key: secret, at most 64 bytes. block_size: tokens per link of the chain.

    Sequences share prefixes if their salts are equal. With `is_shared` false each has a salt of its own.
    """

    def __init__(self, hash_key: bytes, block_size: int, *, is_shared: bool = True) -> None:
        self._hash_key = hash_key
        self._block_size = block_size
        # Blocks from before this process may be on disk, so arrival numbers alone would not be unique.
        self._own_root = b"" if is_shared else secrets.token_bytes(HASH_BYTES)
        self._is_shared = is_shared

    def of(self, seq: TokenSequence, num_tokens: int) -> bytes:
        """Return the hash of the first `num_tokens` tokens, a multiple of the block size; for 0 that of its salt."""
        size = self._block_size
        for index in range(len(seq.block_hashes), num_tokens // size):
            parent = seq.block_hashes[-1] if seq.block_hashes else self.root(seq)
            tokens = array("i", seq.token_ids[index * size : (index + 1) * size]).tobytes()
            digest = hashlib.blake2b(key=self._hash_key, digest_size=HASH_BYTES)
            digest.update(len(parent).to_bytes(4, "little") + parent + tokens)
            # The number of tokens is fixed, so the bytes after them cannot be mistaken for tokens.
            digest.update(encoded_extra_keys(seq, index * size, (index + 1) * size))
            seq.block_hashes.append(digest.digest())
        return seq.block_hashes[num_tokens // size - 1] if num_tokens else self.root(seq)

    def root(self, seq: TokenSequence) -> bytes:
        if self._is_shared:
            return (seq.request.options.cache_salt or "").encode()
        return self._own_root + f"{seq.arrival} {seq.choice_index}".encode()


def encoded_extra_keys(seq: TokenSequence, start: int, end: int) -> bytes:
    """Encode the request's extra keys that the block of tokens [start, end) overlaps, sorted; mostly none.

    Each range is encoded with its start, even if that is before the block, so that two adjacent ranges differ from one
    long range. Its end is cut off at the block's end, because an adapter's range grows with the sequence. A range that
    ends where the block begins is included, because the block before does not distinguish it from a longer one.
    """
    if not seq.request.extra_keys:
        return b""
    found = {
        (first, min(last, end), key) for first, last, key in seq.request.extra_keys if first < end and last >= start
    }
    return b"".join(_RANGE.pack(first, last, len(key)) + key for first, last, key in sorted(found))


class PrefixTree:
    """The tokens of every cached block, by the prefix that it continues, to find where a prompt differs from them.

    Only blocks of equal extra keys are compared, so that a PrefixMiss never depends on another user's image.
    extra_keys: encoded_extra_keys of the block.
    """

    def __init__(self) -> None:
        # Blocks as bytes, sorted like their tokens: the closest ones to a block are its neighbours in this order.
        self._children: dict[tuple[bytes, bytes], _SortedBlocks] = {}
        self._place_of: dict[bytes, tuple[tuple[bytes, bytes], bytes]] = {}

    def add(self, parent: bytes, block_hash: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> None:
        """Add a block, unless it is known already."""
        if block_hash not in self._place_of:
            block = _sortable(token_ids)
            place = (parent, extra_keys)
            if place in self._children:
                self._children[place].add(block)
            else:
                self._children[place] = _SortedBlocks(block)
            self._place_of[block_hash] = (place, block)

    def remove(self, block_hash: bytes) -> None:
        if block_hash not in self._place_of:
            return
        place, block = self._place_of.pop(block_hash)
        siblings = self._children[place]
        siblings.remove(block)
        if siblings.is_empty:
            del self._children[place]

    def closest(self, parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> tuple[int, int | None]:
        """Find the block below `parent` with the longest common start; return its length and the block's next token."""
        siblings = self._children.get((parent, extra_keys))
        best: tuple[int, int | None] = (0, None)
        for block in siblings.around(_sortable(token_ids)) if siblings is not None else ():
            cached = array("i", block)
            if sys.byteorder == "little":
                cached.byteswap()
            num_common = 0
            while num_common < min(len(cached), len(token_ids)) and cached[num_common] == token_ids[num_common]:
                num_common += 1
            if num_common < len(cached) and (num_common > best[0] or best[1] is None):
                best = (num_common, cached[num_common])
        return best


class _SortedBlocks:
    """Blocks in order, in chunks of limited length, so that adding one among a million moves only a few of them."""

    __slots__ = ("_chunks", "_firsts")

    def __init__(self, block: bytes) -> None:
        self._chunks = [[block]]
        # Lower bounds of the chunks: a chunk's blocks are not below its own and not above the next one's.
        self._firsts = [b""]

    @property
    def is_empty(self) -> bool:
        return not self._chunks[0]

    def add(self, block: bytes) -> None:
        index = bisect_right(self._firsts, block) - 1
        chunk = self._chunks[index]
        insort(chunk, block)
        if len(chunk) > _MAX_CHUNK:
            self._chunks[index : index + 1] = [chunk[: _MAX_CHUNK // 2], chunk[_MAX_CHUNK // 2 :]]
            self._firsts.insert(index + 1, chunk[_MAX_CHUNK // 2])

    def remove(self, block: bytes) -> None:
        index = bisect_right(self._firsts, block) - 1
        chunk = self._chunks[index]
        del chunk[bisect_right(chunk, block) - 1]
        if not chunk and len(self._chunks) > 1:
            del self._chunks[index], self._firsts[index]
            self._firsts[0] = b""

    def around(self, block: bytes) -> list[bytes]:
        """Return the block before the place of `block` and the two after it, as far as there are any."""
        index = bisect_left(self._firsts, block, lo=1) - 1
        chunk = self._chunks[index]
        place = bisect_left(chunk, block)
        before = chunk[place - 1 : place] if place else self._chunks[index - 1][-1:] if index else []
        after = chunk[place : place + 2]
        for following in self._chunks[index + 1 : index + 3]:
            after += following[: 2 - len(after)]
        return [*before, *after]


def _sortable(token_ids: Sequence[int]) -> bytes:
    """Return bytes that sort like the tokens, none of which is negative."""
    packed = array("i", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
