"""The token embedding and the vocabulary head, their rows shared out over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.linear import Linear
from pagewick.parallel.collectives import Collectives
from pagewick.parallel.sharding import shard_bounds, shard_sizes
from pagewick.quantization.share import Part, Share, whole_rows


class VocabParallelEmbedding(nn.Module):
    """Token ids [T] -> [T, hidden_size]; each rank looks up the ids in its range, and the sum puts them together.

    is_head: whether it is the vocabulary head as well (tied weights).
    """

    def __init__(
        self, context: LayerContext, prefix: str, vocab_size: int, hidden_size: int, *, is_head: bool = False
    ) -> None:
        super().__init__()
        self._collectives = context.collectives
        self._vocab_size = vocab_size
        self._start, self._stop = shard_bounds(vocab_size, context.tp_rank, context.tp_size)
        share = _vocab_share(context, vocab_size, hidden_size)
        self.weight = context.make_weight(prefix, share, is_multiplied=is_head)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._collectives.tp_size == 1:
            return self.weight.take(token_ids)
        is_mine = (token_ids >= self._start) & (token_ids < self._stop)
        embedded = self.weight.take((token_ids - self._start) * is_mine)
        return self._collectives.all_reduce(embedded * is_mine.unsqueeze(-1))

    def logits(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """The tied vocabulary head: [N, hidden_size] -> [N, vocab_size] in float32."""
        shard = self.weight.linear(hidden_states, out_dtype=torch.float32)
        return gather_vocab(shard, self._vocab_size, self._collectives)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return self.weight.expected()

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        self.weight.load(part, name, tensor)

    def finish_loading(self) -> None:
        self.weight.finish()


class PositionEmbedding(nn.Module):
    """A learned table of positions, whole on every rank: positions [T] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = context.make_weight(prefix, whole_rows(num_positions, hidden_size), is_multiplied=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight.take(positions)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return self.weight.expected()

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        self.weight.load(part, name, tensor)

    def finish_loading(self) -> None:
        self.weight.finish()


class VocabParallelHead(Linear):
    """A vocabulary head with a weight of its own: [N, hidden_size] -> [N, vocab_size]."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, vocab_size: int, *, bias: bool = False
    ) -> None:
        super().__init__(context, prefix, _vocab_share(context, vocab_size, hidden_size), bias=bias)
        self._vocab_size = vocab_size

    def logits(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] in float32."""
        shard = self.weight.linear(hidden_states, self.bias, out_dtype=torch.float32)
        return gather_vocab(shard, self._vocab_size, self._collectives)


def _vocab_share(context: LayerContext, vocab_size: int, hidden_size: int) -> Share:
    rows = shard_bounds(vocab_size, context.tp_rank, context.tp_size)
    return Share((Part(None, vocab_size, (rows,)),), hidden_size, (0, hidden_size))


def gather_vocab(shard: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """Logits of the whole vocabulary from the ranks' shares, which may differ in size by one."""
    if collectives.tp_size == 1:
        return shard
    return collectives.all_gather(shard, dim=-1, sizes=shard_sizes(vocab_size, collectives.tp_size))
