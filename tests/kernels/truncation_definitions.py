"""The filters of pagewick.kernels.truncation once more, from their papers: plain floats, one token at a time."""

from __future__ import annotations

import math

Probs = dict[int, float]


def softmax(logits: list[float], temperature: float) -> Probs:
    """Token id -> probability, of the tokens that can come."""
    possible = [i for i, logit in enumerate(logits) if logit > -math.inf]
    highest = max(logits[i] for i in possible)
    weights = {i: math.exp((logits[i] - highest) / temperature) for i in possible}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def renormalised(probs: Probs) -> Probs:
    total = math.fsum(probs.values())
    return {i: prob / total for i, prob in probs.items()}


def falling(probs: Probs) -> list[int]:
    return sorted(probs, key=lambda i: (-probs[i], i))


def top_n_sigma(logits: list[float], num_sigmas: float) -> list[float]:
    """Filter by the standard deviation of logits, not of probabilities."""
    finite = [logit for logit in logits if logit > -math.inf]
    mean = math.fsum(finite) / len(finite)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in finite) / len(finite))
    least = max(finite) - num_sigmas * sigma
    return [logit if logit >= least else -math.inf for logit in logits]


def min_p(probs: Probs, least: float) -> Probs:
    highest = max(probs.values())
    return renormalised({i: prob for i, prob in probs.items() if prob >= least * highest})


def typical_p(probs: Probs, mass: float) -> Probs:
    entropy = math.fsum(-prob * math.log(prob) for prob in probs.values() if prob)
    order = sorted(probs, key=lambda i: (abs(-math.log(probs[i]) - entropy) if probs[i] else math.inf, i))
    return renormalised(prefix(probs, order, mass))


def top_k_top_p(probs: Probs, top_k: int, top_p: float) -> Probs:
    order = falling(probs)[: top_k or len(probs)]
    kept = renormalised({i: probs[i] for i in order})
    return renormalised(prefix(kept, order, top_p)) if top_p < 1 else kept


def prefix(probs: Probs, order: list[int], mass: float) -> Probs:
    kept: Probs = {}
    passed = 0.0
    for i in order:
        if kept and passed >= mass:
            break
        kept[i] = probs[i]
        passed += probs[i]
    return kept


def xtc(probs: Probs, threshold: float) -> Probs:
    tops = [i for i in falling(probs) if probs[i] >= threshold]
    dropped = set(tops[:-1])
    return renormalised({i: prob for i, prob in probs.items() if i not in dropped})


def mirostat_1_top_k(probs: Probs, mu: float) -> int:
    """Basu et al. 2020: ŝ = Σ t_i b_i / Σ t_i², ε̂ = ŝ - 1, k = (ε̂ 2^μ / (1 - N^-ε̂))^(1/ŝ), over 100 tokens."""
    ordered = [probs[i] for i in falling(probs)][:100]
    if len(probs) == 1:
        return 1
    ratios = [(math.log((i + 2) / (i + 1)), math.log(ordered[i] / ordered[i + 1])) for i in range(len(ordered) - 1)]
    s = sum(t * b for t, b in ratios) / sum(t**2 for t, _ in ratios)
    k = (((s - 1) * 2**mu) / (1 - len(probs) ** (1 - s))) ** (1 / s)
    return max(1, min(len(probs), round(k)))


def mirostat_2(probs: Probs, mu: float) -> Probs:
    kept = {i: prob for i, prob in probs.items() if -math.log2(prob) <= mu}
    return renormalised(kept) if kept else {falling(probs)[0]: 1.0}
