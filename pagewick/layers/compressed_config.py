"""The numbers in config.json that describe attention to a window and to compressed entries. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.attention.cache_spec import KeptRows
from pagewick.layers.config import IndexerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorConfig:
    """How the tokens of a window become one entry (DeepSeek V4; kernels/reference_compressed.py).

    ratio: tokens of a window. overlaps: those of the window before count, too. indexer: selects the entries that a
    token sees, by keys that are compressed likewise; None: it sees all. Its rotation is that of attention.
    """

    ratio: int
    overlaps: bool
    indexer: IndexerConfig | None = None

    @property
    def num_kinds(self) -> int:
        """Kinds of values, and of gates, that a token has."""
        return 2 if self.overlaps else 1

    def row_size(self, dim: int) -> int:
        """Return the numbers of a token from which entries of `dim` numbers are made."""
        return 2 * self.num_kinds * dim

    def kept(self, dim: int) -> tuple[KeptRows, KeptRows]:
        """Return what is kept of tokens, and of entries of `dim` numbers."""
        lookback = self.num_kinds * self.ratio - 1
        return KeptRows(self.row_size(dim), lookback), KeptRows(dim, ratio=self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """Attention of `num_heads` query heads to one key for all, which is its own value, in a window.

    window: tokens that each token sees, itself included. rope_dim: numbers at the end of a head that rotate.
    q_lora_rank: rank of the query projection's two factors. num_groups, group_rank: heads are divided into groups, of
    which each is projected to group_rank numbers, from which the output is made. norm_eps: of all norms. compressor:
    None: tokens before the window are not seen.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    window: int
    q_lora_rank: int
    num_groups: int
    group_rank: int
    softmax_scale: float
    norm_eps: float
    compressor: CompressorConfig | None = None

    @property
    def group_width(self) -> int:
        """Numbers of the heads of a group."""
        return self.num_heads // self.num_groups * self.head_dim

    @property
    def indexer(self) -> IndexerConfig | None:
        return None if self.compressor is None else self.compressor.indexer

    def kept(self) -> tuple[KeptRows, ...]:
        """Return all that such a layer keeps of a sequence."""
        found = [KeptRows(self.head_dim, self.window - 1)]
        if self.compressor is not None:
            found += self.compressor.kept(self.head_dim)
            if self.compressor.indexer is not None:
                found += self.compressor.kept(self.compressor.indexer.head_dim)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexConfig:
    """How attention selects the blocks of `ratio` tokens that each token sees (Qwen4-Exp).

    A block's key is the mean of its tokens' index keys, normalised, and rotated by the position of the first.
    num_heads, head_dim: of the index. top_k: blocks that are selected. norm_eps: of its norms.
    """

    num_heads: int
    head_dim: int
    top_k: int
    ratio: int
    norm_eps: float

    @property
    def num_rows(self) -> int:
        """Rows of the projection that makes queries and the key."""
        return (self.num_heads + 1) * self.head_dim

    def kept(self) -> tuple[KeptRows, KeptRows]:
        """Return what is kept of tokens whose block is not complete, and of blocks."""
        return CompressorConfig(ratio=self.ratio, overlaps=False).kept(self.head_dim)
