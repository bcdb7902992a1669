"""Copies of whole blocks in Triton against their definitions, interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference

blocks = pytest.importorskip("pagewick.kernels.triton.blocks")
NUM_BLOCKS = 7


def make_caches(block_bytes: int, num_layers: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(block_bytes)
    return list(torch.randint(0, 256, (num_layers, NUM_BLOCKS, block_bytes), dtype=torch.uint8, generator=generator))


# Words for less than one program and for more; bytes that are no whole words; no blocks at all.
@pytest.mark.parametrize("block_bytes", [16, 24576 + 16, 24])
@pytest.mark.parametrize("ids", [[5, 0, 3], []], ids=str)
def test_blocks_of_all_layers_are_gathered_and_scattered(block_bytes: int, ids: list[int]) -> None:
    caches, block_ids = make_caches(block_bytes), torch.tensor(ids, dtype=torch.int64)
    content = blocks.gather_blocks(block_ids, caches)
    assert torch.equal(content, reference.gather_blocks(block_ids, caches))
    found, expected = make_caches(block_bytes), make_caches(block_bytes)
    targets = (block_ids + 1) % NUM_BLOCKS
    blocks.scatter_blocks(targets, found, content)
    reference.scatter_blocks(targets, expected, content)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_layers_that_differ_pass_to_the_definition() -> None:
    caches = [*make_caches(32, 1), *make_caches(16, 1)]
    content = blocks.gather_blocks(torch.tensor([1, 6]), caches)
    assert content.shape == (2, 48) and torch.equal(content[1, 32:], caches[1][6])
    blocks.scatter_blocks(torch.tensor([0, 2]), caches, content)
    assert torch.equal(caches[0][2], caches[0][6]) and torch.equal(caches[1][0], caches[1][1])
