"""Attention to selected blocks of tokens, by its definition and by the native library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import KVCache, heads_cache
from pagewick.kernels.options import AttentionMetadata, ScoreOptions, SelectedKeys
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import FULL_ISAS_HERE, with_isa

NUM_HEADS, NUM_KV_HEADS, DIM, SIZE, SCALE = 6, 2, 12, 10, 0.3


@pytest.fixture(params=FULL_ISAS_HERE)
def native(request: pytest.FixtureRequest) -> Any:
    yield from with_isa(request.param)


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def operations(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        yield reference
    else:
        yield from with_isa(request.param)


class Batch:
    """Two sequences, of which one has earlier tokens; blocks of the cache are in another order."""

    lengths, counts = (37, 23), (13, 23)

    def __init__(
        self, dtype: torch.dtype, ratio: int, num_selections: int = 1, dim: int = DIM, size: int = SIZE
    ) -> None:
        torch.manual_seed(ratio)
        num_bytes = 2 * NUM_KV_HEADS * size * dim * dtype.itemsize
        blocks = torch.zeros(11, num_bytes, dtype=torch.uint8)
        self.cache: KVCache = heads_cache(blocks, dtype, NUM_KV_HEADS, size, dim, is_packed=False)
        # Nobody may read these.
        self.cache.data.fill_(float("nan"))
        tables = torch.tensor([[7, 2, 5, 1, 9], [3, 8, 4, 0, 10]], dtype=torch.int32)
        self.keys, self.values = (torch.randn(2, 37, NUM_KV_HEADS, dim).to(dtype) for _ in range(2))
        for seq, length in enumerate(self.lengths):
            positions = torch.arange(length)
            slots = tables[seq][positions // size].long() * size + positions % size
            reference.store_kv(self.keys[seq, :length], self.values[seq, :length], self.cache, slots)
        self.q, self.scores, self.ratio = torch.randn(36, NUM_HEADS, dim).to(dtype), ScoreOptions(SCALE), ratio
        starts = torch.tensor([0, 13, 36], dtype=torch.int32)
        self.metadata = AttentionMetadata(tables, torch.tensor(self.lengths, dtype=torch.int32), starts)
        slots, chosen = torch.zeros(36, num_selections, 3, dtype=torch.int32), torch.zeros(36, dtype=torch.int32)
        for token in range(36):
            complete = (self.place(token)[1] + 1) // ratio
            chosen[token] = min(3, complete)
            for of_heads in slots[token]:
                of_heads[: chosen[token]] = torch.randperm(complete)[:3].sort().values
        self.selected = SelectedKeys(slots, chosen, torch.arange(37, dtype=torch.int32))

    def place(self, token: int) -> tuple[int, int]:
        """Return the sequence of a token, and its position."""
        return (0, 24 + token) if token < 13 else (1, token - 13)

    def attend(self, operations: Any, selected: SelectedKeys | None = None) -> Tensor:
        found: Tensor = operations.block_attention(
            self.q, self.cache, self.metadata, self.scores, selected or self.selected, self.ratio
        )
        return found

    def expected(self, token: int) -> Tensor:
        """Attention in float64 with a mask, for each KV head."""
        (seq, position), group = self.place(token), NUM_HEADS // NUM_KV_HEADS
        positions, complete = torch.arange(position + 1), (position + 1) // self.ratio
        found = []
        for head in range(NUM_KV_HEADS):
            slots = self.selected.slots[token, head % self.selected.slots.shape[1]]
            best = slots[: self.selected.counts[token]]
            seen = torch.isin(positions // self.ratio, best) | (positions >= complete * self.ratio)
            keys, values = (x[seq, : position + 1, head][seen].double() for x in (self.keys, self.values))
            q = self.q[token, head * group : (head + 1) * group].double()
            found.append((q @ keys.T * SCALE).softmax(-1) @ values)
        return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ratio", "num_selections"), [(1, 1), (4, 2), (5, 1)])
def test_attention_to_blocks_is_attention_with_a_mask(
    operations: Any, ratio: int, num_selections: int, dtype: torch.dtype
) -> None:
    batch = Batch(dtype, ratio, num_selections)
    found = batch.attend(operations)
    expected = torch.stack([batch.expected(token) for token in range(36)])
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    if num_selections == 1:
        flat = batch.selected._replace(slots=batch.selected.slots.squeeze(1))
        assert torch.equal(batch.attend(operations, flat), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_alone(operations: Any, dtype: torch.dtype) -> None:
    batch = Batch(dtype, 4, 2, dim=72)
    together = batch.attend(operations)
    for begin, end in ((0, 9), (12, 13)):
        metadata = AttentionMetadata(
            batch.metadata.block_tables[:1], batch.metadata.context_lens[:1] - (13 - end),
            torch.tensor([0, end - begin], dtype=torch.int32),
        )  # fmt: skip
        selected = SelectedKeys(
            batch.selected.slots[begin:end].contiguous(), batch.selected.counts[begin:end], torch.arange(0)
        )
        q = batch.q[begin:end].contiguous()
        alone = operations.block_attention(q, batch.cache, metadata, batch.scores, selected, 4)
        assert torch.equal(alone, together[begin:end])


def test_threads_and_repetitions(native: Any) -> None:
    batch = Batch(torch.float32, 5)
    before = batch.attend(native).clone()
    native.set_num_threads(3)
    assert torch.equal(batch.attend(native), before)
    native.set_num_threads(1)
    results, step = record(lambda: [batch.attend(native)], StepMemory())
    assert isinstance(step, RecordedStep), step
    batch.q.copy_(batch.q.flip(0))
    step.replay()
    assert not torch.equal(results[0], before)
    assert torch.equal(results[0], batch.attend(native))


def test_what_is_refused(native: Any) -> None:
    packed = heads_cache(torch.zeros(2, 2 * 16 * 16 * 4, dtype=torch.uint8), torch.float32, 1, 16, 16, is_packed=True)
    for operations in (reference, native):
        with pytest.raises(ValueError, match="packed cache"):
            operations.block_attention(
                torch.zeros(1, 1, 16), packed, AttentionMetadata(*[torch.ones(1, 1)] * 3), ScoreOptions(1.0),
                SelectedKeys(*[torch.ones(1, 1)] * 3), 4,
            )  # fmt: skip
    batch = Batch(torch.float32, 4, 2)
    wrong = batch.selected.slots.clone()
    # A block that ends behind its token.
    wrong[20, 1, 0] = 2
    with pytest.raises(ValueError, match="ends behind"):
        batch.attend(native, batch.selected._replace(slots=wrong))
    with pytest.raises(ValueError, match="contradict"):
        batch.attend(native, batch.selected._replace(counts=batch.selected.counts + 3))
    with pytest.raises(ValueError, match="each of 2"):
        batch.attend(native, batch.selected._replace(slots=wrong.repeat(1, 2, 1)))
