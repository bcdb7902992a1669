"""Rows of a cache: keys of a window that are their own values, compressed entries, and what these are made from."""

from __future__ import annotations

import torch
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
from pagewick.kernels.reference_compressed import token_sequences


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
        entries: BoundRows,
        *,
        rotation: Rotation,
        top_k: int,
    ) -> SelectedKeys:
        assert isinstance(entries, NativeRows), "one backend binds both"
        tables = batch.groups[entries.group].block_tables
        return self._chosen(q, weights, batch, tables, rotation=rotation, top_k=top_k)

    def number(
        self, q: Tensor, weights: Tensor, batch: AttentionBatch, *, rotation: Rotation, top_k: int
    ) -> SelectedKeys:
        tables = batch.groups[self.group].block_tables
        # Looked up in blocks that follow each other, a row's place is its number.
        in_order = torch.arange(tables.shape[1], device=q.device, dtype=torch.int32).repeat(len(tables), 1)
        return self._chosen(q, weights, batch, in_order, rotation=rotation, top_k=top_k)

    def _chosen(
        self,
        q: Tensor,
        weights: Tensor,
        batch: AttentionBatch,
        tables: Tensor,
        *,
        rotation: Rotation,
        top_k: int,
    ) -> SelectedKeys:
        """Choose rows of these, and look them up in blocks of as many rows: tables [B, max_blocks]."""
        metadata = metadata_of(batch.groups[self.group], batch, len(q))
        if q.is_cpu:
            return kernels.select_entries(
                q, weights, self.cache, metadata, tables, ratio=self.ratio, rotation=rotation, top_k=top_k
            )
        # Elsewhere only select_keys has a kernel. A token that sees no entry gets one here, which is taken away again.
        alone, sequence, counts = token_sequences(metadata, len(q), self.ratio)
        selected = kernels.select_keys(q, weights, self.cache, alone, tables[sequence], rotation=rotation, top_k=top_k)
        return selected._replace(counts=selected.counts.minimum(counts))

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
