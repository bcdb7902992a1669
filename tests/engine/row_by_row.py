"""Matrix products whose rows cannot depend on each other, so that whole engines can be compared bit for bit.

A library's product of many rows may add in another order than that of one row. Under `row_by_row` every product of the
model is one of single rows; all other operations are the package's own, which promise the same by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from pagewick.kernels import reference
from pagewick.layers import embedding
from pagewick.quantization import unquantized


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N], as T products of one row each."""
    assert x.ndim == 2
    if x.dtype == torch.float32:
        # One call for T products [1, K] @ [K, N]; test_row_by_row says that each of them is a product of one row.
        product = torch.bmm(x.unsqueeze(1), weight.t().expand(len(x), -1, -1)).squeeze(1)
    else:
        product = torch.cat([nn.functional.linear(row.clone(), weight) for row in x.split(1)])
    return product if bias is None else product + bias


@contextmanager
def row_by_row() -> Iterator[None]:
    """Until the end of the block, in this process, for models of unquantized weights."""

    def apply(self: object, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.get_parameter("weight"), bias)

    def logits(self: embedding.VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        shard = linear(hidden_states, self.weight)
        return embedding.gather_vocab(shard, self._vocab_size, self._collectives)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unquantized.UnquantizedMethod, "apply", apply)
        patch.setattr(embedding.VocabParallelEmbedding, "logits", logits)
        # Only where there is no native library: its attention takes one query after the other anyway.
        patch.setattr(reference, "QUERY_SLICE", 1)
        yield
