"""BlockChoice: an argument of select_blocks. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """How many blocks a token sees; see select_blocks.

    size: tokens of a block. top_k: blocks in all. num_local: the last of them that every token sees, from 1 to top_k.
    """

    size: int
    top_k: int
    num_local: int
