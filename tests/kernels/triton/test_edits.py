"""Changes of single logits in Triton against their definition, interpreted: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import EditStep, TokenEdits
from tests.kernels.triton.comparison import numbers

edits = pytest.importorskip("pagewick.kernels.triton.edits")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCAB = 300
ROW_IDS = [4, 0, 2]


def some_edits() -> TokenEdits:
    """Changes of three rows; each row has more than a program reads at once, tokens twice, and a step without any."""
    generator = torch.Generator().manual_seed(1)
    counts, token_ids, amounts = [0], [], []
    for step in EditStep:
        for row in range(3):
            counts.append(0 if step == EditStep.BIAS else 5 + 3 * row + 1100 * (step == EditStep.REPETITION))
            if step == EditStep.REPETITION:
                token_ids.append(torch.randint(0, VOCAB, (counts[-1],), generator=generator))
                amounts.append(torch.full((counts[-1],), 1.3))
            else:
                token_ids.append(torch.randperm(VOCAB, generator=generator)[: counts[-1]])
                amounts.append(-torch.rand(counts[-1], generator=generator) / (step != EditStep.BAN))
    return TokenEdits(torch.tensor(ROW_IDS), torch.tensor(counts).cumsum(0), torch.cat(token_ids), torch.cat(amounts))


def changed(logits: Tensor, change: Callable[[Tensor, TokenEdits], None] = reference.edit_tokens) -> Tensor:
    copy = logits.clone()
    change(copy, some_edits())
    return copy


def test_edits_have_the_bits_of_their_definition() -> None:
    logits = numbers(6, VOCAB)
    logits[0, :50], logits[2, 7] = float("-inf"), 0.0
    found = changed(logits, edits.edit_tokens)
    assert torch.equal(found, changed(logits))
    assert torch.equal(found[[1, 3, 5]], logits[[1, 3, 5]])
    wide = numbers(6, VOCAB + 9)
    edits.edit_tokens(wide[:, :VOCAB], some_edits())
    assert torch.equal(wide[:, :VOCAB], changed(numbers(6, VOCAB + 9)[:, :VOCAB]))
    assert torch.equal(wide[:, VOCAB:], numbers(6, VOCAB + 9)[:, VOCAB:])


def test_the_definition_itself() -> None:
    """Two rows, by hand: each step of the one, and a bias and a penalty of the other."""
    logits = torch.tensor([[1.0, -1.0, 4.0], [1.0, -1.0, 4.0]])
    # By step, and then row 1 before row 0: ban, bias, repetition, presence, frequency, DRY.
    counts = [0, *(0, 1), *(0, 1), *(3, 0), *(0, 1), *(1, 0), *(1, 0)]
    token_ids = torch.tensor([0, 1, 0, 1, 0, 2, 2, 1])
    amounts = torch.tensor([float("-inf"), 0.5, 2.0, 2.0, 2.0, -0.5, -0.25, -8.0])
    edit = TokenEdits(torch.tensor([1, 0]), torch.tensor(counts).cumsum(0), token_ids, amounts)
    reference.edit_tokens(logits, edit)
    assert logits.tolist() == [[float("-inf"), -0.5, 3.5], [0.5, -10.0, 3.75]]


def test_other_numbers_pass_to_the_definition() -> None:
    found, expected = numbers(6, VOCAB).double(), numbers(6, VOCAB).double()
    precise = some_edits()._replace(amounts=some_edits().amounts.double())
    edits.edit_tokens(found, precise)
    reference.edit_tokens(expected, precise)
    assert torch.equal(found, expected)
