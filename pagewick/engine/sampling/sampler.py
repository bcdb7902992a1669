"""Turns logits into tokens and log-probabilities, for a batch of sequences with different sampling parameters.

docs/sampling.md explains the order: masks, bans and bias; repetition, presence and frequency penalty; DRY (all in
logit_edits). At temperature 0 the argmax follows. Otherwise logits are divided by the temperature, and top_n_sigma,
min_p, typical_p, top_k, top_p and XTC exclude tokens, each seeing the renormalised rest that the filters before have
left; mirostat replaces all of these. The token is drawn by inverse CDF.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.device_copies import Array, upload
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.sampling.columns import Draws
from pagewick.engine.sampling.logit_edits import edit_logits, has_edits_beside_mask, pack_masks
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.kernels.options import DrawOptions
from pagewick.kernels.reference_sampling import Purpose, sum_dtype
from pagewick.kernels.reference_truncation import mirostat_top_k

# Rows that a filter takes at a time: sorting them takes some 100 bytes for each logit.
_MASKED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each of N rows. Tensors are on the device.

    token_ids: [N] int64.
    is_valid: [N] bool, false where is_poisoned or where no token was allowed; the token is then meaningless.
    is_poisoned: [N] bool, true where the logits contained a NaN or +inf, or only -inf.
    mirostat_mu: the highest surprise for the row's next token, in bits; None for rows without mirostat.
    """

    token_ids: Tensor
    is_valid: Tensor
    is_poisoned: Tensor
    mirostat_mu: list[float | None]


def sample(logits: Tensor, rows: Mapping[int, SampleRow], draws: Draws) -> Sampled:
    """Choose one token for each row of logits [N, V] (float32), as a function of that row. Logits are not changed.

    rows: by index, those with parameters that `draws` does not hold; they may include others.
    """
    if _has_only_masks(rows, draws) and (masks := pack_masks(logits, rows)) is not None:
        return _sample_allowed(logits, masks, draws)
    edited = edit_logits(logits, rows)
    if not draws.is_drawn.any():
        return _most_likely(logits, edited)
    is_number = _has_finite_greatest(logits)
    is_valid = is_number if edited is logits else is_number & _has_finite_greatest(edited)
    usable = edited
    # Looking at is_valid is faster than a copy, but would wait for a device that computes beside the host.
    if not (logits.is_cpu and bool(is_valid.all())):
        # The draw for an invalid row is meaningless, but must not fail.
        usable = edited.where(is_valid.unsqueeze(1), 0.0)
    token_ids, mirostat_mu = _draw(usable, rows, draws)
    return Sampled(token_ids, is_valid, ~is_number, mirostat_mu)


def _has_only_masks(rows: Mapping[int, SampleRow], draws: Draws) -> bool:
    """Whether these rows have nothing but masks beside the parameters that `draws` holds."""
    return not any(
        has_edits_beside_mask(row) or (draws.is_drawn[index] and traits_of(row.sampling).is_truncated)
        for index, row in rows.items()
    )


def _sample_allowed(logits: Tensor, masks: Tensor, draws: Draws) -> Sampled:
    """Choose tokens that masks [N, bytes] allow, as mask_rows takes them, without a copy of the logits."""
    token_ids, allowed, highest = kernels.argmax_allowed(logits, masks)
    is_number = highest.isfinite()
    is_valid = is_number & allowed.isfinite()
    if draws.is_drawn.any():
        if not (logits.is_cpu and bool(is_valid.all())):
            # As in `sample`.
            where = is_valid.unsqueeze(1)
            logits, masks = logits.where(where, 0.0), masks.where(where, 255)
        token_ids = kernels.sample_tokens(logits, _draw_options(logits, draws), masks)
    return Sampled(token_ids, is_valid, ~is_number, [None] * len(token_ids))


def _draw_options(logits: Tensor, draws: Draws) -> DrawOptions:
    """Return the fields of `draws` on the device of the logits."""
    if draws.on_device is not None:
        return draws.on_device
    min_p, noise = (column.astype(_numpy_sum_dtype(logits), copy=False) for column in (draws.min_p, draws.noise))
    return DrawOptions(*upload([draws.temperature, min_p, draws.top_k, draws.top_p, noise], logits.device))


def _has_finite_greatest(logits: Tensor) -> Tensor:
    """Return whether each row's greatest logit is finite. It is not in a row with a NaN, which counts as the greatest.

    On a CPU, PyTorch's amax would start threads that wait for more work on the processors of the native library's. If
    they spin (docs/decisions/0007-short-spins.md), a step of one stream takes several milliseconds longer.
    """
    highest = kernels.argmax_rows(logits)[1] if logits.is_cpu else logits.amax(dim=-1)
    return highest.isfinite()


def _most_likely(logits: Tensor, edited: Tensor) -> Sampled:
    """Choose the most likely token of each row, the lowest id of equal ones."""
    token_ids, highest = kernels.argmax_rows(edited)
    is_valid = highest.isfinite()
    is_number = is_valid if edited is logits else _has_finite_greatest(logits)
    return Sampled(token_ids, is_valid & is_number, ~is_number, [None] * len(token_ids))


def _draw(logits: Tensor, rows: Mapping[int, SampleRow], draws: Draws) -> tuple[Tensor, list[float | None]]:
    """Return token ids [N] and the next mu of every row, for finite logits [N, V]."""
    untruncated = logits
    if truncated := [index for index in rows if draws.is_drawn[index] and traits_of(rows[index].sampling).is_truncated]:
        logits, left = logits.clone(), _Truncation(draws.min_p.copy(), draws.top_k.copy(), draws.top_p.copy())
        _truncate(logits, rows, truncated, left)
        draws = replace(draws, min_p=left.min_p, top_k=left.top_k, top_p=left.top_p, on_device=None)
    token_ids = kernels.sample_tokens(logits, _draw_options(logits, draws))
    next_mu: list[float | None] = [None] * len(logits)
    if by_mirostat := [index for index in truncated if rows[index].sampling.params.mirostat]:
        divisors = _columns(logits, [rows[index] for index in by_mirostat], "temperature")
        surprises = kernels.surprise(untruncated[by_mirostat], token_ids[by_mirostat], *divisors).tolist()
        for index, surprise in zip(by_mirostat, surprises, strict=True):
            params = rows[index].sampling.params
            next_mu[index] = _mirostat_mu(rows[index]) - params.mirostat_eta * (surprise - params.mirostat_tau)
    return token_ids, next_mu


@dataclass(frozen=True, slots=True)
class _Truncation:
    """The filters that are left to the draw, [N] each."""

    min_p: Array
    top_k: Array
    top_p: Array


def _truncate(logits: Tensor, rows: Mapping[int, SampleRow], drawn: Sequence[int], left: _Truncation) -> None:
    """Exclude tokens of the `drawn` rows by setting their logits to -inf, where that is not left to the draw.

    Elements of `left` are changed where a filter cannot be left to the draw, or where mirostat sets them.
    """
    params = {index: rows[index].sampling.params for index in drawn}

    def apply(mask: Callable[..., Tensor], indices: list[int], *names: str) -> None:
        for first in range(0, len(indices), _MASKED_ROWS):
            chosen = indices[first : first + _MASKED_ROWS]
            columns = _columns(logits, [rows[index] for index in chosen], *names)
            where: slice | Tensor = slice(chosen[0], chosen[-1] + 1)
            if chosen[-1] - chosen[0] >= len(chosen):
                (where,) = upload([np.array(chosen, np.int64)], logits.device)
            logits[where] = mask(logits[where], *columns)

    apply(kernels.mask_top_n_sigma, [index for index in drawn if params[index].top_n_sigma], "top_n_sigma")
    typical = [index for index in drawn if params[index].typical_p < 1]
    excluding = _excluding_top_choices(rows, drawn)
    # min_p comes before typical_p and XTC, which may exclude the most likely token.
    by_min_p = [index for index in sorted({*typical, *excluding}) if params[index].min_p]
    apply(kernels.mask_min_p, by_min_p, "temperature", "min_p")
    left.min_p[by_min_p] = 0.0
    apply(kernels.mask_typical_p, typical, "temperature", "typical_p")
    if excluding:
        # XTC comes after top_k and top_p, so these cannot be left to the draw.
        cut = [index for index in excluding if left.top_k[index] > 0 or left.top_p[index] < 1]
        apply(kernels.mask_top_k_top_p, cut, "temperature", "top_k", "top_p")
        apply(kernels.mask_xtc, excluding, "temperature", "xtc_threshold")
        left.top_k[cut], left.top_p[cut] = 0, 1.0
    if estimated := [index for index in drawn if params[index].mirostat == 1]:
        columns = _columns(logits, [rows[index] for index in estimated], "temperature", "mirostat_mu")
        for index, value in zip(estimated, mirostat_top_k(logits[estimated], *columns).tolist(), strict=True):
            left.top_k[index] = value
    surprising = [index for index in drawn if params[index].mirostat == 2]
    apply(kernels.mask_surprise, surprising, "temperature", "mirostat_mu")


def _excluding_top_choices(rows: Mapping[int, SampleRow], drawn: Sequence[int]) -> list[int]:
    """Return the rows for which XTC's own random number decides that it applies to this token."""
    willing = [index for index in drawn if rows[index].sampling.params.xtc_probability]
    if not willing:
        return []
    uniform = _xtc_uniform([rows[index] for index in willing])
    return [
        index
        for index, number in zip(willing, uniform, strict=True)
        if number < rows[index].sampling.params.xtc_probability
    ]


def _columns(logits: Tensor, rows: Sequence[SampleRow], *names: str) -> list[Tensor]:
    """Return the values [len(rows)] of these parameters as kernels take them; "mirostat_mu" is that of the row."""
    columns = []
    for name in names:
        dtype = np.int64 if name == "top_k" else _numpy_sum_dtype(logits)
        values = [_mirostat_mu(row) if name == "mirostat_mu" else getattr(row.sampling.params, name) for row in rows]
        columns.append(np.array(values, dtype))
    return upload(columns, logits.device)


def _numpy_sum_dtype(logits: Tensor) -> type[np.floating[Any]]:
    return np.float64 if sum_dtype(logits) == torch.float64 else np.float32


def _mirostat_mu(row: SampleRow) -> float:
    return 2 * row.sampling.params.mirostat_tau if row.mirostat_mu is None else row.mirostat_mu


def _xtc_uniform(rows: Sequence[SampleRow]) -> list[float]:
    """Return XTC's random number of each row."""
    return kernels.philox_uniform(
        torch.tensor([row.sampling.seed for row in rows]),
        torch.tensor([row.sampling.choice_index for row in rows]),
        torch.tensor([row.position for row in rows]),
        Purpose.XTC,
    ).tolist()


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities [N] and ranks [N] of N tokens, on the device.

    top_ids, top_logprobs: the most likely tokens at the place of each token, and their log-probabilities [N, num_top].
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def tensors(self) -> list[Tensor]:
        """Return the fields, in order."""
        return [self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs]

    def to_list(self) -> list[TokenLogprobs]:
        """Wait for the device and return the scores as plain data."""
        return [
            TokenLogprobs(token_id, logprob, rank, list(zip(ids, values, strict=True)))
            for token_id, logprob, rank, ids, values in zip(
                self.token_ids.tolist(),
                self.logprobs.tolist(),
                self.ranks.tolist(),
                self.top_ids.tolist(),
                self.top_logprobs.tolist(),
                strict=True,
            )
        ]


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
    """Score the given token of each row of logits [N, V], and find the row's `num_top` most likely tokens.

    Log-probabilities are those of the model, before temperature and truncation.
    """
    highest, log_sum = (values.unsqueeze(-1) for values in kernels.log_softmax_stats(logits))
    ranks, top_ids, top_logits = kernels.rank_tokens(logits, token_ids, min(num_top, logits.shape[-1]))
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    chosen, top_logprobs = chosen - highest - log_sum, top_logits - highest - log_sum
    return TokenScores(token_ids, chosen.squeeze(-1), ranks, top_ids, top_logprobs)


def candidate_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Score K tokens for one row of logits [V]; all share one list of the most likely tokens."""
    # As score_tokens computes them: the last bits of torch.log_softmax are others on some processors.
    highest, log_sum = kernels.log_softmax_stats(logits.unsqueeze(0))
    logprobs = logits - highest - log_sum
    chosen, order = logprobs[token_ids].sort()
    # num_above[k]: how many tokens of the vocabulary are above exactly k chosen ones, without K * V comparisons.
    num_above = torch.bincount(torch.searchsorted(chosen, logprobs), minlength=len(chosen) + 1)
    ranks = torch.empty_like(order)
    ranks[order] = 1 + len(logprobs) - num_above.cumsum(0)[:-1]
    _, (top_ids,), _ = kernels.rank_tokens(logits.unsqueeze(0), token_ids[:1], min(num_top, len(logprobs)))
    top = list(zip(top_ids.tolist(), logprobs[top_ids].tolist(), strict=True))
    return [
        TokenLogprobs(token_id, logprob, rank, top)
        for token_id, logprob, rank in zip(
            token_ids.tolist(), logprobs[token_ids].tolist(), ranks.tolist(), strict=True
        )
    ]
