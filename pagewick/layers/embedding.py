"""The token embedding and the vocabulary head, their rows shared out over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewick.layers.context import LayerContext
from pagewick.layers.linear import Linear, Part
from pagewick.layers.shapes import check_shape
from pagewick.parallel.collectives import Collectives
from pagewick.parallel.sharding import shard_bounds, shard_sizes


class VocabParallelEmbedding(nn.Module):
    """Token ids [T] -> [T, hidden_size]; each rank looks up the ids in its range, and the sum puts them together."""

    def __init__(self, context: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._collectives = context.collectives
        self._vocab_size = vocab_size
        self._start, self._stop = shard_bounds(vocab_size, context.tp_rank, context.tp_size)
        rows = torch.empty(self._stop - self._start, hidden_size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._collectives.world_size == 1:
            return functional.embedding(token_ids, self.weight)
        is_mine = (token_ids >= self._start) & (token_ids < self._stop)
        embedded = functional.embedding((token_ids - self._start) * is_mine, self.weight)
        return self._collectives.all_reduce(embedded * is_mine.unsqueeze(-1))

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The tied vocabulary head: [N, hidden_size] -> [N, vocab_size]."""
        return gather_vocab(functional.linear(hidden_states, self.weight), self._vocab_size, self._collectives)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, "weight")]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_shape(tensor, (self._vocab_size, self.weight.shape[1]))
        self.get_parameter(name).copy_(tensor[self._start : self._stop])


class VocabParallelHead(Linear):
    """A vocabulary head with a weight of its own: [N, hidden_size] -> [N, vocab_size]."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, vocab_size: int) -> None:
        part = Part(None, vocab_size, (shard_bounds(vocab_size, context.tp_rank, context.tp_size),))
        super().__init__(context, prefix, hidden_size, (0, hidden_size), [part], bias=False)
        self._vocab_size = vocab_size

    def logits(self, hidden_states: Tensor) -> Tensor:
        return gather_vocab(self.forward(hidden_states), self._vocab_size, self._collectives)


def gather_vocab(shard: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """Logits of the whole vocabulary from the ranks' shares, which may differ in size by one."""
    if collectives.world_size == 1:
        return shard
    return collectives.all_gather(shard, dim=-1, sizes=shard_sizes(vocab_size, collectives.world_size))
