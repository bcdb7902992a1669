"""Memory in huge pages, and memory that a thread asks for ahead of those who use it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewick import devices, huge_memory
from pagewick.huge_memory import HUGE_PAGE, allocate, apart, num_ready_bytes, prepared

MIB = 2**20


def address_of(piece: tuple[mmap.mmap, int]) -> int:
    memory, offset = piece
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def wait_until_ready(num_bytes: int) -> None:
    while num_ready_bytes() < num_bytes:
        time.sleep(0.001)


def test_memory_begins_at_a_huge_page_and_holds_zeros_to_its_end() -> None:
    for num_bytes in (1, 4095, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 17):
        memory, offset = piece = allocate(num_bytes)
        assert address_of(piece) % HUGE_PAGE == 0
        assert memory[offset : offset + num_bytes] == bytes(num_bytes)
        memory[offset + num_bytes - 1] = 7


def test_the_first_bytes_can_be_in_small_pages() -> None:
    memory, offset = allocate(64 * MIB, num_small_bytes=HUGE_PAGE)
    before = resident_bytes()
    memory[offset] = 1
    assert resident_bytes() - before < HUGE_PAGE // 2
    memory[offset + 64 * MIB - 1] = 1


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40 * MIB),
    st.lists(st.integers(1, 12 * MIB), min_size=1, max_size=12),
    st.floats(0, 0.005),
    st.booleans(),
)
def test_nobody_writes_into_what_was_given_away(
    num_prepared: int, sizes: list[int], pause_s: float, can_populate: bool
) -> None:
    def zero_slowly(address: int, value: int, count: int) -> None:
        time.sleep(0.003)
        ctypes.memset(address, value, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_memory, "memset", zero_slowly)
        if not can_populate:
            patch.setattr(huge_memory, "madvise", lambda address, num_bytes, advice: False)
        patch.setattr(huge_memory, "_NUM_ZEROED", HUGE_PAGE)
        patch.setattr(huge_memory, "_NUM_POPULATED", HUGE_PAGE // 2)
        with prepared(num_prepared):
            time.sleep(pause_s)
            pieces = []
            for number, size in enumerate(sizes, 1):
                memory, offset = piece = allocate(size)
                # To look takes time in which the thread may have gone on.
                assert number % 2 or not any(memory[offset : offset + size : 4096])
                memory[offset : offset + size] = bytes([number]) * size
                pieces.append((address_of(piece), memory, offset, size, number))
    for _, memory, offset, size, number in pieces:
        assert memory[offset : offset + size] == bytes([number]) * size
    pieces.sort()
    assert all(first[0] + first[3] <= second[0] for first, second in itertools.pairwise(pieces))


def test_memory_is_there_before_anybody_wants_it_and_what_nobody_wanted_goes_back() -> None:
    before = resident_bytes()
    with prepared(128 * MIB):
        wait_until_ready(128 * MIB)
        assert resident_bytes() - before > 120 * MIB
        memory, offset = allocate(16 * MIB)
        assert num_ready_bytes() == 112 * MIB
    memory[offset : offset + 16 * MIB] = b"a" * (16 * MIB)
    assert num_ready_bytes() == 0
    assert resident_bytes() - before < 32 * MIB


def test_what_is_ready_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = type("Memory", (), {"available": 10 * MIB, "total": 100 * MIB})
    monkeypatch.setattr(psutil, "virtual_memory", machine)
    monkeypatch.setattr(devices, "read_limits", devices.read_limits().__class__)
    with prepared(8 * MIB):
        wait_until_ready(8 * MIB)
        assert devices.available_memory("cpu") == 18 * MIB
        allocate(2 * MIB)
        assert devices.available_memory("cpu") == 16 * MIB
    assert devices.available_memory("cpu") == 10 * MIB


def test_what_does_not_fit_has_memory_of_its_own() -> None:
    with prepared(8 * MIB):
        whole, inside = allocate(9 * MIB), allocate(8 * MIB)
        assert whole[0] is not inside[0]
        assert allocate(MIB)[0] is not inside[0]


def test_one_is_prepared_at_a_time() -> None:
    with prepared(8 * MIB):
        outer, _ = allocate(MIB)
        with prepared(8 * MIB):
            assert allocate(MIB)[0] is outer
        assert allocate(MIB)[0] is outer
    assert allocate(MIB)[0] is not outer


def test_what_is_apart_goes_back_by_itself() -> None:
    with prepared(64 * MIB):
        kept = allocate(HUGE_PAGE)
        with apart():
            memory, offset = allocate(64 * MIB)
            assert num_ready_bytes() == 0
        memory[offset : offset + 64 * MIB] = b"a" * (64 * MIB)
        wait_until_ready(62 * MIB)
        before = resident_bytes()
        del memory
        assert before - resident_bytes() > 60 * MIB
        assert allocate(HUGE_PAGE)[0] is kept[0]


def no_memory(*args: object, **kwargs: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def no_thread(*args: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("where", "what", "failure"), [
    (huge_memory, "_Prepared", no_memory), (threading.Thread, "start", no_thread),
])  # fmt: skip
def test_what_cannot_be_prepared_is_no_mistake(
    where: object, what: str, failure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, what, failure)
    with prepared(8 * MIB):
        memory, offset = allocate(MIB)
        memory[offset + MIB - 1] = 1
    assert num_ready_bytes() == 0


@pytest.mark.parametrize("num_bytes", [0, HUGE_PAGE - 1])
def test_little_is_not_worth_a_thread(num_bytes: int) -> None:
    with prepared(num_bytes):
        assert num_ready_bytes() == 0
        assert "memory" not in {thread.name for thread in threading.enumerate()}


def test_the_thread_ends_with_a_failure() -> None:
    before = resident_bytes()
    with pytest.raises(KeyError), prepared(512 * MIB):
        raise KeyError
    assert "memory" not in {thread.name for thread in threading.enumerate()}
    assert resident_bytes() - before < 64 * MIB
