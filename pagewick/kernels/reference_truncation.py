"""Definitions of the filters over logits that decide which tokens may be drawn, and of mirostat; a part of `reference`.
mask_min_p is in reference_sampling.py, as the definition of a draw needs it.

Dimensions: N rows, V vocabulary. Each mask_... takes logits [N, V] (float32, -inf for excluded tokens, at least one
finite per row) and parameters [N], and returns logits with -inf for the tokens that it drops. Probabilities are those
of logits / temperature over the tokens that the filters before have left; temperature is above 0. At least one token
stays. Each row is a function of that row alone, bit for bit: sums are of integers or in a fixed order.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels.reference_sampling import kept_prefix, sorted_head, sorted_whole, sum_dtype

# Number of the most likely tokens to which mirostat 1 fits Zipf's law: Basu et al. 2020, algorithm 1.
MIROSTAT_HEAD = 100


def mask_top_n_sigma(logits: Tensor, num_sigmas: Tensor) -> Tensor:
    """Keep logits of at least maximum - num_sigmas * sigma, after Tang et al. 2024, "Top-nσ", arXiv 2411.07641.

    sigma is the standard deviation of the finite logits (of the population, not of a sample). The temperature would
    scale both sides alike, so it is not an argument.
    """
    distance = _below_maximum(logits)
    is_finite = logits > float("-inf")
    count = is_finite.sum(-1, keepdim=True)
    mean = _row_sum(distance.where(is_finite, 0.0)) / count
    variance = _row_sum((distance - mean).square().where(is_finite, 0.0)) / count
    limit = -num_sigmas.unsqueeze(1).to(distance.dtype) * variance.sqrt()
    return logits.masked_fill(distance < limit, float("-inf"))


def mask_typical_p(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the smallest set of most typical tokens whose mass reaches typical_p; the lowest ids of equal ones.

    The surprise of a typical token is close to the entropy of the distribution: Meister et al. 2022, "Locally Typical
    Sampling", arXiv 2202.00666. Excluded tokens are the least typical.
    """
    probs = _probs(logits, temperature)
    entropy = _row_sum(torch.special.entr(probs))
    keys = -(-probs.log() - entropy).abs()
    is_kept = _prefix_mask(keys, probs, torch.zeros_like(temperature, dtype=torch.int64), typical_p)
    return logits.masked_fill(~is_kept, float("-inf"))


def mask_top_k_top_p(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the tokens that reference.sample_tokens draws from: top_k (0 = all) of them, of these a mass of top_p."""
    is_kept = _prefix_mask(logits, _probs(logits, temperature), top_k, top_p)
    return logits.masked_fill(~is_kept, float("-inf"))


def mask_xtc(logits: Tensor, temperature: Tensor, threshold: Tensor) -> Tensor:
    """Drop all tokens with a probability of at least `threshold` except the least likely of them; keep the others.

    "Exclude top choices", after p-e-w (text-generation-webui, pull request 6335). Among equally likely ones the highest
    id stays, which is the last in sampling order. Nothing changes where fewer than two tokens reach the threshold.
    """
    probs = _probs(logits, temperature)
    is_top = (probs >= threshold.unsqueeze(1).to(probs.dtype)) & (probs > 0)
    least = probs.where(is_top, float("inf")).amin(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    stays = ids.where(is_top & (probs == least), -1).amax(-1, keepdim=True)
    return logits.masked_fill(is_top & (ids != stays), float("-inf"))


def mask_surprise(logits: Tensor, temperature: Tensor, mu: Tensor) -> Tensor:
    """Keep tokens with a surprise of at most mu [N] bits, or else the most likely one (the lowest id of equal ones).

    Mirostat 2, of the authors of Basu et al. 2020, "Mirostat", arXiv 2007.14966.
    """
    log_probs = _log_probs(logits, temperature)
    is_kept = -log_probs / math.log(2) <= mu.unsqueeze(1).to(log_probs.dtype)
    is_kept.scatter_(1, logits.argmax(-1, keepdim=True), True)
    return logits.masked_fill(~is_kept, float("-inf"))


def mirostat_top_k(logits: Tensor, temperature: Tensor, mu: Tensor) -> Tensor:
    """Return how many of the most likely tokens mirostat 1 keeps, [N] int64 on the CPU.

    This is algorithm 1 of Basu et al. 2020, "Mirostat", arXiv 2007.14966.
    Zipf's exponent s is estimated from the MIROSTAT_HEAD most likely tokens, and k follows from s and the highest
    surprise mu [N] (bits); it is rounded and at least 1. Excluded tokens do not count as vocabulary.
    """
    log_probs = _log_probs(logits, temperature)
    num_possible = (log_probs > float("-inf")).sum(-1)
    head = log_probs.topk(min(MIROSTAT_HEAD, logits.shape[1]), dim=-1).values
    rows = zip(head.tolist(), num_possible.tolist(), mu.tolist(), strict=True)
    return torch.tensor([_zipf_top_k(row[:size], size, limit) for row, size, limit in rows])


def _zipf_top_k(log_probs: list[float], vocab_size: int, mu: float) -> int:
    """Return k for the falling natural log-probabilities of the most likely tokens: algorithm 1 of Basu et al."""
    if vocab_size < 2:
        return 1
    steps = [math.log((rank + 1) / rank) for rank in range(1, len(log_probs))]
    drops = [higher - lower for higher, lower in pairwise(log_probs)]
    exponent = math.fsum(t * b for t, b in zip(steps, drops, strict=True)) / math.fsum(t * t for t in steps)
    epsilon, log_size = exponent - 1, math.log(vocab_size)
    # Where epsilon is 0 the formula has this limit.
    ratio = epsilon / -math.expm1(-epsilon * log_size) if epsilon else 1 / log_size
    log_power = math.log(ratio) + mu * math.log(2)
    if log_power <= 0:
        return 1
    return min(vocab_size, max(1, round(math.exp(min(log_power / max(exponent, 1e-12), log_size)))))


def surprise(logits: Tensor, token_ids: Tensor, temperature: Tensor) -> Tensor:
    """Return -log2 of the probability of the token [N] of each row, [N]."""
    return -_log_probs(logits, temperature).gather(1, token_ids.unsqueeze(1)).squeeze(1) / math.log(2)


def _prefix_mask(keys: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return which tokens are in the kept prefix of the tokens by falling key (equal ones by id), [N, V] bool."""
    precise = sum_dtype(keys)
    columns = (top_k.unsqueeze(1), top_p.unsqueeze(1).to(precise))
    if not keys.is_cpu:
        # To ask which rows need the whole order would make the host wait for a GPU.
        return _prefix_of(probs, *sorted_whole(keys), *columns)[0]
    is_kept, is_final = _prefix_of(probs, *sorted_head(keys), *columns)
    rest = (~is_final).nonzero().squeeze(1)
    if rest.numel():
        is_kept[rest], _ = _prefix_of(probs[rest], *sorted_whole(keys[rest]), *(column[rest] for column in columns))
    return is_kept


def _prefix_of(
    probs: Tensor, ordered_ids: Tensor, num_sorted: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    prefix = kept_prefix(probs, ordered_ids, num_sorted, top_k, top_p)
    rank = torch.arange(ordered_ids.shape[1], device=probs.device)
    is_kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ordered_ids, rank < prefix.size)
    return is_kept, prefix.is_final.squeeze(1)


def _below_maximum(logits: Tensor) -> Tensor:
    """Return logits - their maximum, in the type for sums."""
    logits = logits.to(sum_dtype(logits))
    return logits - logits.amax(-1, keepdim=True)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    return _below_maximum(logits) / temperature.unsqueeze(1)


def _probs(logits: Tensor, temperature: Tensor) -> Tensor:
    weights = _scaled(logits, temperature).exp()
    return weights / _row_sum(weights)


def _log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    scaled = _scaled(logits, temperature)
    return scaled - _row_sum(scaled.exp()).log()


def _row_sum(x: Tensor) -> Tensor:
    """Return the sum of each row of x [N, V], [N, 1], always in the same order: add halves until one column is left.

    torch.sum may divide a row differently when there are other rows.
    """
    while (size := x.shape[1]) > 1:
        half = (size + 1) // 2
        x = x[:, :half] + F.pad(x[:, half:], (0, 2 * half - size))
    return x
