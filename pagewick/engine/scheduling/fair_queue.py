"""The order of the waiting queue: by priority, then by equal shares between fairness keys, then by arrival.

A key's share is what it has been served so far: its prompt tokens plus twice its output tokens. The key that was served
least is next. A key that comes back starts with no less than the least served of those that are there, so that no key
saves up a claim. This is the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

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

    def join(self, key: str) -> None:
        """Note that a request of this key has arrived."""
        if not self._num_requests[key]:
            least = min((self._served[other] for other in self._num_requests if other != key), default=0)
            self._served[key] = max(self._served.pop(key, 0), least)
        self._num_requests[key] += 1

    def leave(self, key: str) -> None:
        """Note that a request of this key is finished."""
        self._num_requests[key] -= 1
        if not self._num_requests[key]:
            del self._num_requests[key]
            if not self._num_requests:
                self._served.clear()
            elif len(self._served) > _MAX_ABSENT_KEYS + len(self._num_requests):
                del self._served[next(other for other in self._served if other not in self._num_requests)]

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


class FairQueue:
    """Sequences that wait for a slot and blocks. num_tokens: of all of them."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._by_key: dict[str, list[Sequence]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for waiting in self._by_key.values() for seq in waiting)

    def __contains__(self, seq: Sequence) -> bool:
        waiting = self._by_key.get(seq.fairness_key, [])
        place = bisect_left(waiting, seq.order, key=lambda seq: seq.order)
        return place < len(waiting) and waiting[place] is seq

    def add(self, seq: Sequence) -> None:
        insort(self._by_key.setdefault(seq.fairness_key, []), seq, key=lambda seq: seq.order)
        self.num_tokens += seq.num_tokens

    def remove(self, seq: Sequence) -> None:
        waiting = self._by_key[seq.fairness_key]
        del waiting[bisect_left(waiting, seq.order, key=lambda seq: seq.order)]
        self.num_tokens -= seq.num_tokens
        if not waiting:
            del self._by_key[seq.fairness_key]

    def head(self) -> Sequence | None:
        """Return the next sequence; all others wait until this one has what it needs."""
        return min((waiting[0] for waiting in self._by_key.values()), key=self._shares.rank, default=None)
