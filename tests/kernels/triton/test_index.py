"""The choice of the tokens that sparse attention sees, in Triton, interpreted: storing, scores, and the choice itself.

Scores may differ from the definition's by rounding; the choice among given scores is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference_index
from pagewick.kernels.options import AttentionMetadata, Rotation, SelectedKeys
from pagewick.kernels.reference_rope import rotate
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers
from tests.kernels.triton.harness import IS_COMPILED

from pagewick.kernels.triton import index, selection  # isort: skip  (the harness skips this module without Triton)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DIM, ROPE_DIM, BLOCK_SIZE = 32, 8, 16
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Batch:
    """The arguments of select_keys, as in tests/kernels/test_index.py."""

    q: Tensor
    weights: Tensor
    cache: Tensor
    metadata: AttentionMetadata
    tables: Tensor
    rotation: Rotation

    def select(self, operations: Any, top_k: int) -> SelectedKeys:
        found: SelectedKeys = operations.select_keys(
            self.q, self.weights, self.cache, self.metadata, self.tables, rotation=self.rotation, top_k=top_k
        )
        return found

    def only(self, seq: int, begin: int, end: int) -> Batch:
        """Some new tokens of one sequence, as a batch of their own."""
        first, last = self.metadata.cu_seqlens_q[seq : seq + 2].tolist()
        part = slice(first + begin, first + end)
        cos, sin, interleaved = self.rotation
        metadata = AttentionMetadata(
            self.metadata.block_tables[seq : seq + 1],
            self.metadata.context_lens[seq : seq + 1] - (last - first - end),
            torch.tensor([0, end - begin], dtype=torch.int32),
        )
        return replace(
            self, q=self.q[part], weights=self.weights[part], metadata=metadata, tables=self.tables[seq : seq + 1],
            rotation=Rotation(cos[part], sin[part], interleaved),
        )  # fmt: skip

    def scores(self, first_token: int = 0, num_rows: int | None = None, top_k: int = 0) -> Tensor:
        """The kernel's scores; NaN where it writes none."""
        num_rows = len(self.q) - first_token if num_rows is None else num_rows
        found = torch.full((num_rows, self.metadata.block_tables.shape[1] * BLOCK_SIZE), NAN)
        queries = index.turned(self.q, self.cache.dtype, self.rotation)
        options = {"first_token": first_token, "top_k": top_k}
        index.score(queries, self.weights, self.cache, self.metadata, found, **options)
        return found


def metadata_of(q_lens: list[int], context_lens: list[int], *, seed: int = 0) -> tuple[AttentionMetadata, Tensor, int]:
    """Metadata whose blocks are in random order, other tables of the same shape, and the number of blocks.

    Blocks that no sequence has are behind the others, and places of tables that no token needs name one of them.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context_len // BLOCK_SIZE) for context_len in context_lens]
    total = sum(num_blocks)
    tables = torch.full((2, len(q_lens), max(num_blocks) + 1), total, dtype=torch.int32)
    for table in tables:
        ids = torch.randperm(total, generator=generator).int().split(num_blocks)
        for seq, own in enumerate(ids):
            table[seq, : len(own)] = own
    lens = torch.tensor(context_lens, dtype=torch.int32)
    return AttentionMetadata(tables[0], lens, torch.tensor([0, *q_lens]).cumsum(0).int()), tables[1], total + 1


def make_batch(
    q_lens: list[int], context_lens: list[int], *, heads: int = 5, dim: int = DIM, dtype: torch.dtype = torch.float32,
    interleaved: bool = False, is_whole: bool = False,
) -> Batch:  # fmt: skip
    """A batch of normally distributed numbers, or of small whole ones, which every order of additions sums exactly."""
    metadata, tables, num_blocks = metadata_of(q_lens, context_lens)
    num_tokens = sum(q_lens)
    q, cache = numbers(num_tokens, heads, dim), numbers(num_blocks, BLOCK_SIZE, dim, seed=1)
    weights, angles = numbers(num_tokens, heads, seed=2), numbers(num_tokens, ROPE_DIM // 2, seed=3)
    if is_whole:
        q, cache, weights, angles = (each.round() for each in (q, cache, weights, angles))
        angles *= torch.pi / 2
    cos, sin = angles.cos(), angles.sin()
    if is_whole:
        cos, sin = cos.round(), sin.round()
    # Nobody may read these.
    cache[-1] = NAN
    return Batch(q.to(dtype), weights, cache.to(dtype), metadata, tables, Rotation(cos, sin, interleaved))


def visible(metadata: AttentionMetadata) -> list[tuple[int, int]]:
    """The sequence of each token, and how many tokens it sees."""
    starts, lens = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
    return [
        (seq, length - starts[seq + 1] + token + 1)
        for seq, length in enumerate(lens)
        for token in range(starts[seq], starts[seq + 1])
    ]


def assert_scores(batch: Batch, found: Tensor, *, first_token: int = 0, top_k: int = 0) -> None:
    """That scores are the sums in float64 but for rounding, and that there are no others."""
    cos, sin, interleaved = batch.rotation
    queries = rotate(batch.q.float(), cos.unsqueeze(1), sin.unsqueeze(1), interleaved).to(batch.cache.dtype).double()
    seen = visible(batch.metadata)[first_token : first_token + len(found)]
    for row, (seq, number) in enumerate(seen):
        written = number if number > top_k else 0
        assert bool(found[row, written:].isnan().all())
        blocks = batch.metadata.block_tables[seq].long()
        keys = batch.cache[blocks].flatten(0, 1)[:written].double()
        products = (queries[first_token + row] @ keys.T).clamp(min=0)
        weights = batch.weights[first_token + row].double()
        expected, sizes = weights @ products, weights.abs() @ products
        error = (found[row, :written].double() - expected).abs()
        # Half a unit in the last place of a product whose numbers are rounded twice, in an interpreter that cuts off.
        part = 2**-6 if batch.cache.dtype == torch.bfloat16 and not IS_COMPILED else 4e-6
        assert bool((error <= part * sizes + 1e-6).all())


@pytest.mark.parametrize(("heads", "dtype", "interleaved"), [(5, torch.float32, True), (33, torch.bfloat16, False)])
def test_scores(heads: int, dtype: torch.dtype, interleaved: bool) -> None:
    """Few and many new tokens, more than a tile of keys, and as many tokens at once as there is memory for."""
    batch = make_batch([1, 2, 18], [1, 20 if dtype == torch.float32 else 130, 19], heads=heads, dtype=dtype)
    batch = replace(batch, rotation=batch.rotation._replace(interleaved=interleaved))
    assert_scores(batch, batch.scores())
    assert_scores(batch, batch.scores(2, 6, top_k=3), first_token=2, top_k=3)


def test_a_score_has_the_same_bits_in_any_company() -> None:
    batch = make_batch([2, 18], [50, 20])
    together = batch.scores()
    for begin, end in ((0, 17), (17, 18)):
        alone = batch.only(1, begin, end).scores()
        assert torch.equal(alone.nan_to_num(7), together[2 + begin : 2 + end, : alone.shape[1]].nan_to_num(7))


def test_scores_of_numbers_that_are_none() -> None:
    """NaN and infinity in a key reach its own score; heads of padding add nothing."""
    batch = make_batch([2], [40], is_whole=True)
    key = batch.cache[batch.metadata.block_tables[0, 1]]
    # Behind the part that is rotated.
    batch.q[:, :, 20], batch.weights[:] = 2, 1
    key[3], key[5], key[7, 20] = NAN, 0, INF
    found = batch.scores()[:, :39]
    cos, sin, interleaved = batch.rotation
    queries = rotate(batch.q, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    keys = batch.cache[batch.metadata.block_tables[0].long()].flatten(0, 1)[:39]
    expected = torch.einsum("qh,qhk->qk", batch.weights, torch.einsum("qhd,kd->qhk", queries, keys).relu())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert bool(found[:, 19].isnan().all()) and found[:, [21, 23]].tolist() == [[0, INF]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_keys_are_those_of_the_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole numbers, of which many scores are equal: all sums are exact."""
    batch = make_batch([4, 1, 9], [4, 33, 50], dtype=dtype, is_whole=True, interleaved=dtype == torch.float16)
    num_keys = batch.tables.shape[1] * BLOCK_SIZE
    if dtype == torch.float32:
        # Memory for five tokens at once.
        monkeypatch.setattr(index, "SCORES_BYTES", 5 * selection.row_bytes(num_keys))
    for top_k in (6, num_keys):
        found, expected = batch.select(index, top_k), batch.select(reference_index, top_k)
        assert torch.equal(found.counts, expected.counts) and torch.equal(found.starts, expected.starts)
        for row, other, count in zip(found.slots, expected.slots, found.counts.tolist(), strict=True):
            assert row[:count].tolist() == other[:count].tolist()


@pytest.mark.parametrize("has_tables", [True, False])
def test_keys_that_stand_for_several_tokens(has_tables: bool) -> None:
    """The first tokens of a sequence see no key; chosen keys are looked up, or are numbers."""
    batch = make_batch([5, 1, 9], [5, 170, 50], is_whole=True)
    tables = batch.tables if has_tables else None
    for top_k in (3, 99):
        found, expected = (
            operations.select_keys(
                batch.q, batch.weights, batch.cache, batch.metadata, tables, rotation=batch.rotation, top_k=top_k,
                ratio=4,
            )
            for operations in (index, reference_index)
        )  # fmt: skip
        assert torch.equal(found.counts, expected.counts) and torch.equal(found.starts, expected.starts)
        assert found.counts.tolist() == [min(top_k, number // 4) for _, number in visible(batch.metadata)]
        for row, other, count in zip(found.slots, expected.slots, found.counts.tolist(), strict=True):
            assert row[:count].tolist() == other[:count].tolist()


def choose(scores: Tensor, metadata: AttentionMetadata, tables: Tensor, top_k: int) -> SelectedKeys:
    """Return the tokens that the kernels choose by given scores [T, keys]."""
    tokens = selection.numbered(metadata, len(scores), top_k)
    choice = selection.Choice(len(scores), scores.shape[1], scores.device)
    choice.scores.copy_(scores)
    choice.run(tokens, 0, len(scores), tables, BLOCK_SIZE)
    return tokens.selected


def assert_chosen(scores: Tensor, metadata: AttentionMetadata, tables: Tensor, top_k: int, found: SelectedKeys) -> None:
    assert found.starts.tolist() == list(range(len(scores) + 1))
    for row, (seq, number) in enumerate(visible(metadata)):
        own = scores[row, :number]
        # A stable sort: falling scores, and behind them NaN.
        order = own.nan_to_num(nan=0.0, posinf=INF, neginf=-INF).sort(descending=True, stable=True).indices
        best = torch.cat((order[~own[order].isnan()], own.isnan().nonzero()[:, 0]))[:top_k].sort().values
        assert found.counts[row] == len(best)
        table = tables[seq].long()
        expected = table[best // BLOCK_SIZE] * BLOCK_SIZE + best % BLOCK_SIZE
        assert found.slots[row, : len(best)].tolist() == expected.tolist()


@pytest.mark.parametrize("top_k", [1, 100, 300])
def test_the_choice_is_that_of_a_stable_sort(top_k: int) -> None:
    """Sequences of unequal length, equal scores, and those that are no numbers; some tokens see as many as top_k."""
    metadata, tables, _ = metadata_of([1, 3, 6, 1], [1, top_k + 1, 333, 500])
    scores = numbers(11, tables.shape[1] * BLOCK_SIZE)
    scores[1:4] = scores[1:4].round()
    scores[4, ::3], scores[4, 1::3], scores[5], scores[6] = 0.0, -0.0, NAN, -INF
    scores[7, ::2], scores[8, 1::2], scores[8, ::4] = NAN, -INF, NAN
    scores[9, ::5], scores[9, 1::5] = INF, 1e-45
    scores[10] = torch.where(scores[10] > 0, torch.finfo(torch.float32).max, scores[10])
    assert_chosen(scores, metadata, tables, top_k, choose(scores, metadata, tables, top_k))


def test_the_choice_among_more_scores_than_a_program_takes() -> None:
    """Parts that are counted one after the other: equal scores in two of them, and differences of the last bits."""
    top_k, num_keys = 2048, 8 * selection.PART + 77
    metadata, tables, _ = metadata_of([1, 2], [2049, num_keys])
    scores = numbers(3, tables.shape[1] * BLOCK_SIZE)
    scores[1, 7 * selection.PART - 1000 : 7 * selection.PART + 2000] = 9.0
    scores[2] = 1 + torch.randperm(scores.shape[1]) // 3 * 2**-23
    chosen = choose(scores, metadata, tables, top_k)
    assert_chosen(scores, metadata, tables, top_k, chosen)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_keys_are_those_of_the_definition(dtype: torch.dtype, interleaved: bool) -> None:
    keys, slots = numbers(20, DIM + 16).to(dtype)[:, :DIM], torch.randperm(70)[:20]
    slots[[3, 17]] = -1
    cos, sin = numbers(2, 20, ROPE_DIM // 2, seed=2)
    for stored in {dtype, torch.float32}:
        caches = [torch.full((5, BLOCK_SIZE, DIM), 7.0, dtype=stored) for _ in range(2)]
        for operations, cache in zip((index, reference_index), caches, strict=True):
            operations.store_index_keys(keys, cache, slots, rotation=Rotation(cos, sin, interleaved))
        assert_near(*caches)


def test_stored_keys_of_512_numbers_that_all_rotate() -> None:
    """DeepSeek V4's, which are its values, too; the first pairs stand still."""
    keys, slots, angles = numbers(5, 512).half(), torch.tensor([3, -1, 40, 0, 69]), numbers(5, 256, seed=2)
    angles[:, :224] = 0
    caches = [torch.full((5, BLOCK_SIZE, 512), 7.0, dtype=torch.float16) for _ in range(2)]
    for operations, cache in zip((index, reference_index), caches, strict=True):
        operations.store_index_keys(keys, cache, slots, rotation=Rotation(angles.cos(), angles.sin(), True))
    assert_near(*caches)
    assert [(cache != 7).any(2).sum() for cache in caches] == [4, 4]


def test_other_calls_pass_to_the_definition() -> None:
    batch = make_batch([3], [40], is_whole=True)
    narrow = replace(batch, q=batch.q[..., :24].contiguous(), cache=batch.cache[..., :24].contiguous())
    many = replace(batch, q=batch.q.repeat(1, 13, 1), weights=batch.weights.repeat(1, 13))
    blocks = replace(batch, cache=batch.cache[:, :13].contiguous())
    for other in (narrow, many, blocks):
        assert all(map(torch.equal, other.select(index, 6), other.select(reference_index, 6)))
    nothing = batch.only(0, 0, 0)
    assert [len(each) for each in nothing.select(index, 6)] == [0, 0, 1]
