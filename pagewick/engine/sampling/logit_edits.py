"""Bans, bias and penalties: changes to logits before a token is chosen from them.

The order is that of `edit_logits`. docs/sampling.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.batch import SlotSampling
from pagewick.engine.device_copies import Array, upload
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.kernels.options import EditStep, TokenEdits

# By step: the tokens of a row, and the amount of each or of all.
_Changes = dict[EditStep, tuple[Array, Array | float]]

# Keeps logits finite: a penalty must not exclude a token, in case all other tokens are excluded.
MAX_DRY_PENALTY = 1e30
# Most repetitions are shorter. Longer ones are measured by a method whose time does not grow with their length.
SHORT_REPETITION = 64


def edit_logits(logits: Tensor, rows: Mapping[int, SampleRow]) -> Tensor:
    """Apply the masks, bans, bias and penalties of these rows to logits [N, V] (float32); excluded tokens get -inf.

    The argument is not changed; it is returned if no row has edits. Each row of the result depends on that row alone.
    """
    edited = [(index, row) for index, row in rows.items() if has_edits(row)]
    if not edited:
        return logits
    logits = _masked(logits, rows)
    _exclude_others(logits, edited)
    changes = {index: found for index, row in edited if (found := _changes_of(row))}
    if changes:
        kernels.edit_tokens(logits, _edits(logits, changes))
    return logits


def has_edits(row: SampleRow) -> bool:
    """Whether edit_logits changes anything for the row."""
    return row.allowed_mask is not None or has_edits_beside_mask(row)


def has_edits_beside_mask(row: SampleRow) -> bool:
    """Whether edit_logits does more for the row than to apply its mask."""
    traits = traits_of(row.sampling)
    return traits.is_edited or row.position < traits.min_position


def _is_too_early_to_stop(row: SampleRow) -> bool:
    return row.position < traits_of(row.sampling).min_position


def _masked(logits: Tensor, rows: Mapping[int, SampleRow]) -> Tensor:
    """Return a copy of logits [N, V], with -inf for the tokens that the mask of their row excludes."""
    masks = pack_masks(logits, rows)
    return logits.clone() if masks is None else kernels.mask_rows(logits, masks)


def pack_masks(logits: Tensor, rows: Mapping[int, SampleRow]) -> Tensor | None:
    """Return the masks of all rows of logits [N, V] as kernels.mask_rows takes them; None if no row has one."""
    masks = {
        index: _open_mask(logits[index], row.allowed_mask, row)
        for index, row in rows.items()
        if row.allowed_mask is not None
    }
    if not masks:
        return None
    open_mask = b"\xff" * -(-logits.shape[1] // 8)
    joined = bytearray().join(masks.get(index, open_mask) for index in range(len(logits)))
    (packed,) = upload([np.frombuffer(joined, np.uint8).reshape(len(logits), -1)], logits.device)
    return packed


def _open_mask(logits: Tensor, allowed_mask: bytes, row: SampleRow) -> bytes:
    """Return the mask of a row, in which the first token may be one of opening_ids only in two cases.

    One of them is the most likely of all tokens, or the mask allows nothing else.
    """
    opening_ids = row.sampling.opening_ids
    if not opening_ids or row.position != row.sampling.num_prompt_tokens or int(logits.argmax()) in opening_ids:
        return allowed_mask
    others = bytearray(allowed_mask)
    for token_id in opening_ids:
        others[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(others) if any(others) else allowed_mask


def _exclude_others(logits: Tensor, rows: Iterable[tuple[int, SampleRow]]) -> None:
    """Exclude the tokens that are not in allowed_token_ids."""
    for index, row in rows:
        if row.sampling.params.allowed_token_ids is not None:
            excluded = _not_allowed(row.sampling, logits.shape[1], logits.device)
            logits[index].masked_fill_(excluded, float("-inf"))


def _not_allowed(sampling: SlotSampling, vocab_size: int, device: torch.device) -> Tensor:
    """Return which tokens are not in allowed_token_ids, [V] bool; computed for the slot's first token and then kept."""
    kept: Tensor | None = sampling.__dict__.get("not_allowed")
    if kept is None or len(kept) != vocab_size or kept.device != device:
        excluded = np.ones(vocab_size, bool)
        excluded[list(sampling.params.allowed_token_ids or ())] = False
        (kept,) = upload([excluded], device)
        sampling.__dict__["not_allowed"] = kept
    return kept


def _banned_token_ids(row: SampleRow) -> list[int]:
    """List stop tokens before the minimum length, and the last token of each bad word that is otherwise complete."""
    banned = list(row.sampling.stop_token_ids) if _is_too_early_to_stop(row) else []
    for *before, last in row.sampling.bad_word_ids:
        if not before or _ends_with(row, before):
            banned.append(last)
    return banned


def _ends_with(row: SampleRow, token_ids: list[int]) -> bool:
    _check_history(row)
    return len(token_ids) <= row.position and list(row.token_ids[-len(token_ids) :]) == token_ids


def _changes_of(row: SampleRow) -> _Changes:
    """Return the tokens of a row that each step changes, and the amounts of edit_tokens."""
    params, found = row.sampling.params, _Changes()
    if banned := _banned_token_ids(row):
        found[EditStep.BAN] = _array(banned), float("-inf")
    if params.logit_bias:
        found[EditStep.BIAS] = _array([*params.logit_bias]), np.array([*params.logit_bias.values()])
    # Keskar et al. 2019 (CTRL), section 4.1, with negative logits multiplied so that they are not rewarded.
    if params.repetition_penalty != 1:
        found[EditStep.REPETITION] = _last_tokens(row, params.repeat_last_n), params.repetition_penalty
    if params.presence_penalty or params.frequency_penalty:
        # As OpenAI's API defines them.
        _check_history(row)
        output = _array(row.token_ids[row.sampling.num_prompt_tokens :])
        seen, counts = np.unique(output, return_counts=True)
        found[EditStep.PRESENCE] = seen, -params.presence_penalty
        found[EditStep.FREQUENCY] = seen, -np.float32(params.frequency_penalty) * counts.astype(np.float32)
    if params.dry_multiplier:
        found[EditStep.DRY] = _dry(row)
    return {step: change for step, change in found.items() if len(change[0])}


def _dry(row: SampleRow) -> tuple[Array, Array]:
    """Return the tokens that DRY penalises, and what it adds; p-e-w, text-generation-webui, pull request 5677."""
    params = row.sampling.params
    history = _last_tokens(row, params.dry_penalty_last_n)
    repeated, lengths = repetitions(history, params.dry_allowed_length, _breakers(row.sampling))
    with np.errstate(over="ignore"):
        powers = np.float64(params.dry_base) ** (lengths - params.dry_allowed_length)
    return repeated, -np.minimum(params.dry_multiplier * powers, MAX_DRY_PENALTY)


def _edits(logits: Tensor, changes: Mapping[int, _Changes]) -> TokenEdits:
    """Put the changes of rows together on the device of logits."""
    ordered = [of_row.get(step) for step in EditStep for of_row in changes.values()]
    starts = np.cumsum([0, *(len(change[0]) if change else 0 for change in ordered)])
    token_ids = np.concatenate([change[0] for change in ordered if change])
    amounts = np.empty(len(token_ids), np.float32)
    for change, first, end in zip(ordered, starts.tolist(), starts[1:].tolist(), strict=False):
        if change:
            amounts[first:end] = change[1]
    return TokenEdits(*upload([np.array([*changes], np.int64), starts, token_ids, amounts], logits.device))


def _breakers(sampling: SlotSampling) -> Breakers:
    """Return the slot's breakers; they are prepared for its first token and kept for the others."""
    kept: Breakers | None = sampling.__dict__.get("breakers")
    if kept is None:
        kept = sampling.__dict__["breakers"] = Breakers(sampling.dry_breaker_mask, sampling.dry_breaker_ids)
    return kept


@dataclass(slots=True)
class _Suffix:
    """A common end of several breakers: a node in a tree of suffixes.

    before: the suffixes that are longer by one token at the front, by that token. is_whole: whether it is a breaker.
    """

    before: dict[int, _Suffix] = field(default_factory=dict)
    is_whole: bool = False


class Breakers:
    """Tokens, and sequences of tokens, that end a repetition.

    mask: one bit per token, least significant first, for tokens that are breakers by themselves. token_ids: sequences;
    those of one token are added to the mask.
    """

    def __init__(self, mask: bytes, token_ids: Sequence[Sequence[int]]) -> None:
        alone = [sequence[0] for sequence in token_ids if len(sequence) == 1]
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        # The last element stands for all tokens that are not in the mask.
        self._is_alone = np.zeros(max(len(bits), *alone, 0) + 2, dtype=bool)
        self._is_alone[: len(bits)] = bits
        self._is_alone[alone] = True
        self._suffixes = _Suffix()
        for sequence in token_ids:
            if len(sequence) > 1:
                suffix = self._suffixes
                for token_id in reversed(sequence):
                    suffix = suffix.before.setdefault(token_id, _Suffix())
                suffix.is_whole = True

    def are_alone(self, token_ids: Array) -> Array:
        """Return which of the tokens [N] are breakers by themselves: [N] bool."""
        return self._is_alone[np.minimum(token_ids, len(self._is_alone) - 1)]

    def num_tokens_after(self, history: Array, most: int) -> int:
        """Return how many tokens follow the last breaker in the history [L]; only the last `most` (<= L) are looked at.

        Each place is compared only with the sequences whose end matches the tokens up to it. It therefore takes part in
        at most as many comparisons as the longest sequence has tokens, plus one for each sequence.
        """
        places = np.flatnonzero(self.are_alone(history[len(history) - most :]))
        last = int(places[-1]) if len(places) else -1
        last += len(history) - most
        pending = [(self._suffixes, 0, np.arange(last + 1, len(history)))]
        while pending:
            suffix, length, places = pending.pop()
            places = places[places >= max(length, last + 1)]
            for token_id, longer in suffix.before.items():
                found = places[history[places - length] == token_id]
                if longer.is_whole and len(found):
                    last = max(last, int(found[-1]))
                if len(found):
                    pending.append((longer, length + 1, found))
        return len(history) - 1 - last


def repetitions(history: Array, min_length: int, breakers: Breakers) -> tuple[Array, Array]:
    """Return the tokens [K] that would continue a repetition of at least min_length (>= 1), and its lengths [K].

    The length for a token is that of the longest end of the history [L] that also occurs earlier in the history,
    followed by the token; the token itself does not count. A repetition contains no part of a breaker, and a token that
    is a breaker by itself continues no repetition.
    """
    ends, lengths = _repeated_ends(history)
    ends, lengths = ends[lengths >= min_length], lengths[lengths >= min_length]
    if not len(ends):
        return ends, lengths
    lengths = np.minimum(lengths, breakers.num_tokens_after(history, int(lengths.max())))
    token_ids, groups = np.unique(history[ends + 1], return_inverse=True)
    longest = np.zeros(len(token_ids), dtype=np.int64)
    np.maximum.at(longest, groups, lengths)
    is_kept = (longest >= min_length) & ~breakers.are_alone(token_ids)
    return token_ids[is_kept], longest[is_kept]


def _repeated_ends(history: Array) -> tuple[Array, Array]:
    """Return earlier places [M] of the last token of the history [L], and how many tokens match up to each place."""
    ends = np.flatnonzero(history[:-1] == history[-1:])
    lengths = np.ones(len(ends), dtype=np.int64)
    alive = np.arange(len(ends))
    for length in range(1, SHORT_REPETITION):
        alive = alive[ends[alive] >= length]
        if not len(alive):
            return ends, lengths
        alive = alive[history[ends[alive] - length] == history[len(history) - 1 - length]]
        lengths[alive] = length + 1
    if not len(alive):
        return ends, lengths
    backwards = np.array(_prefix_matches(history[::-1].tolist()))
    return ends, backwards[len(history) - 1 - ends]


def _prefix_matches(text: list[int]) -> list[int]:
    """Return, for each place, how many items from there on equal those from the start on.

    This is the Z algorithm (Gusfield 1997, "Algorithms on Strings, Trees, and Sequences", section 1.4): linear time.
    """
    size = len(text)
    matches = [size] + [0] * (size - 1)
    left = right = 0
    for start in range(1, size):
        length = min(right - start, matches[start - left]) if start < right else 0
        while start + length < size and text[length] == text[start + length]:
            length += 1
        matches[start] = length
        if start + length > right:
            left, right = start, start + length
    return matches


def _last_tokens(row: SampleRow, last_n: int) -> Array:
    """Return the last last_n tokens of prompt and output; all of them for -1."""
    _check_history(row)
    return _array(row.token_ids if last_n == -1 else row.token_ids[max(0, row.position - last_n) :])


def _check_history(row: SampleRow) -> None:
    assert len(row.token_ids) == row.position, f"{len(row.token_ids)} tokens are known before position {row.position}"


def _array(token_ids: Sequence[int]) -> Array:
    return np.asarray(token_ids, dtype=np.int64)
