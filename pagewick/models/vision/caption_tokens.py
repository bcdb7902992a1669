"""The tokens of an image in a model that writes captions. The API counts them, too; imports nothing."""

from __future__ import annotations

from typing import Final

# The usual size of a block of the cache. Whole blocks of an image serve later requests, whatever text follows, so that
# these need no encoder. Blocks of another size are right, too.
_UNIT: Final = 32


def image_tokens(num_rows: int) -> int:
    """Return the number of tokens of an image whose encoder makes num_rows rows: as many, and some that none sees."""
    return -(-num_rows // _UNIT) * _UNIT
