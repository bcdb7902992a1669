"""Checks the compiled rules of Unicode normalisation in SentencePiece models.

The library that applies these rules trusts every number in them, and aborts the process if one points out of the table.
Layout: the size of a table in bytes, the table (a double-array trie over UTF-8), then the replacements, each ended by
a zero byte. Sources: google/sentencepiece, src/normalizer.cc (the layout); s-yata/darts-clone, include/darts.h (the
units of the table: `offset`, `has_leaf`, `value`).
"""

from __future__ import annotations

import struct

_LEAF = 1 << 31


def find_damage(charsmap: bytes) -> str:
    """Return a description of what is wrong with the rules; empty if they are safe for any text."""
    if len(charsmap) < 4:
        return "they have no table"
    (num_bytes,) = struct.unpack_from("<I", charsmap)
    replacements = charsmap[4 + num_bytes :]
    # From any unit, any byte leads on within a group of 256 units.
    if not num_bytes or num_bytes % 1024 or len(charsmap) < 4 + num_bytes:
        return f"they cannot have a table of {num_bytes} bytes"
    try:
        replacements.decode()
    except UnicodeDecodeError:
        return "the replacements are not UTF-8"
    units = struct.unpack_from(f"<{num_bytes // 4}I", charsmap, 4)
    for index, unit in enumerate(units):
        if unit & _LEAF:
            continue
        target = index ^ ((unit >> 10) << ((unit & 1 << 9) >> 6))
        if target >= len(units):
            return f"unit {index} leads out of the table"
        if unit & 1 << 8 and not _is_a_start(replacements, units[target] & ~_LEAF):
            return f"unit {index} leads to no replacement"
    return ""


def _is_a_start(replacements: bytes, place: int) -> bool:
    """Whether a UTF-8 character starts at this index."""
    return place < len(replacements) and replacements[place] & 0xC0 != 0x80
