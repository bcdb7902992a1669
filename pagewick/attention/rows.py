"""Rows of a cache: keys of a window that are their own values, compressed entries, and what these are made from."""

from __future__ import annotations

from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch, BoundRows
from pagewick.attention.metadata import metadata_of
from pagewick.kernels.options import (
    CompressOptions,
    Entries,
    Rotation,
    ScoreOptions,
    SelectedKeys,
)


class NativeRows:
    """BoundRows over cache [num_blocks, rows of a block, D], which has a row for every `ratio` tokens."""

    def __init__(self, cache: Tensor, group: int, ratio: int) -> None:
        self.cache, self.group, self.ratio = cache, group, ratio

    def store(self, rows: Tensor, batch: AttentionBatch, rotation: Rotation) -> None:
        kernels.store_index_keys(rows, self.cache, batch.groups[self.group].slot_mapping, rotation=rotation)

    def compress(
        self, rows: Tensor, batch: AttentionBatch, entries: BoundRows, rotation: Rotation, options: CompressOptions
    ) -> None:
        assert isinstance(entries, NativeRows), "one backend binds both"
        group = batch.groups[self.group]
        kernels.compress_rows(
            rows,
            self.cache,
            group.slot_mapping,
            metadata_of(group, batch, len(rows)),
            entries.cache,
            batch.groups[entries.group].slot_mapping,
            rotation=rotation,
            options=options,
        )

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        batch: AttentionBatch,
        entries: BoundRows | None,
        *,
        rotation: Rotation,
        top_k: int,
    ) -> SelectedKeys:
        assert entries is None or isinstance(entries, NativeRows), "one backend binds both"
        tables = None if entries is None else batch.groups[entries.group].block_tables
        metadata = metadata_of(batch.groups[self.group], batch, len(q))
        return kernels.select_keys(
            q, weights, self.cache, metadata, tables, rotation=rotation, top_k=top_k, ratio=self.ratio
        )

    def attend(
        self,
        q: Tensor,
        batch: AttentionBatch,
        scores: ScoreOptions,
        entries: BoundRows | None = None,
        selected: SelectedKeys | None = None,
    ) -> Tensor:
        seen: Entries | None = None
        if entries is not None:
            assert isinstance(entries, NativeRows), "one backend binds both"
            tables = batch.groups[entries.group].block_tables
            seen = Entries(entries.cache, tables, entries.ratio, selected)
        metadata = metadata_of(batch.groups[self.group], batch, len(q))
        return kernels.window_attention(q, self.cache, metadata, scores, seen)
