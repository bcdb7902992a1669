"""Attention to a window and to entries in Triton, interpreted: against float64, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pagewick.kernels import batch_invariance, reference_compressed
from pagewick.kernels.options import AttentionMetadata, Entries, ScoreOptions, SelectedKeys
from tests.kernels.paged import PROBABILITY_ROUNDING
from tests.kernels.triton.comparison import numbers
from tests.kernels.triton.harness import ROUNDING

from pagewick.kernels.triton import attention, window_attention  # isort: skip  (skips this module without Triton)

DIM, BLOCK, SCALE = 32, 12, 0.3
Q_LENS, CONTEXT_LENS = [1, 2, 7, 1], [1, 47, 33, 60]


@dataclass(frozen=True)
class Batch:
    """The arguments of window_attention, and the keys of each sequence and its entries, in their order."""

    q: Tensor
    cache: Tensor
    metadata: AttentionMetadata
    scores: ScoreOptions
    entries: Entries | None

    def attend(self, operations: ModuleType) -> Tensor:
        found: Tensor = operations.window_attention(self.q, self.cache, self.metadata, self.scores, self.entries)
        return found

    def only(self, seq: int, begin: int, end: int) -> Batch:
        """Some new tokens of one sequence, as a batch of their own."""
        first, last = self.metadata.cu_seqlens_q[seq : seq + 2].tolist()
        part, own = slice(first + begin, first + end), slice(seq, seq + 1)
        lens = self.metadata.context_lens[own] - (last - first - end)
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        entries = self.entries
        if entries is not None:
            chosen = entries.selected
            if chosen is not None:
                chosen = SelectedKeys(chosen.slots[part], chosen.counts[part], chosen.starts[: end - begin + 1])
            entries = entries._replace(block_tables=entries.block_tables[own], selected=chosen)
        metadata = AttentionMetadata(self.metadata.block_tables[own], lens, starts)
        return replace(self, q=self.q[part], metadata=metadata, entries=entries)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The results, and the means of the absolute values, in float64."""
        entries = None if self.entries is None else self.entries._replace(cache=self.entries.cache.double())
        wide = replace(self, q=self.q.double(), cache=self.cache.double(), entries=entries)
        assert self.scores.sinks is not None
        means = wide.attend(reference_compressed)
        # Values that are keys cannot be changed alone: the largest of them are as good a bound.
        caches = [wide.cache] if entries is None else [wide.cache, entries.cache]
        return means, torch.stack([cache[~cache.isnan()].abs().max() for cache in caches]).max()


def make_batch(
    kind: str, *, dtype: torch.dtype = torch.float32, heads: int = 5, dim: int = DIM, window: int = 7, ratio: int = 4,
    q_lens: Sequence[int] = Q_LENS, context_lens: Sequence[int] = CONTEXT_LENS,
) -> Batch:  # fmt: skip
    """kind: of window_attention.KINDS. Blocks lie in random order; keys that nobody may read are NaN."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-length // BLOCK) for length in context_lens]
    tables = torch.full((2, len(num_blocks), max(num_blocks) + 1), sum(num_blocks), dtype=torch.int32)
    for table in tables:
        for seq, ids in enumerate(torch.randperm(sum(num_blocks), generator=generator).int().split(num_blocks)):
            table[seq, : len(ids)] = ids
    cache, entries = (numbers(sum(num_blocks) + 1, size, dim, seed=size) for size in (BLOCK, BLOCK // ratio))
    cache[-1] = entries[-1] = float("nan")
    lens, starts = torch.tensor(context_lens, dtype=torch.int32), torch.tensor([0, *q_lens]).cumsum(0).int()
    for seq, (length, q_len) in enumerate(zip(context_lens, q_lens, strict=True)):
        gone = torch.arange(max(0, length - q_len + 1 - window))
        cache[tables[0][seq][gone // BLOCK].long(), gone % BLOCK] = float("nan")
        later = torch.arange(length // ratio, num_blocks[seq] * (BLOCK // ratio))
        entries[tables[1][seq][later // (BLOCK // ratio)].long(), later % (BLOCK // ratio)] = float("nan")
    seen = None
    if kind != "none":
        chosen = _selected(lens, starts, tables[1], ratio, generator) if kind == "selected" else None
        seen = Entries(entries.to(dtype), tables[1], ratio, chosen)
    q, sinks = numbers(sum(q_lens), heads, dim, seed=1), 3 * numbers(heads, seed=2)
    # Scores are as far apart for any size of keys.
    options = ScoreOptions(SCALE * (DIM / dim) ** 0.5, window, sinks=sinks)
    return Batch(q.to(dtype), cache.to(dtype), AttentionMetadata(tables[0], lens, starts), options, seen)


def _selected(lens: Tensor, starts: Tensor, tables: Tensor, ratio: int, generator: torch.Generator) -> SelectedKeys:
    """Up to nine entries of each token, in their order; what follows them is of no meaning."""
    of_block = BLOCK // ratio
    slots, counts = torch.full((int(starts[-1]), 9), 2**30, dtype=torch.int32), []
    for seq, length in enumerate(lens.tolist()):
        for token in range(int(starts[seq]), int(starts[seq + 1])):
            number = (length - int(starts[seq + 1]) + token + 1) // ratio
            best = torch.randperm(number, generator=generator)[:9].sort().values
            counts.append(len(best))
            slots[token, : len(best)] = (tables[seq][best // of_block] * of_block + best % of_block).int()
    return SelectedKeys(slots, torch.tensor(counts).int(), torch.arange(len(slots) + 1).int())


def assert_expected(batch: Batch, found: Tensor) -> None:
    """That results are exact but for their rounding and, over 16 bits, that of the weights."""
    expected, size = batch.expected()
    tolerance = 1e-5 + ROUNDING[found.dtype] * expected.abs() + PROBABILITY_ROUNDING.get(found.dtype, 0.0) * size
    error = (found.double() - expected).abs()
    assert found.dtype == batch.q.dtype and bool((error <= tolerance).all()), (error - tolerance).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", window_attention.KINDS)
def test_a_ragged_batch(kind: str, dtype: torch.dtype) -> None:
    batch = make_batch(kind, dtype=dtype, ratio=4 if kind == "selected" else 3)
    assert_expected(batch, batch.attend(window_attention))


@pytest.mark.parametrize(("heads", "window", "ratio"), [(1, 40, 2), (17, 1, 12)])
def test_heads_windows_and_splits(heads: int, window: int, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for two tokens, in more splits than a merge takes at once; one in each block, in a single split beside it."""
    split_at(3 if heads == 1 else 16, monkeypatch)
    batch = make_batch("all", heads=heads, window=window, ratio=ratio, dtype=torch.float16)
    assert_expected(batch, batch.attend(window_attention))


def split_at(num_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make splits of so few entries that contexts which can be interpreted have several."""
    monkeypatch.setattr(window_attention, "SPLIT", num_entries)
    for table in (window_attention._ATTEND, window_attention._MERGE):
        for key, variant in table.items():
            if "SPLIT" in variant.constexprs:
                changed = {**variant.constexprs, "SPLIT": num_entries}
                monkeypatch.setitem(table, key, replace(variant, constexprs=changed))


def test_a_sequence_has_the_same_bits_in_any_company_and_with_memory_for_few_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_at(4, monkeypatch)
    batch = make_batch("selected", dtype=torch.float16, heads=2)
    together = batch.attend(window_attention)
    # Two tokens of a short sequence, the second of them alone, and tokens of a long one in chunks that are long, too.
    for seq, begin, end in ((1, 0, 2), (1, 1, 2), (2, 0, 5), (2, 1, 7)):
        first = int(batch.metadata.cu_seqlens_q[seq])
        alone = batch.only(seq, begin, end).attend(window_attention)
        assert torch.equal(alone, together[first + begin : first + end])
    monkeypatch.setattr(attention, "PARTS_BYTES", 9000)
    assert torch.equal(batch.attend(window_attention), together)


def test_where_bits_must_not_depend_on_chunks_every_sequence_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    batch = make_batch("all")
    whole = batch.attend(window_attention)
    assert_expected(batch, whole)
    assert torch.equal(batch.only(2, 3, 4).attend(window_attention), whole[6:7])


def test_other_calls_pass_to_the_definition() -> None:
    batch = make_batch("all", dim=24)
    assert torch.equal(batch.attend(window_attention), batch.attend(reference_compressed))
    batch = make_batch("none")
    chunked = replace(batch, q=batch.q[..., ::2], cache=batch.cache[..., ::2])
    assert torch.equal(chunked.attend(window_attention), chunked.attend(reference_compressed))
    assert batch.only(0, 0, 0).attend(window_attention).shape == (0, 5, DIM)
