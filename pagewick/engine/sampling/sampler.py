"""Logits to tokens and log-probabilities, for a batch of sequences that all ask for something else.

The order, which docs/sampling.md explains: masks, bans and bias; repetition, presence and frequency penalty; DRY
(these are logit_edits). At temperature 0 then the argmax. Otherwise logits are divided by the temperature, and what may
be drawn is cut down by top_n_sigma, min_p, typical_p, top_k, top_p and XTC, each of which sees the renormalised rest
that the ones before have left; or, in place of all of these, by mirostat. The token is drawn by inverse CDF.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.batch import SlotSampling
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.sampling.logit_edits import edit_logits
from pagewick.engine.sampling.traits import noise_at, traits_of
from pagewick.kernels.reference import sum_dtype


# Not frozen: there is one for every token, and to make a frozen one takes three times as long.
@dataclass(slots=True)
class SampleRow:
    """What the choice of one token depends on, besides its logits.

    position: where in its sequence the token will stand; with the seed it names the noise. Of the tokens before it
        sampling.num_prompt_tokens are the prompt's.
    token_ids: every token before it, prompt and output (an array is read faster than a list). It may be empty unless
        sampling.params.needs_history.
    allowed_mask: one bit per token of the vocabulary, least significant first; the others must not come.
    mirostat_mu: what Sampled gave for the token before; None for the first.
    """

    sampling: SlotSampling
    position: int
    token_ids: Sequence[int]
    allowed_mask: bytes | None = None
    mirostat_mu: float | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each of N rows.

    token_ids: [N] int64 on the device.
    is_valid: [N] bool on the device, false where is_poisoned, or where no token was left: the token then means nothing.
    is_poisoned: [N] bool on the device, true where the logits held a NaN or +inf, or nothing but -inf.
    mirostat_mu: the highest surprise for the row's next token, in bits; None for rows that are not mirostat's.
    """

    token_ids: Tensor
    is_valid: Tensor
    is_poisoned: Tensor
    mirostat_mu: list[float | None]


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """One token for each row of logits [N, V] (float32), each a function of its row alone. Logits are not changed."""
    edited = edit_logits(logits, rows)
    drawn = [index for index, row in enumerate(rows) if traits_of(row.sampling).is_drawn]
    if not drawn:
        return _most_likely(logits, edited)
    is_number = logits.amax(dim=-1).isfinite()
    is_valid = is_number if edited is logits else is_number & edited.amax(dim=-1).isfinite()
    usable = edited
    # To look at it is faster than a copy, but would wait for any device that computes beside the host.
    if not (logits.is_cpu and bool(is_valid.all())):
        # What is drawn for a row that is not valid means nothing, but must not fail.
        usable = edited.where(is_valid.unsqueeze(1), 0.0)
    token_ids, mirostat_mu = _draw(usable, rows, drawn)
    return Sampled(token_ids, is_valid, ~is_number, mirostat_mu)


def _most_likely(logits: Tensor, edited: Tensor) -> Sampled:
    """The most likely token of each row, the lowest id of equal ones."""
    token_ids, highest = kernels.argmax_rows(edited)
    # NaN counts as the highest of all, so the logit found tells of all of them.
    is_valid = highest.isfinite()
    is_number = is_valid if edited is logits else logits.amax(dim=-1).isfinite()
    return Sampled(token_ids, is_valid & is_number, ~is_number, [None] * len(token_ids))


def _draw(logits: Tensor, rows: Sequence[SampleRow], drawn: Sequence[int]) -> tuple[Tensor, list[float | None]]:
    """Token ids [N] and the next mu of every row, for finite logits [N, V]. `drawn`: not greedy."""
    params = [row.sampling.params for row in rows]
    top_k, top_p = [each.top_k for each in params], [each.top_p for each in params]
    untruncated = logits
    if truncated := [index for index in drawn if traits_of(rows[index].sampling).is_truncated]:
        logits = logits.clone()
        _truncate(logits, rows, truncated, top_k, top_p)
    temperature = [0.0] * len(rows)
    for index in drawn:
        temperature[index] = params[index].temperature
    draw = kernels.DrawOptions(
        torch.tensor(temperature, dtype=torch.float32, device=logits.device),
        torch.tensor(top_k, dtype=torch.int64, device=logits.device),
        torch.tensor(top_p, dtype=torch.float32, device=logits.device),
        _noise(logits, rows, drawn),
    )
    token_ids = kernels.sample_tokens(logits, draw)
    next_mu: list[float | None] = [None] * len(rows)
    if by_mirostat := [index for index in truncated if params[index].mirostat]:
        columns = _columns(logits, [rows[index] for index in by_mirostat], "temperature")
        surprises = kernels.surprise(untruncated[by_mirostat], token_ids[by_mirostat], *columns).tolist()
        for index, surprise in zip(by_mirostat, surprises, strict=True):
            error = surprise - params[index].mirostat_tau
            next_mu[index] = _mirostat_mu(rows[index]) - params[index].mirostat_eta * error
    return token_ids, next_mu


def _truncate(
    logits: Tensor, rows: Sequence[SampleRow], drawn: Sequence[int], top_k: list[int], top_p: list[float]
) -> None:
    """Set to -inf what the `drawn` rows must not draw, but for what top_k [N] and top_p [N] leave to the draw."""
    params = [row.sampling.params for row in rows]

    def apply(mask: Callable[..., Tensor], indices: list[int], *names: str) -> None:
        if indices:
            columns = _columns(logits, [rows[index] for index in indices], *names)
            logits[indices] = mask(logits[indices], *columns)

    apply(kernels.mask_top_n_sigma, [index for index in drawn if params[index].top_n_sigma], "top_n_sigma")
    apply(kernels.mask_min_p, [index for index in drawn if params[index].min_p], "temperature", "min_p")
    typical = [index for index in drawn if params[index].typical_p < 1]
    apply(kernels.mask_typical_p, typical, "temperature", "typical_p")
    if excluding := _excluding_top_choices(rows, drawn):
        # XTC comes after these two, so here they cannot be left to the draw.
        cut = [index for index in excluding if top_k[index] > 0 or top_p[index] < 1]
        apply(kernels.mask_top_k_top_p, cut, "temperature", "top_k", "top_p")
        apply(kernels.mask_xtc, excluding, "temperature", "xtc_threshold")
        for index in cut:
            top_k[index], top_p[index] = 0, 1.0
    if estimated := [index for index in drawn if params[index].mirostat == 1]:
        columns = _columns(logits, [rows[index] for index in estimated], "temperature", "mirostat_mu")
        for index, value in zip(estimated, kernels.mirostat_top_k(logits[estimated], *columns).tolist(), strict=True):
            top_k[index] = value
    surprising = [index for index in drawn if params[index].mirostat == 2]
    apply(kernels.mask_surprise, surprising, "temperature", "mirostat_mu")


def _excluding_top_choices(rows: Sequence[SampleRow], drawn: Sequence[int]) -> list[int]:
    """The rows for which XTC's own random number says that it acts on this token."""
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
    """The values [len(rows)] of these parameters, as kernels take them; "mirostat_mu" is the row's own."""
    columns = []
    for name in names:
        dtype = torch.int64 if name == "top_k" else sum_dtype(logits)
        values = [_mirostat_mu(row) if name == "mirostat_mu" else getattr(row.sampling.params, name) for row in rows]
        columns.append(torch.tensor(values, dtype=dtype, device=logits.device))
    return columns


def _noise(logits: Tensor, rows: Sequence[SampleRow], drawn: Sequence[int]) -> Tensor:
    """The random number of each row, [N]; of those that are not drawn it means nothing."""
    numbers = [0.0] * len(rows)
    places = [(rows[index].sampling, rows[index].position) for index in drawn]
    for index, number in zip(drawn, noise_at(places), strict=True):
        numbers[index] = number
    return torch.tensor(numbers, dtype=sum_dtype(logits), device=logits.device)


def _mirostat_mu(row: SampleRow) -> float:
    return 2 * row.sampling.params.mirostat_tau if row.mirostat_mu is None else row.mirostat_mu


def _xtc_uniform(rows: Sequence[SampleRow]) -> list[float]:
    """XTC's random number of each row."""
    return kernels.philox_uniform(
        torch.tensor([row.sampling.seed for row in rows]),
        torch.tensor([row.sampling.choice_index for row in rows]),
        torch.tensor([row.position for row in rows]),
        kernels.Purpose.XTC,
    ).tolist()


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of N tokens, on the device: log-probabilities [N], ranks [N], and ids and log-probabilities [N, num_top] of the
    most likely tokens at each place.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_list(self) -> list[TokenLogprobs]:
        """Wait for the device, and read."""
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
    """Of each row of logits [N, V]: the given token's log-probability and rank, and the `num_top` most likely tokens.

    They are the model's own, before temperature and truncation.
    """
    highest, log_sum = (values.unsqueeze(-1) for values in kernels.log_softmax_stats(logits))
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    ranks = (logits > chosen).sum(dim=-1) + 1
    top_values, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    chosen, top_values = chosen - highest - log_sum, top_values - highest - log_sum
    return TokenScores(token_ids, chosen.squeeze(-1), ranks, top_ids, top_values)


def candidate_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """The same of K tokens for one row of logits [V]; the list of the most likely ones is one for all."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen, order = logprobs[token_ids].sort()
    # How many of the vocabulary's tokens are above so many of the chosen ones; not K * V comparisons.
    num_above = torch.bincount(torch.searchsorted(chosen, logprobs), minlength=len(chosen) + 1)
    ranks = torch.empty_like(order)
    ranks[order] = 1 + len(logprobs) - num_above.cumsum(0)[:-1]
    top_values, top_ids = logprobs.topk(min(num_top, len(logprobs)))
    top = list(zip(top_ids.tolist(), top_values.tolist(), strict=True))
    return [
        TokenLogprobs(token_id, logprob, rank, top)
        for token_id, logprob, rank in zip(
            token_ids.tolist(), logprobs[token_ids].tolist(), ranks.tolist(), strict=True
        )
    ]
