"""The choice of blocks of tokens, and attention to them, in Triton, interpreted."""

from __future__ import annotations

import pytest
import torch

from pagewick.kernels import reference_blocks, reference_index
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.options import AttentionMetadata, Rotation
from tests.kernels.paged import PROBABILITY_ROUNDING
from tests.kernels.test_selected_blocks import Batch
from tests.kernels.triton.comparison import numbers
from tests.kernels.triton.harness import ROUNDING
from tests.kernels.triton.test_index import make_batch

from pagewick.kernels.triton import block_attention, head_blocks  # isort: skip  (skips this module without Triton)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DIM, SIZE = 32, 16


@pytest.mark.parametrize(("dtype", "ratio", "num_selections"), [(torch.float32, 4, 2), (torch.bfloat16, 5, 1)])
def test_attention_to_blocks(dtype: torch.dtype, ratio: int, num_selections: int) -> None:
    batch = Batch(dtype, ratio, num_selections, dim=DIM, size=8)
    found = batch.attend(block_attention)
    expected = torch.stack([batch.expected(token) for token in range(len(batch.q))])
    largest = batch.values.double().abs().max()
    tolerance = 1e-5 + ROUNDING[dtype] * expected.abs() + PROBABILITY_ROUNDING.get(dtype, 0.0) * largest
    assert found.dtype == dtype and bool(((found.double() - expected).abs() <= tolerance).all())
    # The last token of the first sequence, alone.
    metadata = AttentionMetadata(
        batch.metadata.block_tables[:1], batch.metadata.context_lens[:1], torch.tensor([0, 1], dtype=torch.int32)
    )
    own = batch.selected._replace(slots=batch.selected.slots[12:13], counts=batch.selected.counts[12:13])
    alone = block_attention.block_attention(batch.q[12:13], batch.cache, metadata, batch.scores, own, ratio)
    assert torch.equal(alone[0], found[12])


def test_more_heads_than_a_program_has() -> None:
    """17 query heads for each KV head, of the last token of a sequence."""
    batch = Batch(torch.float32, 4, dim=DIM, size=8)
    metadata = batch.metadata._replace(
        block_tables=batch.metadata.block_tables[:1], context_lens=batch.metadata.context_lens[:1],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    )  # fmt: skip
    own = batch.selected._replace(slots=batch.selected.slots[12:13], counts=batch.selected.counts[12:13])
    arguments = numbers(1, 34, DIM), batch.cache, metadata, batch.scores, own, 4
    torch.testing.assert_close(
        block_attention.block_attention(*arguments), reference_blocks.block_attention(*arguments), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("dtype", "num_local"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_selected_blocks(dtype: torch.dtype, num_local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole numbers, of which many scores are equal: all sums are exact. One key is no number."""
    batch = make_batch([6, 1, 2], [82, 104, 15], heads=2, dtype=dtype, is_whole=True)
    batch.cache[batch.metadata.block_tables[1, 2].long(), 5, 30] = float("nan")
    # Memory for the scores of five tokens at once.
    num_blocks = batch.metadata.block_tables.shape[1]
    monkeypatch.setattr(head_blocks, "SCORES_BYTES", 5 * 4 * 2 * num_blocks)
    choice = BlockChoice(SIZE, 3, num_local)
    found, expected = (
        operations.select_blocks(batch.q, batch.cache, batch.metadata, rotation=batch.rotation, choice=choice)
        for operations in (head_blocks, reference_index)
    )
    assert torch.equal(found.counts, expected.counts) and torch.equal(found.starts, expected.starts)
    for row, other, count in zip(found.slots, expected.slots, found.counts.tolist(), strict=True):
        assert torch.equal(row[:, :count], other[:, :count])
    alone = batch.only(0, 4, 5)
    again = head_blocks.select_blocks(alone.q, alone.cache, alone.metadata, rotation=alone.rotation, choice=choice)
    assert torch.equal(again.slots[0, :, : again.counts[0]], found.slots[4, :, : found.counts[4]])


def test_other_calls_pass_to_the_definitions() -> None:
    batch = make_batch([2], [40], is_whole=True)
    cos, sin, interleaved = batch.rotation
    for size, heads in ((8, 5), (SIZE, 20)):
        q = batch.q.repeat(1, 4, 1)[:, :heads].contiguous()
        arguments = {"rotation": Rotation(cos, sin, interleaved), "choice": BlockChoice(size, 2, 1)}
        found, expected = (
            operations.select_blocks(q, batch.cache, batch.metadata, **arguments)
            for operations in (head_blocks, reference_index)
        )
        assert all(map(torch.equal, found, expected))
    other = Batch(torch.float32, 4)
    assert torch.equal(other.attend(block_attention), other.attend(reference_blocks))
