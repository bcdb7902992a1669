"""Transfers between the tiers against their definition: one after the other, each block a value in a dictionary."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewick.engine.batch import Tier, Transfer
from pagewick.engine.cache import block_store
from pagewick.engine.cache.block_store import BlockStore, batches
from pagewick.engine.cache.disk_store import DiskStore
from pagewick.errors import ConfigError

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
KINDS = [
    (DEVICE, DEVICE),
    (DEVICE, HOST),
    (HOST, DEVICE),
    (DEVICE, DISK),
    (HOST, DISK),
    (DISK, DEVICE),
    (DISK, HOST),
    (DISK, DISK),
]

# Per group.
NUM_LAYERS = (3, 1)
LAYER_BYTES = (7, 10)
NUM_BLOCKS = (5, 4)
NUM_HOST_BLOCKS = (4, 3)
BLOCK_BYTES = [layers * width for layers, width in zip(NUM_LAYERS, LAYER_BYTES, strict=True)]
KEYS = [bytes([number]) * 16 for number in range(4)]

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# On a CPU, too, the way over staged copies that a GPU needs has to be right.
ways = pytest.mark.parametrize(
    ("device", "is_staged"), [("cpu", False), *((device, True) for device in DEVICES)], ids=str
)


def make_caches(device: str, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(0, 256, (NUM_BLOCKS[group], LAYER_BYTES[group]), dtype=torch.uint8, generator=generator).to(
                device
            )
            for _ in range(NUM_LAYERS[group])
        ]
        for group in range(2)
    ]


@contextmanager
def make_store(caches: list[list[Tensor]], *, is_staged: bool = False) -> Iterator[tuple[BlockStore, DiskStore]]:
    with tempfile.TemporaryDirectory() as name:
        disk = DiskStore(Path(name), fingerprint="cafe", block_bytes=BLOCK_BYTES, share="0-of-1")
        with closing(BlockStore(caches, NUM_HOST_BLOCKS, disk)) as store:
            store._is_staged = is_staged
            yield store, disk


def content(caches: list[list[Tensor]], group: int, block: int) -> bytes:
    """A block of the pool, layer by layer."""
    return b"".join(bytes(cache[block].tolist()) for cache in caches[group])


class Model:
    """The content of every block, by (group, tier, its number or key); None where it is undefined."""

    def __init__(self, caches: list[list[Tensor]]) -> None:
        self.contents: dict[tuple[int, int, int | bytes], bytes | None] = {
            (group, DEVICE, block): content(caches, group, block)
            for group in range(2)
            for block in range(NUM_BLOCKS[group])
        }

    def run(self, transfers: Sequence[Transfer]) -> list[bytes]:
        unreadable: list[bytes] = []
        for transfer in transfers:
            source, destination = (
                (transfer.group, tier, transfer.key if tier == DISK else number)
                for tier, number in (
                    (transfer.source_tier, transfer.source),
                    (transfer.destination_tier, transfer.destination),
                )
            )
            if transfer.source_tier == transfer.destination_tier == DISK:
                self.contents.pop(source, None)
                continue
            if transfer.source_tier == DISK and source not in self.contents and transfer.key not in unreadable:
                unreadable.append(transfer.key)
            self.contents[destination] = self.contents.get(source)
        return unreadable


@st.composite
def transfer(draw: st.DrawFn) -> Transfer:
    group = draw(st.integers(0, 1))
    kind = draw(st.sampled_from(KINDS))
    # Where a block has a key, its number means nothing.
    numbers = [
        draw(st.integers(0, {DEVICE: NUM_BLOCKS, HOST: NUM_HOST_BLOCKS}[tier][group] - 1)) if tier != DISK else -1
        for tier in kind
    ]
    key = draw(st.sampled_from(KEYS)) if DISK in kind else b""
    return Transfer(group, kind[0], numbers[0], kind[1], numbers[1], key)


@st.composite
def runs_of_a_kind(draw: st.DrawFn) -> list[Transfer]:
    """Many that could go together, in one group."""
    first = draw(transfer())
    same = transfer().filter(lambda other: other.group == first.group)
    others = draw(st.lists(same, max_size=6))
    limits = {DEVICE: NUM_BLOCKS, HOST: NUM_HOST_BLOCKS}
    return [
        Transfer(
            first.group,
            first.source_tier,
            other.source % limits[Tier(first.source_tier)][first.group] if first.source_tier != DISK else -1,
            first.destination_tier,
            other.destination % limits[Tier(first.destination_tier)][first.group]
            if first.destination_tier != DISK
            else -1,
            other.key or first.key,
        )
        for other in [first, *others]
    ]


PLANS = st.lists(st.lists(transfer(), max_size=8) | runs_of_a_kind(), min_size=1, max_size=5)


@ways
@settings(max_examples=150)
@given(plans=PLANS, max_batch_bytes=st.sampled_from([1, 45, 2**20]))
def test_any_transfers_have_the_outcome_of_one_after_the_other(
    device: str, is_staged: bool, plans: list[list[Transfer]], max_batch_bytes: int
) -> None:
    caches = make_caches(device)
    model = Model(caches)
    with pytest.MonkeyPatch.context() as patch, make_store(caches, is_staged=is_staged) as (store, disk):
        patch.setattr(block_store, "_MAX_BATCH_BYTES", max_batch_bytes)
        for plan in plans:
            assert store.run(plan) == model.run(plan)
        for key, group in itertools.product(KEYS, range(2)):
            found = disk.read_into(group, key, memoryview(bytearray(BLOCK_BYTES[group])))
            assert found == ((group, DISK, key) in model.contents)
        for (group, tier, place), expected in model.contents.items():
            out = bytearray(BLOCK_BYTES[group])
            if tier == DEVICE:
                out = bytearray(content(caches, group, int(place)))
            elif tier == HOST:
                out = bytearray(store._host[group][int(place)].tolist())
            else:
                assert isinstance(place, bytes) and disk.read_into(group, place, memoryview(out))
            assert expected is None or out == expected


@ways
def test_a_block_goes_through_every_tier(device: str, is_staged: bool) -> None:
    caches = make_caches(device)
    expected = content(caches, 0, 4)
    with make_store(caches, is_staged=is_staged) as (store, disk):
        way = [
            Transfer(0, DEVICE, 4, HOST, 3),
            Transfer(0, HOST, 3, DISK, -1, KEYS[0]),
            Transfer(0, DISK, -1, HOST, 0, KEYS[0]),
            Transfer(0, HOST, 0, DEVICE, 1),
            Transfer(0, DEVICE, 1, DEVICE, 2),
            Transfer(0, DEVICE, 2, DISK, -1, KEYS[1]),
            Transfer(0, DISK, -1, DEVICE, 0, KEYS[1]),
        ]
        with torch.inference_mode():  # as in a step
            assert store.run(way) == []
        assert [content(caches, 0, block) for block in (0, 1, 2, 4)] == [expected] * 4
        out = bytearray(BLOCK_BYTES[0])
        assert disk.read_into(0, KEYS[1], memoryview(out)) and bytes(out) == expected


@ways
@pytest.mark.parametrize("destination_tier", [DEVICE, HOST])
def test_blocks_that_disappear_from_disk(device: str, is_staged: bool, destination_tier: Tier) -> None:
    caches = make_caches(device)
    expected = content(caches, 0, 1)
    with make_store(caches, is_staged=is_staged) as (store, disk):
        store.run([Transfer(0, DEVICE, block, DISK, -1, KEYS[block]) for block in range(3)])
        disk.delete(0, KEYS[0])
        disk.delete(0, KEYS[2])
        wanted = [(0, 0), (1, 3), (2, 1), (0, 2)]
        reading = [Transfer(0, DISK, -1, destination_tier, place, KEYS[key]) for key, place in wanted]
        assert store.run(reading) == [KEYS[0], KEYS[2]]
        if destination_tier == HOST:
            store.run([Transfer(0, HOST, 3, DEVICE, 3)])
        assert content(caches, 0, 3) == expected


def test_one_key_names_a_block_in_every_group() -> None:
    caches = make_caches("cpu")
    expected = [content(caches, group, 0) for group in range(2)]
    with make_store(caches) as (store, _):
        store.run([Transfer(group, DEVICE, 0, DISK, -1, KEYS[0]) for group in range(2)])
        assert store.run([Transfer(group, DISK, -1, DEVICE, 3, KEYS[0]) for group in range(2)]) == []
        assert [content(caches, group, 3) for group in range(2)] == expected
        assert store.run([Transfer(group, DISK, -1, DEVICE, 3, KEYS[1]) for group in range(2)]) == [KEYS[1]]


def test_layers_of_other_blocks_are_left_alone() -> None:
    """A view into a larger tensor, as a backend may hand out, is written in its own bytes only."""
    whole = torch.zeros(4, 3, 5, dtype=torch.uint8)
    whole[:, 1] = torch.arange(4, dtype=torch.uint8)[:, None] + 1
    caches = [[whole[:, 1], torch.ones(4, 5, dtype=torch.uint8)]]
    store = BlockStore(caches, [1], None)
    store.run([Transfer(0, DEVICE, 3, HOST, 0), Transfer(0, HOST, 0, DEVICE, 0)])
    assert whole[0].tolist() == [[0] * 5, [4] * 5, [0] * 5]
    store.close()


# Batches


def copies(*pairs: tuple[int, int]) -> list[Transfer]:
    return [Transfer(0, DEVICE, source, DEVICE, destination) for source, destination in pairs]


@pytest.mark.parametrize(
    ("transfers", "sizes"),
    [
        ([], []),
        (copies((0, 1), (0, 2), (3, 4)), [3]),
        (copies((0, 1), (1, 2), (0, 3)), [1, 2]),  # reads what was written
        (copies((0, 1), (1, 2), (1, 3)), [1, 2]),  # what an earlier batch has written is there
        (copies((0, 1), (2, 0), (3, 4)), [3]),  # writes what was read
        (copies((0, 1), (2, 1), (3, 4)), [1, 2]),  # writes twice
        (copies((1, 1), (2, 3)), [2]),
        ([Transfer(0, DEVICE, 1, HOST, 0), Transfer(0, DEVICE, 0, HOST, 1)], [2]),  # other numbers in other tiers
        ([Transfer(0, DEVICE, 1, HOST, 0), Transfer(1, DEVICE, 0, HOST, 1)], [1, 1]),
        ([Transfer(0, DEVICE, 1, HOST, 0), Transfer(0, HOST, 0, DEVICE, 2), Transfer(0, HOST, 1, DEVICE, 3)], [1, 2]),
        ([Transfer(0, DEVICE, n, DISK, -1, KEYS[n]) for n in range(3)], [3]),
        ([Transfer(0, DISK, -1, DISK, -1, KEYS[n]) for n in range(3)], [3]),
        (copies(*((0, n) for n in range(1, 8))), [4, 3]),
    ],
)
def test_what_goes_together(transfers: list[Transfer], sizes: list[int]) -> None:
    found = list(batches(transfers, [4, 4]))
    assert [len(batch) for batch in found] == sizes
    assert [transfer for batch in found for transfer in batch] == transfers


# Memory


def test_host_memory_is_what_was_asked_for() -> None:
    with make_store(make_caches("cpu")) as (store, _):
        assert store.host_bytes == 4 * 3 * 7 + 3 * 10
        store.close()
        assert store.host_bytes == 0
    store = BlockStore(make_caches("cpu"), [0, 0], None)
    assert store.host_bytes == 0 and store.run(copies((0, 1))) == []


def test_host_memory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"host memory for 1125899906842624 KV blocks; lower --swap-space"):
        BlockStore(make_caches("cpu"), [2**50, 1], None)


@given(st.integers(1, 5000), st.sampled_from([1, 24, 1000, 4096, 114688]))
def test_pinned_memory_is_little_more_than_was_asked_for(num_rows: int, num_bytes: int) -> None:
    """PyTorch allocates it in powers of two."""
    taken: list[int] = []

    def pinned(count: int, width: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory and width == num_bytes
        taken.append(1 << (count * width - 1).bit_length())
        return torch.zeros(count, 1, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", pinned)
        assert len(block_store._pinned_rows(num_rows, num_bytes)) == num_rows
    # Few blocks are no whole part of any power of two.
    assert sum(taken) <= num_rows * num_bytes * (1.25 if num_rows > 16 else 2)
    assert len(taken) <= 5


def test_closing_waits_for_the_disk() -> None:
    caches = make_caches("cpu")
    with tempfile.TemporaryDirectory() as name:
        for expected in ([], KEYS):
            disk = DiskStore(Path(name), fingerprint="cafe", block_bytes=BLOCK_BYTES, share="0-of-1")
            assert disk.keys(1) == expected
            store = BlockStore(caches, NUM_HOST_BLOCKS, disk)
            store.run([Transfer(1, DEVICE, block, DISK, -1, KEYS[block]) for block in range(4)])
            store.close()


@pytest.mark.parametrize(
    "wrong",
    [
        Transfer(0, DEVICE, -1, DEVICE, 0),
        Transfer(0, DEVICE, 0, DEVICE, 5),
        Transfer(0, DEVICE, 0, HOST, -1),
        Transfer(0, HOST, 4, DEVICE, 0),
    ],
)
def test_numbers_that_no_block_has_are_our_mistake(wrong: Transfer) -> None:
    caches = make_caches("cpu")
    before = [content(caches, 0, block) for block in range(5)]
    with make_store(caches) as (store, _), pytest.raises(AssertionError):
        store.run([wrong])
    assert [content(caches, 0, block) for block in range(5)] == before


def test_a_way_that_no_block_goes() -> None:
    with make_store(make_caches("cpu")) as (store, _), pytest.raises(ValueError, match="no block goes"):
        store.run([Transfer(0, HOST, 0, HOST, 1)])


def test_large_runs_of_real_sizes() -> None:
    """More than goes at once, in a shuffled order, there and back."""
    dice = random.Random(5)
    cache = torch.randint(0, 256, (40, 2**16), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    original = cache.clone()
    places = dice.sample(range(40), 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_store, "_MAX_BATCH_BYTES", 7 * 2**16)
        store = BlockStore([[cache]], [40], None)
        store.run([Transfer(0, DEVICE, block, HOST, places[block]) for block in range(40)])
        cache.zero_()
        order = dice.sample(range(40), 40)
        store.run([Transfer(0, HOST, places[block], DEVICE, block) for block in order])
        store.close()
    assert torch.equal(cache, original)
