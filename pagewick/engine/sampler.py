"""Logits to tokens and log-probabilities, for a batch of sequences that all ask for something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.batch import SlotSampling
from pagewick.engine.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: [N] int64 on the device. is_valid: [N] bool, false where the logits held a NaN or +inf."""

    token_ids: Tensor
    is_valid: Tensor


def sample(logits: Tensor, rows: Sequence[SlotSampling], positions: Sequence[int]) -> Sampled:
    """One token for each row of logits [N, V] (float32), each a function of its own row alone.

    positions: where in its sequence the token will stand; with the seed it names the noise.
    """
    is_valid = logits.amax(dim=-1).isfinite()
    logits = _without_stop_tokens(logits, rows, positions)
    if all(row.temperature == 0 for row in rows):
        return Sampled(logits.argmax(dim=-1), is_valid)

    def column(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    uniform = kernels.philox_uniform(
        column([row.seed for row in rows], torch.int64),
        column([row.choice_index for row in rows], torch.int64),
        column(positions, torch.int64),
        kernels.Purpose.SAMPLE,
    )
    token_ids = kernels.sample_tokens(
        logits.nan_to_num(),
        column([row.temperature for row in rows], torch.float32),
        column([row.top_k for row in rows], torch.int64),
        column([row.top_p for row in rows], torch.float32),
        uniform,
    )
    return Sampled(token_ids, is_valid)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Of each row of logits [N, V]: the given token's log-probability and rank, and the `num_top` most likely tokens.

    They are the model's own, before temperature and truncation.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top_values, top_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, list(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(
            token_ids.tolist(),
            chosen.squeeze(-1).tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            top_values.tolist(),
            strict=True,
        )
    ]


def _without_stop_tokens(logits: Tensor, rows: Sequence[SlotSampling], positions: Sequence[int]) -> Tensor:
    """Stop tokens are impossible before a row's min_position."""
    banned = [
        (index, token_id)
        for index, (row, position) in enumerate(zip(rows, positions, strict=True))
        if position < row.min_position
        for token_id in row.stop_token_ids
    ]
    if not banned:
        return logits
    indices, token_ids = (torch.tensor(values, device=logits.device) for values in zip(*banned, strict=True))
    return logits.index_put((indices, token_ids), torch.tensor(float("-inf"), device=logits.device))
