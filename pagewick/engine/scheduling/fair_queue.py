"""The order of the waiting queue: by priority, then by equal shares between fairness keys, then by arrival.

A key's share is what it has been served so far: its prompt tokens plus twice its output tokens. The key that was served
least is next. A key that comes back starts with no less than the least served of those that are there, so that no key
saves up a claim. This is the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from pagewick.engine.scheduling.lazy_heap import LazyHeap
from pagewick.engine.sequence import Sequence

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
# Keys without a request are remembered while other keys have some, so that no key starts afresh by pausing.
_MAX_ABSENT_KEYS = 10_000

Rank = tuple[int, int, tuple[int, int, int]]


class FairShares:
    """Owns what every key has been served, in weighted tokens."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()
        self._absent: dict[str, None] = {}  # keys without a request, the one that left first at the front
        # At most one entry per key. The service of a key only grows, so an entry is a lower bound.
        self._least: list[tuple[int, str]] = []
        self._in_least: set[str] = set()

    def join(self, key: str) -> None:
        """Note that a request of this key has arrived."""
        if not self._num_requests[key]:
            self._served[key] = max(self._served.pop(key, 0), self._least_served())
            self._absent.pop(key, None)
            if key not in self._in_least:
                self._in_least.add(key)
                heappush(self._least, (self._served[key], key))
        self._num_requests[key] += 1

    def leave(self, key: str) -> None:
        """Note that a request of this key is finished."""
        self._num_requests[key] -= 1
        if self._num_requests[key]:
            return
        del self._num_requests[key]
        self._absent[key] = None
        if not self._num_requests:
            self._served.clear()
            self._absent.clear()
            self._least.clear()
            self._in_least.clear()
        elif len(self._absent) > _MAX_ABSENT_KEYS:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._served[oldest]

    def charge(self, key: str, num_input_tokens: int, num_output_tokens: int) -> None:
        self._served[key] += INPUT_WEIGHT * num_input_tokens + OUTPUT_WEIGHT * num_output_tokens

    def charge_prompt(self, seq: Sequence, end: int) -> None:
        """Charge the prompt's tokens up to position `end`, each of them once.

        They are charged when they are planned. If they were charged once they are computed, one key would get all the
        free room of a step.
        """
        owner = seq.owner
        before = owner.num_charged_tokens
        if before < seq.num_prompt_tokens:
            owner.num_charged_tokens = max(before, min(end, seq.num_prompt_tokens))
            self.charge(seq.fairness_key, owner.num_charged_tokens - before, 0)

    def rank(self, seq: Sequence) -> Rank:
        """Return the sort key of a sequence: the lowest is next."""
        return (seq.priority, self._served[seq.fairness_key], seq.order)

    def _least_served(self) -> int:
        """Return what the key that was served least among those with a request was served; 0 if there is none."""
        while self._least:
            bound, key = self._least[0]
            if key not in self._num_requests:
                self._in_least.remove(key)
                heappop(self._least)
            elif self._served[key] == bound:
                return bound
            else:
                heapreplace(self._least, (self._served[key], key))
        return 0


class FairQueue:
    """Sequences that wait for a slot and blocks. Its costs do not grow with their number, except by a logarithm.

    num_tokens: of all of them. num_newcomers, num_newcomer_tokens: requests that have never started, and the tokens of
    their prompts.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._by_key: dict[str, LazyHeap[Sequence]] = {}
        self._by_arrival: LazyHeap[Sequence] = LazyHeap()
        # The rank that the first sequence of each key had, and keys by that rank. Ranks only grow while no sequence is
        # added, so these are lower bounds. Entries whose rank is not the one in _rank_of are void.
        self._rank_of: dict[str, Rank] = {}
        self._heads: list[tuple[Rank, str]] = []
        self._newcomers: set[Sequence] = set()
        self.num_tokens = 0
        self.num_newcomer_tokens = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_arrival)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._by_arrival

    @property
    def num_newcomers(self) -> int:
        return len(self._newcomers)

    @property
    def oldest(self) -> Sequence | None:
        """The sequence whose request arrived first."""
        return self._by_arrival.first()

    def add(self, seq: Sequence) -> None:
        key, rank = seq.fairness_key, self._shares.rank(seq)
        self._by_key.setdefault(key, LazyHeap()).add(seq, seq.order)
        self._by_arrival.add(seq, seq.arrival)
        if self._by_key[key].first() is seq:
            self._rank_of[key] = rank
            heappush(self._heads, (rank, key))
        self.num_tokens += seq.num_tokens
        if seq.owner.num_cached_tokens is None:
            self._newcomers.add(seq)
            self.num_newcomer_tokens += seq.num_prompt_tokens

    def remove(self, seq: Sequence) -> None:
        waiting = self._by_key[seq.fairness_key]
        waiting.remove(seq)
        self._by_arrival.remove(seq)
        self.num_tokens -= seq.num_tokens
        if not len(waiting):
            del self._by_key[seq.fairness_key], self._rank_of[seq.fairness_key]
        if seq in self._newcomers:
            self._newcomers.remove(seq)
            self.num_newcomer_tokens -= seq.num_prompt_tokens

    def head(self) -> Sequence | None:
        """Return the next sequence; all others wait until this one has what it needs."""
        while self._heads:
            bound, key = self._heads[0]
            if self._rank_of.get(key) != bound:
                heappop(self._heads)
                continue
            first = self._by_key[key].first()
            assert first is not None, "a key without sequences has no rank"
            rank = self._shares.rank(first)
            if rank == bound:
                return first
            self._rank_of[key] = rank
            heapreplace(self._heads, (rank, key))
        return None
