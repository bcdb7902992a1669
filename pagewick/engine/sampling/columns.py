"""SamplingColumns: the sampling parameters of all slots, as arrays; Draws: those of the rows of a batch.

A batch of hundreds of sequences takes its parameters from here with one index operation each. Only rows that need more
than these columns hold get a SampleRow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagewick.engine.batch import SlotSampling
from pagewick.engine.device_copies import Array
from pagewick.engine.sampling.traits import SampleRow, noise_from, traits_of
from pagewick.kernels.options import DrawOptions

# The dtypes of the arrays of SamplingColumns.draws_ahead, in which a CPU draws.
DRAW_DTYPES = (np.float32, np.float64, np.int64, np.float64, np.float64, np.float64)
# Random numbers depend only on the seed and the position of the token, so they are computed in groups of this size.
NUM_NOISE_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Draws:
    """Parameters of the draw of N tokens, [N] each.

    is_drawn: whether the token is drawn at random; else it is the most likely one. noise: a random number for the draw.
    on_device: the fields that the draw takes, if they are on the device already.
    """

    is_drawn: Array
    temperature: Array
    min_p: Array
    top_k: Array
    top_p: Array
    noise: Array
    on_device: DrawOptions | None = None

    @property
    def options(self) -> list[Array]:
        """The fields of DrawOptions."""
        return [self.temperature, self.min_p, self.top_k, self.top_p, self.noise]

    @classmethod
    def of(cls, rows: Sequence[SampleRow]) -> Draws:
        """Return the draws of rows that belong to no slots."""
        columns = SamplingColumns(len(rows))
        for index, row in enumerate(rows):
            columns.set(index, row.sampling)
        return columns.draws(np.arange(len(rows)), np.array([row.position for row in rows], np.int64))


class SamplingColumns:
    """The sampling parameters of every slot; all arrays are [max_num_seqs].

    needs_row: whether a parameter that Draws does not hold changes logits. is_edited, min_position: as in
    SlotTraits. has_details: whether the result is more than a token.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.is_drawn = np.zeros(max_num_seqs, bool)
        self.is_edited = np.zeros(max_num_seqs, bool)
        self.needs_row = np.zeros(max_num_seqs, bool)
        self.has_details = np.zeros(max_num_seqs, bool)
        self.uses_mirostat = np.zeros(max_num_seqs, bool)
        self.min_position = np.zeros(max_num_seqs, np.int64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros((max_num_seqs, 2), np.int64)
        self._noise = np.zeros((max_num_seqs, NUM_NOISE_AHEAD))
        self._noise_start = np.zeros(max_num_seqs, np.int64)

    def set(self, slot: int, sampling: SlotSampling) -> None:
        """Store the parameters of the sequence that a slot has got."""
        traits, params = traits_of(sampling), sampling.params
        self.is_drawn[slot] = traits.is_drawn
        self.is_edited[slot] = traits.is_edited
        self.needs_row[slot] = traits.is_edited or traits.is_truncated
        self.has_details[slot] = params.logprobs is not None or bool(params.mirostat)
        self.uses_mirostat[slot] = bool(params.mirostat)
        self.min_position[slot] = traits.min_position
        self._temperature[slot] = params.temperature if traits.is_drawn else 0.0
        self._min_p[slot], self._top_k[slot], self._top_p[slot] = params.min_p, params.top_k, params.top_p
        self._seeds[slot] = sampling.seed, sampling.choice_index
        # No position is that far ahead of this one, so that all noise is computed when it is needed.
        self._noise_start[slot] = -NUM_NOISE_AHEAD

    def draws_ahead(self, slots: Array, positions: Array) -> list[Array]:
        """Return the fields of DrawOptions for these tokens, [N] each, and the random numbers of those after them."""
        draws = self.draws(slots, positions)
        drawn, following = np.flatnonzero(draws.is_drawn), np.zeros(len(slots))
        following[drawn] = self.noise(slots[drawn], positions[drawn] + 1)
        columns = [*draws.options, following]
        return [column.astype(dtype, copy=False) for column, dtype in zip(columns, DRAW_DTYPES, strict=True)]

    def draws(self, slots: Array, positions: Array) -> Draws:
        """Return the draws of the tokens at these positions of the sequences in these slots, [N] each."""
        is_drawn = self.is_drawn[slots]
        noise = np.zeros(len(slots))
        drawn = np.flatnonzero(is_drawn)
        if len(drawn):
            noise[drawn] = self.noise(slots[drawn], positions[drawn])
        temperature, min_p = self._temperature[slots], self._min_p[slots]
        return Draws(is_drawn, temperature, min_p, self._top_k[slots], self._top_p[slots], noise)

    def noise(self, slots: Array, positions: Array) -> Array:
        """Return the random number for drawing each token, [N] float64."""
        ahead = positions - self._noise_start[slots]
        missing = np.flatnonzero((ahead < 0) | (ahead >= NUM_NOISE_AHEAD))
        ahead[missing] = 0
        found = self._noise[slots, ahead]
        if len(missing):
            its_slots, first = slots[missing], positions[missing]
            made = noise_from(self._seeds[its_slots], first, NUM_NOISE_AHEAD)
            found[missing] = made[:, 0]
            # With draft tokens a slot may be there several times; any of its rows may be kept.
            for index, slot in enumerate(its_slots.tolist()):
                self._noise[slot], self._noise_start[slot] = made[index], first[index]
        return found
