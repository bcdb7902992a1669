"""Shares and the queue, against their definitions."""

from __future__ import annotations

from random import Random

from pagewick.engine.scheduling import fair_queue
from pagewick.engine.scheduling.fair_queue import FairQueue, FairShares
from pagewick.engine.scheduling.lazy_heap import LazyHeap
from pagewick.engine.sequence import Sequence
from tests.engine.requests import sequence


class VirtualCounters:
    """Algorithm 2 of Sheng et al. 2024, with w_p = 1 and w_q = 2: a counter per key, lifted when a key comes (back)."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.present: list[str] = []

    def join(self, key: str) -> None:
        if key not in self.present:
            lowest = [self.counters[other] for other in self.present]
            self.counters[key] = max(self.counters.get(key, 0), min(lowest)) if lowest else 0
        self.present.append(key)

    def leave(self, key: str) -> None:
        self.present.remove(key)
        if not self.present:
            self.counters.clear()

    def charge(self, key: str, num_input_tokens: int, num_output_tokens: int) -> None:
        self.counters[key] += num_input_tokens + 2 * num_output_tokens


def test_shares_are_virtual_token_counters() -> None:
    random, shares, expected = Random(5), FairShares(), VirtualCounters()
    keys = ["", "a", "b", "c"]
    num_lifts = 0
    for _ in range(3000):
        key = random.choice(keys)
        if random.random() < 0.3 and len(expected.present) < 6:
            before = expected.counters.get(key, 0)
            shares.join(key)
            expected.join(key)
            num_lifts += expected.counters[key] > before
        elif key in expected.present and random.random() < 0.4:
            shares.leave(key)
            expected.leave(key)
        elif key in expected.present:
            numbers = (random.randrange(50), random.randrange(5))
            shares.charge(key, *numbers)
            expected.charge(key, *numbers)
        for present in set(expected.present):
            rank = shares.rank(sequence([1], fairness_key=present, priority=3, arrival=7, choice_index=2))
            assert rank == (3, expected.counters[present], (3, 7, 2))
    assert num_lifts > 50


def test_no_more_absent_keys_are_remembered_than_there_is_room_for(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fair_queue, "_MAX_ABSENT_KEYS", 3)
    shares = FairShares()
    shares.join("stays")
    for number in range(10):
        shares.join(str(number))
        shares.charge(str(number), number, 0)
        shares.leave(str(number))
    assert shares._served.keys() == {"stays", "7", "8", "9"}
    shares.leave("stays")
    assert not shares._served


def test_the_head_is_the_least_of_all_that_wait() -> None:
    random, shares = Random(6), FairShares()
    queue = FairQueue(shares)
    waiting: list[Sequence] = []
    for key in "abc":
        shares.join(key)
    for number in range(2000):
        if random.random() < 0.5 or not waiting:
            seq = sequence(
                range(1 + random.randrange(9)),
                arrival=number // 2,
                choice_index=number % 2,
                priority=random.choice([0, 0, 1, -1]),
                fairness_key=random.choice("abc"),
            )
            assert seq not in queue
            queue.add(seq)
            waiting.append(seq)
        else:
            seq = random.choice(waiting) if random.random() < 0.5 else queue.head()
            assert seq is not None and seq in queue
            queue.remove(seq)
            waiting.remove(seq)
        shares.charge(random.choice("abc"), random.randrange(5), 0)
        assert queue.head() is min(waiting, key=shares.rank, default=None)
        assert (len(queue), queue.num_tokens) == (len(waiting), sum(seq.num_tokens for seq in waiting))
        assert set(queue) == set(waiting)


def test_requests_that_never_started_and_the_oldest_are_known() -> None:
    random, shares = Random(7), FairShares()
    shares.join("")
    queue, waiting = FairQueue(shares), list[Sequence]()
    for number in range(600):
        if random.random() < 0.55 or not waiting:
            seq = sequence(range(1 + random.randrange(9)), arrival=number, priority=random.choice([0, 1]))
            seq.owner.num_cached_tokens = random.choice([None, 0])
            queue.add(seq)
            waiting.append(seq)
        else:
            seq = waiting.pop(random.randrange(len(waiting)))
            queue.remove(seq)
            if random.random() < 0.5:  # it was preempted
                seq.owner.num_cached_tokens = 0
                queue.add(seq)
                waiting.append(seq)
        newcomers = [seq for seq in waiting if seq.owner.num_cached_tokens is None]
        assert queue.num_newcomers == len(newcomers)
        assert queue.num_newcomer_tokens == sum(seq.num_prompt_tokens for seq in newcomers)
        assert queue.oldest is min(waiting, key=lambda seq: seq.arrival, default=None)


def test_what_was_removed_is_not_kept_for_long() -> None:
    heap: LazyHeap[int] = LazyHeap()
    for number in range(10_000):
        heap.add(number, -number)
    for number in range(5_000, 9_990):
        heap.remove(number)
    for number in range(5_000):
        heap.remove(number)
    assert sorted(heap) == [*range(9_990, 10_000)] and heap.first() == 9_999
    assert len(heap._entries) < 100
