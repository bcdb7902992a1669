"""The choice of the tokens that sparse attention sees: the definition in float64, and the native library beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from pagewick import kernels as dispatched
from pagewick.kernels import reference_index
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.cpu import index
from pagewick.kernels.options import AttentionMetadata, Rotation, SelectedKeys
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import FULL_ISAS_HERE, required_library, with_isa

NUM_HEADS, DIM, ROPE_DIM, BLOCK_SIZE, TOP_K = 5, 18, 8, 8, 6


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def operations(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        yield reference_index
    else:
        yield from with_isa(request.param)


@dataclass(frozen=True)
class Batch:
    """The arguments of select_keys. tables: the blocks of the cache whose slots are wanted."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    metadata: AttentionMetadata
    tables: Tensor
    rotation: Rotation

    def select(self, operations: Any, top_k: int = TOP_K) -> SelectedKeys:
        selected: SelectedKeys = operations.select_keys(
            self.q, self.weights, self.cache, self.metadata, self.tables, rotation=self.rotation, top_k=top_k
        )
        return selected

    def only(self, seq: int) -> Batch:
        """The last token of one sequence, as a batch of its own."""
        token = int(self.metadata.cu_seqlens_q[seq + 1]) - 1
        cos, sin, interleaved = self.rotation
        return replace(
            self,
            q=self.q[token : token + 1],
            weights=self.weights[token : token + 1],
            metadata=AttentionMetadata(
                self.metadata.block_tables[seq : seq + 1],
                self.metadata.context_lens[seq : seq + 1],
                torch.tensor([0, 1], dtype=torch.int32),
            ),
            tables=self.tables[seq : seq + 1],
            rotation=Rotation(cos[token : token + 1], sin[token : token + 1], interleaved),
        )

    def expected(self, seq: int, token: int, num_keys: int) -> list[int]:
        """The slots of the best keys by scores in float64."""
        cos, sin, interleaved = self.rotation
        turned = self.q[token].double()
        for pair in range(ROPE_DIM // 2):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + ROPE_DIM // 2)
            a, b, c, s = turned[:, first].clone(), turned[:, second].clone(), cos[token, pair], sin[token, pair]
            turned[:, first], turned[:, second] = a * c - b * s, b * c + a * s
        blocks = self.metadata.block_tables[seq][: -(-num_keys // BLOCK_SIZE)].long()
        keys = self.cache[blocks].flatten(0, 1)[:num_keys].double()
        scores = (self.weights[token].double()[:, None] * (turned @ keys.T).clamp(min=0)).sum(0)
        # Where no product is above 0, scores are equal; then the earlier key is chosen.
        best = sorted(scores.sort(descending=True, stable=True).indices[:TOP_K].tolist())
        return [int(self.tables[seq][key // BLOCK_SIZE]) * BLOCK_SIZE + key % BLOCK_SIZE for key in best]


def make_batch(q_lens: list[int], context_lens: list[int], *, interleaved: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-context_len // BLOCK_SIZE) for context_len in context_lens]
    block_ids = torch.randperm(sum(num_blocks) + 3, generator=generator).int()
    tables = torch.zeros(2, len(q_lens), max(num_blocks), dtype=torch.int32)
    for seq, count in enumerate(num_blocks):
        first = sum(num_blocks[:seq])
        tables[0, seq, :count] = block_ids[first : first + count]
        tables[1, seq, :count] = block_ids.flip(0)[first : first + count] + 50
    num_tokens = sum(q_lens)
    angles = torch.rand(num_tokens, ROPE_DIM // 2, generator=generator) * 6
    return Batch(
        torch.randn(num_tokens, NUM_HEADS, DIM, generator=generator),
        torch.randn(num_tokens, NUM_HEADS, generator=generator),
        torch.randn(len(block_ids), BLOCK_SIZE, DIM, generator=generator),
        AttentionMetadata(
            tables[0],
            torch.tensor(context_lens, dtype=torch.int32),
            torch.tensor([0, *q_lens]).cumsum(0).int(),
        ),
        tables[1],
        Rotation(angles.cos(), angles.sin(), interleaved),
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_best_are_chosen(operations: Any, interleaved: bool) -> None:
    q_lens, context_lens = [4, 1, 9, 70], [4, 33, 12, 100]
    batch = make_batch(q_lens, context_lens, interleaved=interleaved)
    slots, counts, starts = batch.select(operations)
    assert starts.tolist() == list(range(85))
    token = 0
    for seq, (q_len, context_len) in enumerate(zip(q_lens, context_lens, strict=True)):
        for num_keys in range(context_len - q_len + 1, context_len + 1):
            wanted = batch.expected(seq, token, num_keys)
            assert counts[token] == len(wanted)
            assert slots[token].tolist() == wanted + [0] * (TOP_K - len(wanted))
            token += 1


def test_a_token_chooses_the_same_alone(operations: Any) -> None:
    batch = make_batch([30, 1, 7], [31, 200, 90])
    slots = batch.select(operations).slots
    for seq, token in enumerate((29, 30, 37)):
        assert torch.equal(batch.only(seq).select(operations).slots[0], slots[token])


def test_as_many_as_there_are(operations: Any) -> None:
    batch = make_batch([3], [20])
    slots, counts, _ = batch.select(operations, top_k=20)
    assert counts.tolist() == [18, 19, 20]
    table = batch.tables[0].tolist()
    assert slots[2].tolist() == [table[key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE for key in range(20)]


def test_stored_keys(operations: Any) -> None:
    batch = make_batch([5], [5])
    keys, slots = batch.q[:, 0], torch.tensor([3, -1, 0, 9, 21])
    cache = torch.full_like(batch.cache, 7.0)
    operations.store_index_keys(keys, cache, slots, rotation=batch.rotation)
    cos, sin, _ = batch.rotation
    half = ROPE_DIM // 2
    turned = torch.cat(
        (
            keys[:, :half] * cos - keys[:, half:ROPE_DIM] * sin,
            keys[:, half:ROPE_DIM] * cos + keys[:, :half] * sin,
            keys[:, ROPE_DIM:],
        ),
        dim=-1,
    )
    rows = cache.flatten(0, 1)
    stored = slots >= 0
    torch.testing.assert_close(rows[slots[stored]], turned[stored], rtol=1e-6, atol=1e-6)
    others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, slots[stored], False)
    assert bool((rows[others] == 7.0).all())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"q": torch.randn(4, NUM_HEADS, DIM + 1)}, "cache .* must be contiguous"),
        ({"weights": torch.randn(4, NUM_HEADS + 1)}, "weights must be contiguous float32"),
        ({"weights": torch.randn(4, NUM_HEADS).double()}, "weights must be contiguous float32"),
        ({"tables": torch.zeros(1, 99, dtype=torch.int32)}, "tables must be int32"),
        ({"rotation": Rotation(torch.ones(4, 10), torch.ones(4, 10))}, "have no 20 to rotate"),
        ({"cache": torch.randn(2, BLOCK_SIZE, DIM)}, "name a block outside the cache"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: str) -> None:
    required_library()
    batch = replace(make_batch([4], [40]), **change)
    with pytest.raises(ValueError, match=error):
        batch.select(index)


def test_lengths_that_contradict_each_other() -> None:
    required_library()
    batch = make_batch([4], [40])
    lens = torch.tensor([41], dtype=torch.int32)
    with pytest.raises(ValueError, match="contradict each other"):
        replace(batch, metadata=batch.metadata._replace(context_lens=lens)).select(index)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        batch.select(index, top_k=0)
    with pytest.raises(IndexError, match="a slot is outside"):
        slots = torch.full((4,), len(batch.cache) * BLOCK_SIZE)
        index.store_index_keys(batch.q[:, 0], batch.cache, slots, rotation=batch.rotation)


def test_it_can_be_recorded() -> None:
    required_library()
    batch = make_batch([3, 1], [40, 77])
    results, recorded = record(lambda: [*batch.select(dispatched)], StepMemory())
    assert isinstance(recorded, RecordedStep), recorded
    before = [result.clone() for result in results]
    batch.q.copy_(batch.q.flip(0))
    recorded.replay()
    assert not torch.equal(results[0], before[0])
    assert all(map(torch.equal, results, batch.select(dispatched)))


@pytest.mark.parametrize(("size", "top_k", "num_local"), [(8, 3, 1), (16, 4, 3), (32, 9, 1)])
def test_blocks_are_those_of_transformers(operations: Any, size: int, top_k: int, num_local: int) -> None:
    """The indexer of MiniMax-M3 chooses blocks for the last tokens of sequences, which have fewer than 9 blocks."""
    config = MiniMaxM3VLTextConfig(
        hidden_size=40, index_n_heads=NUM_HEADS, index_head_dim=DIM, index_block_size=size, index_topk_blocks=top_k,
        index_local_blocks=num_local,
    )  # fmt: skip
    torch.manual_seed(2)
    indexer = MiniMaxM3VLIndexer(config, 0)
    q_lens, context_lens = [4, 1, 70], [4, 33, 123]
    batch = make_batch(q_lens, context_lens)
    cos, sin, q = torch.zeros(75, ROPE_DIM // 2), torch.zeros(75, ROPE_DIM // 2), torch.zeros(75, NUM_HEADS, DIM)
    expected = []
    for seq, (q_len, context_len) in enumerate(zip(q_lens, context_lens, strict=True)):
        hidden, positions, first = torch.randn(context_len, 40), torch.arange(context_len), sum(q_lens[:seq])
        angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.02])
        turned = Rotation(angles.cos(), angles.sin())
        with torch.no_grad():
            found = indexer(
                hidden[None], (turned.cos.repeat(1, 2)[None], turned.sin.repeat(1, 2)[None]), None, positions[None]
            )[0]
            rows = slice(first, first + q_len)
            q[rows] = indexer.q_norm(indexer.q_proj(hidden[-q_len:]).view(q_len, NUM_HEADS, DIM))
            keys = indexer.k_norm(indexer.k_proj(hidden))
        cos[rows], sin[rows] = turned.cos[-q_len:], turned.sin[-q_len:]
        blocks = batch.metadata.block_tables[seq]
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        reference_index.store_index_keys(keys, batch.cache, slots, rotation=turned)
        expected += [found[:, context_len - q_len + token] for token in range(q_len)]
    rotation, choice = Rotation(cos, sin), BlockChoice(size, top_k, num_local)
    slots, counts, starts = operations.select_blocks(q, batch.cache, batch.metadata, rotation=rotation, choice=choice)
    assert starts.tolist() == list(range(76)) and list(slots.shape) == [75, NUM_HEADS, top_k]
    positions = [length - q_len + i for q_len, length in zip(q_lens, context_lens, strict=True) for i in range(q_len)]
    for token, position in enumerate(positions):
        # The incomplete block at the token is one of those that it sees.
        num_complete = (position + 1) // size
        for head in range(NUM_HEADS):
            chosen = sorted(block for block in expected[token][head].tolist() if block >= 0)
            complete = [block for block in chosen if block < num_complete]
            assert slots[token, head, : counts[token]].tolist() == complete
            assert chosen == complete + [num_complete] * ((position + 1) % size > 0)
    if operations is not reference_index:
        with pytest.raises(ValueError, match="num_local"):
            operations.select_blocks(q, batch.cache, batch.metadata, rotation=rotation, choice=BlockChoice(size, 2, 3))


@pytest.mark.parametrize("size", [8, 24, 40])
def test_selected_blocks_do_not_depend_on_other_tokens(operations: Any, size: int) -> None:
    """Products of many keys, of which two are no numbers, with 33 heads; queries and keys in bfloat16."""
    torch.manual_seed(7)
    batch = make_batch([1, 30], [1300, 130])
    q, cache = torch.randn(31, 33, DIM).bfloat16(), batch.cache.bfloat16()
    cache[batch.metadata.block_tables[0, 3].long(), 2, 5] = float("nan")
    cos, sin, interleaved = batch.rotation
    choice, table, length = BlockChoice(size, 3, 2), batch.metadata.block_tables, batch.metadata.context_lens
    together = operations.select_blocks(q, cache, batch.metadata, rotation=batch.rotation, choice=choice)
    expected = reference_index.select_blocks(q, cache, batch.metadata, rotation=batch.rotation, choice=choice)
    assert torch.equal(together.counts, expected.counts)
    # Rounding may decide between two blocks.
    assert (together.slots == expected.slots).float().mean() > 0.99
    for begin, end in ((1, 2), (2, 19), (30, 31)):
        metadata = AttentionMetadata(table[1:], length[1:] - (31 - end), torch.tensor([0, end - begin]).int())
        rotation = Rotation(cos[begin:end], sin[begin:end], interleaved)
        alone = operations.select_blocks(q[begin:end], cache, metadata, rotation=rotation, choice=choice)
        assert torch.equal(alone.slots, together.slots[begin:end])
