"""Names of prefixes: a chained, keyed hash of every token up to the end of a block. And which prefixes there are.

The key is secret, so that nobody outside can make two prefixes collide: only equal ones share blocks. Two prefixes are
equal if their salts, their tokens and, as far as these lie in the prefix, their requests' extra keys are.
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
# Begin and end of a range of tokens, bytes of the key that follows.
_RANGE: Final = Struct("<III")


class PrefixHasher:
    """hash_key: secret, at most 64 bytes. block_size: tokens per link of the chain.

    Sequences share prefixes if their salts are equal; with `is_shared` false each has a salt of its own.
    """

    def __init__(self, hash_key: bytes, block_size: int, *, is_shared: bool = True) -> None:
        self._hash_key = hash_key
        self._block_size = block_size
        # Of sequences before this process, some may be on disk.
        self._own_root = b"" if is_shared else secrets.token_bytes(HASH_BYTES)
        self._is_shared = is_shared

    def of(self, seq: TokenSequence, num_tokens: int) -> bytes:
        """Hash of the first `num_tokens` tokens, a multiple of the block size; of none it is the root of its salt."""
        size = self._block_size
        for index in range(len(seq.block_hashes), num_tokens // size):
            parent = seq.block_hashes[-1] if seq.block_hashes else self.root(seq)
            tokens = array("i", seq.token_ids[index * size : (index + 1) * size]).tobytes()
            digest = hashlib.blake2b(key=self._hash_key, digest_size=HASH_BYTES)
            digest.update(len(parent).to_bytes(4, "little") + parent + tokens)
            # What follows the tokens, whose number is known, can be nothing else.
            digest.update(encoded_extra_keys(seq, index * size, (index + 1) * size))
            seq.block_hashes.append(digest.digest())
        return seq.block_hashes[num_tokens // size - 1] if num_tokens else self.root(seq)

    def root(self, seq: TokenSequence) -> bytes:
        if self._is_shared:
            return (seq.request.options.cache_salt or "").encode()
        return self._own_root + f"{seq.arrival} {seq.choice_index}".encode()


def encoded_extra_keys(seq: TokenSequence, start: int, end: int) -> bytes:
    """The request's extra keys that the block of tokens [start, end) overlaps, sorted; mostly none.

    Each range is encoded with its start, even if that is before the block, so that two adjacent ranges differ from one
    long range. Its end is cut off at the block's end, because an adapter's range grows with the sequence. A range that
    ends right where the block begins is included: the block before could not tell it from a longer one.
    """
    if not seq.request.extra_keys:
        return b""
    found = {
        (first, min(last, end), key) for first, last, key in seq.request.extra_keys if first < end and last >= start
    }
    return b"".join(_RANGE.pack(first, last, len(key)) + key for first, last, key in sorted(found))


class PrefixTree:
    """The tokens of every cached block below the prefix that it continues, to say where a prompt left the others.

    Only blocks of equal extra keys are compared: what is said of a prompt never depends on somebody else's image.
    extra_keys: encoded_extra_keys of the block.
    """

    def __init__(self) -> None:
        # Blocks as bytes, sorted as their tokens are: the closest to a text stand next to its place among them.
        self._children: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._place_of: dict[bytes, tuple[tuple[bytes, bytes], bytes]] = {}

    def add(self, parent: bytes, block_hash: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> None:
        """Note a block; one that is known already is left as it is."""
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
        """How many of token_ids the best block below `parent` begins with, and its first other token, if it has one."""
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
    """Bytes that compare as the tokens do, which are not negative."""
    packed = array("i", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
