"""Speculation, on the side of who plans: guesses from the sequence's own past, and when to stop guessing. No torch.

A guess is a token that a sequence may have next. A step computes the guesses together with the token that is due; the
model then draws its own token at each of these positions, and the guesses hold as far as they are the tokens drawn.
What a request gets is therefore the same whoever guesses, and however badly.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

from pagewick.engine.batch import SlotSampling

_TOKEN_BITS: Final = 32

# The cost model, in units of a step without guesses: one with k guesses costs 1.2 + 0.05 k, so eight of them 1.6.
# At an acceptance of 1/3 the number of guesses that is left of eight, six, adds half a token: what it costs.
_BREAK_EVEN: Final = 1 / 3
# From here on all guesses are made. Below it the first one fails more often than not, and the last is hardly reached.
_FULL_ACCEPTANCE: Final = 0.5
# Weight that an observation loses with each further one: the average covers about the last ten proposals.
_DECAY: Final = 0.9
# What is believed at first: 2.5 of 3 guesses held. Four proposals without a hit in a row refute it, three do not:
# where guesses hold with 70 %, so many misses in a row are one in 120.
_PRIOR_ACCEPTED: Final = 2.5
_PRIOR_TRIED: Final = 3.0
# So many misses in a row mean that the text has turned, however good the average was.
_MOST_MISSES: Final = 10
_FIRST_PAUSE: Final = 32
_LONGEST_PAUSE: Final = 1024


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Guess up to `num_tokens` tokens for the sequence in `slot`.

    token_ids: all its tokens so far, prompt and output, the newest last; at least one. sampling: how its next tokens
    are chosen.
    """

    slot: int
    token_ids: Sequence[int]
    sampling: SlotSampling
    num_tokens: int


class Drafter(Protocol):
    """Guesses for sequences in slots. Between two starts of a slot, its sequence only grows."""

    def start(self, slot: int) -> None:
        """Another sequence moves into the slot: nothing known of the one before holds."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Guesses for each request, at most `num_tokens` of them, possibly none; one request per slot at most."""
        ...


class NgramIndex:
    """Prompt lookup: what came after the last tokens when they stood there before.

    Each token takes time for `max_n - min_n + 1` dictionary entries, and about 200 bytes for each entry; a guess takes
    no more time in a long history than in a short one. A long prompt is best given in the pieces it is computed in.
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
        """Tokens taken in so far."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that follow those already there."""
        longest_mask = self._follower_of[0][1]
        for place, token_id in enumerate(token_ids, start=len(self._token_ids)):
            # Only now do the n-grams that end before this token count as earlier ones: they have a continuation.
            for n, mask, follower_of in self._follower_of:
                if place >= n:
                    follower_of[self._suffix & mask] = place
            self._suffix = (self._suffix << _TOKEN_BITS | token_id) & longest_mask
            self._token_ids.append(token_id)

    def guess(self, num_tokens: int) -> list[int]:
        """The continuation of the most recent earlier occurrence of the longest suffix that has one; [] if none has.

        Suffixes of max_n tokens are looked for first, those of min_n last. Where the continuation reaches the end of
        the history it goes on with itself, as a copy in LZ77 does: a loop is guessed to go on.
        """
        for _, mask, follower_of in self._follower_of:
            place = follower_of.get(self._suffix & mask)
            if place is not None:
                copied = self._token_ids[place : place + max(num_tokens, 1)]
                return [copied[index % len(copied)] for index in range(num_tokens)]
        return []


class SpeculationControl:
    """How many guesses are worth it now for one sequence. Counts steps, reads no clock.

    It averages the acceptance: of the guesses that were compared with a drawn token, the share that held; those behind
    the first that failed say nothing. From one half on it wants all guesses, below it fewer in proportion. Below the
    break-even, or when ten proposals in a row failed at once, it pauses for 32 tokens, then tries once more; each
    failure doubles the pause, up to 1024 tokens, and any success makes it start over.

    Guesses that arrive during a pause, from a drafter that works a step ahead, are better dropped: `num_wanted` is 0.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        assert num_speculative_tokens >= 0
        self._num_speculative_tokens = num_speculative_tokens
        self._accepted, self._tried = _PRIOR_ACCEPTED, _PRIOR_TRIED
        self._num_misses = 0
        self._next_pause = _FIRST_PAUSE
        self._num_paused = 0
        self._is_on_trial = False

    def num_wanted(self) -> int:
        """How many guesses the next step should have; 0 while it is paused."""
        if self._num_paused:
            return 0
        share = min(1.0, self._acceptance / _FULL_ACCEPTANCE)
        return ceil(self._num_speculative_tokens * share)

    def observe(self, num_guessed: int, num_accepted: int) -> None:
        """A step had `num_guessed` guesses, of which the first `num_accepted` held."""
        assert 0 <= num_accepted <= num_guessed
        if num_guessed == 0:
            self.tick()
        elif self._is_on_trial and num_accepted == 0:
            # During the pause itself guesses are late ones, and their failure is no news.
            if not self._num_paused:
                self._pause()
        else:
            if self._is_on_trial:
                self._start_over()
            self._average(num_guessed, num_accepted)

    def tick(self) -> None:
        """A step had no guesses, and gave one token."""
        self._num_paused = max(0, self._num_paused - 1)

    @property
    def _acceptance(self) -> float:
        return self._accepted / self._tried

    def _average(self, num_guessed: int, num_accepted: int) -> None:
        self._accepted = _DECAY * self._accepted + num_accepted
        self._tried = _DECAY * self._tried + num_accepted + (num_accepted < num_guessed)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        if self._acceptance < _BREAK_EVEN or self._num_misses == _MOST_MISSES:
            self._pause()

    def _start_over(self) -> None:
        self._accepted, self._tried = _PRIOR_ACCEPTED, _PRIOR_TRIED
        self._num_misses = 0
        self._next_pause = _FIRST_PAUSE
        self._num_paused = 0
        self._is_on_trial = False

    def _pause(self) -> None:
        self._num_paused = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._is_on_trial = True
