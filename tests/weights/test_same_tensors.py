"""A head that is stored beside the embedding to which it is tied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.weights import same_tensors
from pagewick.weights.same_tensors import check_tied_heads
from tests.weights.test_loader import MemorySource

EMBEDDING = torch.linspace(-1, 1, 7 * 5).view(7, 5).to(torch.bfloat16)


class BlockSource(MemorySource):
    """Tensors whose bytes are blocks; kinds: the format of each."""

    def __init__(self, tensors: dict[str, Tensor], kinds: dict[str, str]) -> None:
        super().__init__(tensors)
        self._kinds = kinds

    def stored_type(self, name: str) -> torch.dtype | str:
        return self._kinds[name]


def differs(source: MemorySource) -> bool:
    try:
        check_tied_heads(source, {"head": "table"})
    except ModelLoadError as error:
        assert "but head differs from table\n  set tie_word_embeddings to false" in str(error)
        return True
    return False


@pytest.mark.parametrize("row", range(7))
@pytest.mark.parametrize("num_numbers", [1, 4, 35, 2**20])
def test_every_number_counts(row: int, num_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_tensors, "_PIECE_NUMBERS", num_numbers)
    assert not differs(MemorySource({"table": EMBEDDING, "head": EMBEDDING.clone()}))
    other = EMBEDDING.clone()
    other[row, row % 5] += 0.5
    assert differs(MemorySource({"table": EMBEDDING, "head": other}))


def test_numbers_are_compared_and_not_their_spelling() -> None:
    assert not differs(MemorySource({"table": EMBEDDING, "head": EMBEDDING.float()}))
    assert differs(MemorySource({"table": EMBEDDING, "head": EMBEDDING.float() + 1e-6}))
    assert differs(MemorySource({"table": EMBEDDING, "head": EMBEDDING.to(torch.float8_e4m3fn)}))
    zeros = torch.zeros(2, 2)
    assert not differs(MemorySource({"table": zeros, "head": -zeros}))
    unset = torch.full((2, 2), torch.nan)
    assert not differs(MemorySource({"table": unset, "head": unset.clone()}))


def test_a_head_of_another_shape_differs() -> None:
    source = MemorySource({"table": EMBEDDING, "head": EMBEDDING[:-1]})
    assert differs(source)
    assert source.events == []


def test_bytes_of_blocks_mean_the_same_in_one_format_only() -> None:
    blocks = torch.arange(34, dtype=torch.uint8).view(1, 34)
    tensors = {"table": blocks, "head": blocks.clone()}
    assert not differs(BlockSource(tensors, {"table": "Q8_0", "head": "Q8_0"}))
    assert differs(BlockSource(tensors, {"table": "Q8_0", "head": "IQ9_9"}))
    assert differs(BlockSource({"table": blocks, "head": blocks + 1}, {"table": "Q8_0", "head": "Q8_0"}))


def test_memory_is_given_back_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_tensors, "_PIECE_NUMBERS", 20)
    source = MemorySource({"table": EMBEDDING, "head": EMBEDDING.clone()})
    check_tied_heads(source, {"head": "table"})
    assert source.events == ["get head", "get table", *["release head", "release table"] * 2]
