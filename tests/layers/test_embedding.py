"""The vocabulary divided among ranks, evenly or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewick.errors import ModelLoadError
from pagewick.layers.context import LayerContext
from pagewick.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from tests.layers.ranks import on_ranks, single_context

HIDDEN_SIZE = 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab_size", [11, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embedding_and_tied_head(world_size: int, vocab_size: int) -> None:
    weight, hidden_states = random(vocab_size, HIDDEN_SIZE), random(3, HIDDEN_SIZE, seed=1)
    token_ids = torch.tensor([*range(vocab_size), 0, vocab_size - 1, 5, 5])

    def act(context: LayerContext) -> tuple[Tensor, Tensor]:
        layer = VocabParallelEmbedding(context, "model.embed_tokens", vocab_size, HIDDEN_SIZE)
        assert list(layer.expected_weights()) == [(None, "weight")]
        layer.load_weight("weight", weight, None)
        return layer(token_ids), layer.logits(hidden_states)

    for embedded, logits in on_ranks(world_size, act):
        assert torch.equal(embedded, weight[token_ids])
        torch.testing.assert_close(logits, functional.linear(hidden_states, weight))


@pytest.mark.parametrize("vocab_size", [11, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_head(world_size: int, vocab_size: int) -> None:
    weight, hidden_states = random(vocab_size, HIDDEN_SIZE), random(3, HIDDEN_SIZE, seed=1)

    def act(context: LayerContext) -> Tensor:
        layer = VocabParallelHead(context, "lm_head", HIDDEN_SIZE, vocab_size)
        assert list(layer.expected_weights()) == [(None, "weight")]
        layer.load_weight("weight", weight, None)
        return layer.logits(hidden_states)

    for logits in on_ranks(world_size, act):
        torch.testing.assert_close(logits, functional.linear(hidden_states, weight))


def test_a_vocabulary_of_another_size_is_an_error_with_both_shapes() -> None:
    for layer in (
        VocabParallelEmbedding(single_context(), "model.embed_tokens", 11, HIDDEN_SIZE),
        VocabParallelHead(single_context(), "lm_head", HIDDEN_SIZE, 11),
    ):
        with pytest.raises(ModelLoadError, match=r"\[12, 6\].*\[11, 6\]"):
            layer.load_weight("weight", torch.zeros(12, HIDDEN_SIZE), None)
