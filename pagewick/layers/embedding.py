"""The token embedding and the vocabulary head, whose rows are divided among the ranks; small tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.linear import Linear, WeightLayer, row_share
from pagewick.parallel.collectives import Collectives
from pagewick.parallel.sharding import shard_bounds, shard_sizes
from pagewick.quantization.share import Part, Range, Share
from pagewick.quantization.weight import Weight


class DividedTable(WeightLayer):
    """Numbers of rows [T] -> [T, hidden_size]; each rank looks up those in its range, and the results are added."""

    def __init__(self, context: LayerContext, weight: Weight, rows: Range) -> None:
        """rows: those of this rank."""
        super().__init__(weight)
        self._collectives = context.collectives
        self._start, self._stop = rows

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._collectives.tp_size == 1:
            return self.weight.take(token_ids)
        is_mine = (token_ids >= self._start) & (token_ids < self._stop)
        embedded = self.weight.take((token_ids - self._start) * is_mine)
        return self._collectives.all_reduce(embedded * is_mine.unsqueeze(-1))


class VocabParallelEmbedding(DividedTable):
    """A DividedTable with a row for each token id.

    is_head: whether it is the vocabulary head as well (tied weights). has_head_bias: whether that head has a bias.
    num_stored: rows of the checkpoint's table, if they are fewer than vocab_size: all further ids have its first row.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        vocab_size: int,
        hidden_size: int,
        *,
        is_head: bool = False,
        num_stored: int | None = None,
        has_head_bias: bool = False,
    ) -> None:
        share = row_share(context, vocab_size, hidden_size)
        ((start, stop),) = share.parts[0].ranges
        if num_stored is not None and num_stored < vocab_size:
            stored = [(start, min(stop, num_stored))] if start < num_stored else []
            further = [(0, 1)] * (stop - max(start, num_stored))
            share = Share((Part(None, num_stored, (*stored, *further)),), hidden_size, (0, hidden_size))
        super().__init__(context, context.make_weight(prefix, share, is_multiplied=is_head), (start, stop))
        self._vocab_size = vocab_size
        self.bias = self.make_vector(context.dtype, context.device) if has_head_bias else None

    def logits(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """Compute the logits of a tied head: [N, hidden_size] -> [N, vocab_size] in float32."""
        shard = self.weight.linear(hidden_states, self.bias, out_dtype=torch.float32)
        return gather_vocab(shard, self._vocab_size, self._collectives)


class ShardedEmbedding(DividedTable):
    """A table that the file has in several parts, one above the other.

    prefix: the checkpoint name of the module that holds the parts. shards: name of a part -> rows.
    """

    def __init__(self, context: LayerContext, prefix: str, shards: Mapping[str, int], hidden_size: int) -> None:
        num_rows = sum(shards.values())
        start, stop = shard_bounds(num_rows, context.tp_rank, context.tp_size)
        parts, begin = [], 0
        for name, size in shards.items():
            first, last = max(start - begin, 0), min(stop - begin, size)
            parts.append(Part(name, size, ((first, last),) if first < last else ()))
            begin += size
        share = Share(tuple(parts), hidden_size, (0, hidden_size))
        super().__init__(context, context.make_weight(prefix, share, is_multiplied=False), (start, stop))


class WholeEmbedding(WeightLayer):
    """A learned table that every rank holds whole, as of positions: numbers of rows [T] -> [T, hidden_size].

    first_row: the rows before it are not kept, and it is number 0.
    """

    def __init__(
        self, context: LayerContext, prefix: str, num_rows: int, hidden_size: int, *, first_row: int = 0
    ) -> None:
        share = Share((Part(None, num_rows, ((first_row, num_rows),)),), hidden_size, (0, hidden_size))
        super().__init__(context.make_weight(prefix, share, is_multiplied=False))

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight.take(rows)


class VocabParallelHead(Linear):
    """A vocabulary head with a weight of its own: [N, hidden_size] -> [N, vocab_size]."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, vocab_size: int, *, bias: bool = False
    ) -> None:
        super().__init__(context, prefix, row_share(context, vocab_size, hidden_size), bias=bias)
        self._vocab_size = vocab_size

    def logits(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """Compute logits: [N, hidden_size] -> [N, vocab_size] in float32."""
        shard = self.weight.linear(hidden_states, self.bias, out_dtype=torch.float32)
        return gather_vocab(shard, self._vocab_size, self._collectives)


def gather_vocab(shard: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """Return the logits of the whole vocabulary from the ranks' shares, which may differ in size by one."""
    return collectives.all_gather(shard, dim=-1, sizes=shard_sizes(vocab_size, collectives.tp_size))
