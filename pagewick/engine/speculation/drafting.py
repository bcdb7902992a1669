"""Drafting on the scheduler's side: draft tokens from the sequence's own past, and when to stop drafting. No torch.

A draft token is a token that a sequence may have next. A step computes the draft tokens together with the token that is
due. The model then samples its own token at each of these positions, and draft tokens are accepted up to the first one
that differs. A request therefore gets the same tokens whichever drafter proposes, and however badly.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, Protocol

from pagewick.engine.batch import SlotSampling

_TOKEN_BITS: Final = 32

# The cost model, in units of a step without draft tokens: a step with k of them costs 1.2 + 0.05 k, so 1.6 with eight.
# At an acceptance of 1/3, six of eight draft tokens are wanted. They add half a token, which is what they cost.
_BREAK_EVEN: Final = 1 / 3
# From this acceptance on, all draft tokens are wanted. Below it the first one fails more often than not, and the last
# one is hardly ever reached.
_FULL_ACCEPTANCE: Final = 0.5
# The weight of an observation after each further one: the average covers about the last ten proposals.
_DECAY: Final = 0.9
# The assumption at the start: 2.5 of 3 draft tokens were accepted. Four proposals without a hit in a row refute it,
# three do not: at an acceptance of 70 %, three misses in a row are one in 37, four are one in 120.
_PRIOR_ACCEPTED: Final = 2.5
_PRIOR_TRIED: Final = 3.0
# This number of misses in a row means that the text has changed, however good the average was.
_MAX_MISSES: Final = 10
_FIRST_PAUSE: Final = 32
_LONGEST_PAUSE: Final = 1024

# A long prompt that was in the cache is indexed over several steps, because other sequences are waiting.
_INDEXED_PER_STEP: Final = 2048


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_tokens` draft tokens for the sequence in `slot`.

    token_ids: all its tokens so far, prompt and output, the newest last; at least one. sampling: how its next tokens
    are chosen.
    """

    slot: int
    token_ids: Sequence[int]
    sampling: SlotSampling
    num_tokens: int


class Drafter(Protocol):
    """Proposes draft tokens for sequences in slots. Between two starts of a slot, its sequence only grows."""

    def start(self, slot: int) -> None:
        """Forget the slot's last sequence: another one moves in."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return up to `num_tokens` draft tokens for each request, possibly none; at most one request names a slot."""
        ...


class NgramIndex:
    """Prompt lookup: proposes what followed the last tokens when they occurred before.

    Each token takes time for `max_n - min_n + 1` dictionary entries, and about 200 bytes for each entry. A proposal
    takes no more time in a long history than in a short one.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n
        self._token_ids = array("i")
        # The last max_n tokens as one number; its low n * 32 bits name the last n of them, without collisions.
        self._suffix = 0
        # For each n, the largest first: the mask of an n-gram's name, and where the token after its last occurrence is.
        self._follower_of: list[tuple[int, int, dict[int, int]]] = [
            (n, (1 << n * _TOKEN_BITS) - 1, {}) for n in range(max_n, min_n - 1, -1)
        ]

    @property
    def num_tokens(self) -> int:
        """Number of tokens indexed so far."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the tokens that follow those already there."""
        longest_mask = self._follower_of[0][1]
        for place, token_id in enumerate(token_ids, start=len(self._token_ids)):
            # Only now do the n-grams that end before this token count as earlier ones: they have a continuation.
            for n, mask, follower_of in self._follower_of:
                if place >= n:
                    follower_of[self._suffix & mask] = place
            self._suffix = (self._suffix << _TOKEN_BITS | token_id) & longest_mask
            self._token_ids.append(token_id)

    def propose(self, num_tokens: int) -> list[int]:
        """Return what followed the most recent earlier occurrence of the longest suffix that has one; [] if none has.

        Suffixes of max_n tokens are looked for first, those of min_n last. A continuation that reaches the end of the
        history continues with itself, as a copy in LZ77 does, so that a loop is expected to go on.
        """
        for _, mask, follower_of in self._follower_of:
            place = follower_of.get(self._suffix & mask)
            if place is not None:
                copied = self._token_ids[place : place + max(num_tokens, 1)]
                return [copied[index % len(copied)] for index in range(num_tokens)]
        return []


class SpeculationControl:
    """Decides how many draft tokens are worth their cost now for one sequence. Counts steps, reads no clock.

    It averages the acceptance: the share of accepted draft tokens among those that were compared with a sampled token.
    Draft tokens after the first rejected one were not compared. From an acceptance of one half on it wants all draft
    tokens, below that proportionally fewer. Below the break-even, or after ten proposals in a row whose first token was
    rejected, it pauses for 32 tokens, then tries once more. Each failure doubles the pause, up to 1024 tokens, and any
    success makes it start over.

    A drafter that works a step ahead may still deliver draft tokens during a pause. They are better dropped:
    `num_wanted` is 0.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        assert num_speculative_tokens >= 0
        self._num_speculative_tokens = num_speculative_tokens
        self._start_over()

    def _start_over(self) -> None:
        self._accepted: float = _PRIOR_ACCEPTED
        self._tried: float = _PRIOR_TRIED
        self._num_misses = 0
        self._next_pause: int = _FIRST_PAUSE
        self._num_paused: int = 0
        self._is_on_trial = False

    def num_wanted(self) -> int:
        """Return the number of draft tokens that the next step should have; 0 during a pause."""
        if self._num_paused:
            return 0
        share = min(1.0, self._acceptance / _FULL_ACCEPTANCE)
        return ceil(self._num_speculative_tokens * share)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Note a step with `num_proposed` draft tokens, of which the first `num_accepted` were accepted.

        A step without any gave one token, which brings the end of a pause closer.
        """
        assert 0 <= num_accepted <= num_proposed
        if num_proposed == 0:
            self._num_paused = max(0, self._num_paused - 1)
        elif self._is_on_trial and num_accepted == 0:
            # During the pause itself these draft tokens come late, and their failure is no news.
            if not self._num_paused:
                self._pause()
        else:
            if self._is_on_trial:
                self._start_over()
            self._average(num_proposed, num_accepted)

    @property
    def _acceptance(self) -> float:
        return self._accepted / self._tried

    def _average(self, num_proposed: int, num_accepted: int) -> None:
        self._accepted = _DECAY * self._accepted + num_accepted
        self._tried = _DECAY * self._tried + num_accepted + (num_accepted < num_proposed)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        if self._acceptance < _BREAK_EVEN or self._num_misses == _MAX_MISSES:
            self._pause()

    def _pause(self) -> None:
        self._num_paused = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._is_on_trial = True


@dataclass(slots=True)
class Drafting:
    """The speculation of one sequence.

    index: proposes from the sequence's own tokens; None if a draft model proposes.
    token_ids: the draft model's proposal for the next step. num_draft_tokens, num_accepted_tokens: totals.
    """

    control: SpeculationControl
    index: NgramIndex | None
    num_indexed: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def index_tokens(self, token_ids: list[int]) -> None:
        """Index the sequence's tokens, a part of a long prompt at a time. Called in every step."""
        if self.index is not None:
            end = min(len(token_ids), self.num_indexed + _INDEXED_PER_STEP)
            self.index.extend(token_ids[self.num_indexed : end])
            self.num_indexed = end

    def propose(self, num_tokens: int, limit: int) -> list[int]:
        """Return up to `limit` draft tokens that may follow the sequence's `num_tokens` tokens."""
        limit = min(limit, self.control.num_wanted())
        if limit <= 0:
            return []
        if self.index is None:
            return self.token_ids[:limit]
        return self.index.propose(limit) if self.num_indexed == num_tokens else []
