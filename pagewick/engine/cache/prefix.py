"""PrefixHasher names prefixes by a chained, keyed hash of their tokens. PrefixTree knows which prefixes are cached.

The hash key is secret, so that no client can make two prefixes collide: only equal ones share blocks. Two prefixes are
equal if they have the same salt, the same tokens and, as far as these lie in the prefix, the same extra keys.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from struct import Struct
from typing import Final

from pagewick.engine.sequence import Sequence as TokenSequence

HASH_BYTES = 16
# Start and end of a range of tokens, and the number of bytes of the key that follows.
_RANGE: Final = Struct("<III")


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
        self._children: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._place_of: dict[bytes, tuple[tuple[bytes, bytes], bytes]] = {}

    def add(self, parent: bytes, block_hash: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> None:
        """Add a block, unless it is known already."""
        if block_hash not in self._place_of:
            block = _sortable(token_ids)
            place = (parent, extra_keys)
            insort(self._children.setdefault(place, []), block)
            self._place_of[block_hash] = (place, block)

    def remove(self, block_hash: bytes) -> None:
        if block_hash not in self._place_of:
            return
        place, block = self._place_of.pop(block_hash)
        siblings = self._children[place]
        del siblings[bisect_left(siblings, block)]
        if not siblings:
            del self._children[place]

    def closest(self, parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> tuple[int, int | None]:
        """Find the block below `parent` with the longest common start; return its length and the block's next token."""
        siblings = self._children.get((parent, extra_keys), [])
        place = bisect_left(siblings, _sortable(token_ids))
        best: tuple[int, int | None] = (0, None)
        for block in siblings[max(0, place - 1) : place + 2]:
            cached = array("i", block)
            if sys.byteorder == "little":
                cached.byteswap()
            num_common = 0
            while num_common < min(len(cached), len(token_ids)) and cached[num_common] == token_ids[num_common]:
                num_common += 1
            if num_common < len(cached) and (num_common > best[0] or best[1] is None):
                best = (num_common, cached[num_common])
        return best


def _sortable(token_ids: Sequence[int]) -> bytes:
    """Return bytes that sort like the tokens, none of which is negative."""
    packed = array("i", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
