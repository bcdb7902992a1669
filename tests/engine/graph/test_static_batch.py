"""Padded batches: their sizes, what stands for padding, and the two pieces of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.graph.static_batch import PaddedSize, StaticBatch, padded_number
from pagewick.engine.host_batch import HostBatch, LastSampled, ragged_batch
from pagewick.engine.step_memory import GRAPH_TOKENS
from tests.engine.graph.late_device import DEVICE, LateDevice, late_device
from tests.engine.requests import full_spec, recurrent_spec, window_spec

MAX_NUM_SEQS, MAX_MODEL_LEN = 20, 2000
NULL_BLOCKS = [600, 77, 33]


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as found:
        yield found


def specs() -> list[CacheSpec]:
    return [full_spec(4), window_spec(lookback=3, block_size=8), recurrent_spec(16)]


def make(device: LateDevice) -> StaticBatch:
    return StaticBatch(
        specs(), NULL_BLOCKS, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, device=DEVICE, stream=device
    )


def random_batch(random: Random, num_tokens: list[int], *, is_known: bool = False) -> HostBatch:
    """Sequences with this many new tokens."""
    starts = [random.randrange(900) for _ in num_tokens]
    total = sum(num_tokens)
    longest = max(start + count for start, count in zip(starts, num_tokens, strict=True))
    tables = [
        np.array([[random.randrange(70) for _ in range(spec.table_width(longest))] for _ in num_tokens], np.int32)
        for spec in specs()
    ]
    sources = np.array([random.randrange(MAX_NUM_SEQS) for _ in range(total)])
    return HostBatch(
        **{
            name: getattr(
                ragged_batch(
                    np.array([random.randrange(1, 1000) for _ in range(total)]),
                    starts=starts, num_tokens=num_tokens, block_tables=tables, specs=specs(),
                ),
                name,
            )
            for name in ("input_ids", "positions", "cu_seqlens_q", "context_lens", "slot_mappings", "block_tables")
        },
        last_sampled=None if is_known else LastSampled(sources, torch.zeros(MAX_NUM_SEQS + 1, dtype=torch.int64)),
        extras=[np.array([random.randrange(9) for _ in num_tokens]), np.array([random.random() for _ in num_tokens])],
    )  # fmt: skip


def test_padded_numbers_are_few_and_near() -> None:
    numbers = [padded_number(number) for number in range(1, GRAPH_TOKENS + 1)]
    assert numbers[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10] and numbers[-1] == GRAPH_TOKENS
    assert numbers == sorted(numbers) and len(set(numbers)) == 32
    assert all(number <= padded <= 1.25 * number for number, padded in enumerate(numbers, start=1))


@pytest.mark.parametrize("seed", range(12))
def test_a_padded_batch_has_the_batch_and_sequences_that_touch_only_null_blocks(seed: int, device: LateDevice) -> None:
    random = Random(seed)
    lens = [random.choice([1, 1, 1, 3, 5]) for _ in range(random.randint(1, MAX_NUM_SEQS))]
    given = random_batch(random, [1] * len(lens) if seed % 3 == 0 else lens, is_known=seed % 4 == 1)
    static = make(device)
    # Something longer was there before.
    for before in (random_batch(random, [17] * 9, is_known=given.last_sampled is None) for _ in range(2)):
        static.write(before, static.size_for(before))
    size = static.size_for(given)
    found = [tensor.cpu().numpy() for tensor in static.write(given, size)]
    num_tokens, num_seqs = len(given.input_ids), len(given.context_lens)
    assert size.num_tokens == padded_number(size.num_tokens) and size.num_seqs == padded_number(size.num_seqs)
    for ours, theirs in zip(found, given.arrays(), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours[tuple(slice(length) for length in theirs.shape)], theirs)
    input_ids, positions, cu_seqlens_q, context_lens, *rest = found
    assert (len(input_ids), len(context_lens)) == (size.num_tokens, size.num_seqs)
    query_lens = np.diff(cu_seqlens_q)
    assert cu_seqlens_q[-1] == size.num_tokens and (query_lens >= 1).all()
    assert not input_ids[num_tokens:].any() and not positions[:, num_tokens:].any()
    np.testing.assert_array_equal(context_lens[num_seqs:], query_lens[num_seqs:])
    for spec, null_block, slots, tables in zip(specs(), NULL_BLOCKS, rest[:3], rest[3:6], strict=True):
        assert (slots[num_tokens:] == null_block * (1 if spec.has_snapshots else spec.block_size)).all()
        # A row of states ends with the number of tokens behind which one is stored; 0: behind all.
        padding = [null_block, null_block, 0] if spec.has_snapshots else null_block
        assert (tables[num_seqs:] == padding).all()
        assert (tables[:num_seqs, given.block_tables[specs().index(spec)].shape[1] :] == null_block).all()
        assert all(tables.shape[1] >= spec.table_width(length) for length in context_lens.tolist())
    if given.last_sampled is not None:
        assert (rest[-1][num_tokens:] == MAX_NUM_SEQS).all(), "the place that stays 0"


@pytest.mark.parametrize("context_len", [512, 1024, 2000])
def test_a_table_may_have_blocks_beyond_the_context(context_len: int, device: LateDevice) -> None:
    """Draft tokens get blocks before they are computed, and rejected ones leave some behind."""
    width = [spec.table_width(context_len) + 2 for spec in specs()]
    given = ragged_batch(
        np.array([1]), starts=[context_len - 1], num_tokens=[1], specs=specs(),
        block_tables=[np.arange(3, 3 + columns, dtype=np.int32)[None] for columns in width],
    )  # fmt: skip
    static = make(device)
    tables = [tensor.cpu().numpy() for tensor in static.write(given, static.size_for(given))[7:10]]
    for spec, found, table in zip(specs(), tables, given.block_tables, strict=True):
        needed = spec.table_width(context_len)
        np.testing.assert_array_equal(found[0, :needed], table[0, :needed])


def test_tables_grow_by_factors_of_two_up_to_the_longest_sequence(device: LateDevice) -> None:
    static, random = make(device), Random(1)
    widths = {}
    for context_len in (1, 512, 513, 1024, 1025, 2000):
        given = ragged_batch(
            np.array([1]), starts=[context_len - 1], num_tokens=[1], specs=specs(),
            block_tables=[np.zeros((1, spec.table_width(context_len)), np.int32) for spec in specs()],
        )  # fmt: skip
        size = static.size_for(given)
        widths[context_len] = [tensor.shape[1] for tensor in static.write(given, size)[7:10]]
    assert widths == {
        1: [128, 64, 3], 512: [128, 64, 3], 513: [256, 128, 3], 1024: [256, 128, 3], 1025: [500, 250, 3],
        2000: [500, 250, 3],
    }  # fmt: skip
    assert static.size_for(random_batch(random, [1] * 7)) == PaddedSize(7, 7, 1024)


def test_a_batch_is_packed_while_the_batch_before_it_awaits_its_copy(device: LateDevice) -> None:
    random = Random(3)
    static, device.counts = make(device), type(device.counts)()
    batches = [random_batch(random, [1, 1, 1]) for _ in range(6)]
    size = PaddedSize(4, 4, 1024)
    seen = []
    for number, given in enumerate(batches):
        seen.append(static.write(given, size)[0].clone())
        # The first two are packed at once; each further one waits for the copy of the one before the last.
        assert device.counts == ({"event": number - 1} if number > 1 else {})
    for given, copy in zip(batches, seen, strict=True):
        assert copy.tolist()[:3] == given.input_ids.tolist()


class Forgetful(list[None]):
    """A list that stays as it is."""

    def __setitem__(self, *args: object) -> None:
        pass


def test_without_the_events_a_batch_is_overwritten_before_its_copy(device: LateDevice) -> None:
    """The test above would notice a mistake."""
    random = Random(3)
    static = make(device)
    static._copied = Forgetful([None, None])  # type: ignore[assignment]
    batches = [random_batch(random, [1, 1, 1]) for _ in range(3)]
    seen = [static.write(given, PaddedSize(4, 4, 1024))[0].clone() for given in batches]
    assert seen[0].tolist()[:3] == batches[2].input_ids.tolist() != batches[0].input_ids.tolist()
