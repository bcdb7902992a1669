"""Definitions of the operations that turn logits into tokens and log-probabilities; a part of `reference`.

Dimensions: N rows, V vocabulary.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from pagewick.kernels.options import DrawOptions, EditStep, TokenEdits

# Number of tokens that sampling sorts at first. It sorts the whole vocabulary only where these do not decide.
SORTED_HEAD = 1024

# Philox4x32 multipliers and key increments: Salmon et al. 2011, "Parallel random numbers".
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
LOW_32_BITS = 0xFFFFFFFF

# Probabilities are summed as integer multiples of one over this: sums of integers are the same in any order, however a
# device divides the work on a batch.
PROBABILITY_ONE = 2**60


class Purpose(IntEnum):
    """The use of a random number. Numbers for different purposes are independent."""

    SAMPLE = 0
    XTC = 1


def philox_uniform(seed: Tensor, choice_index: Tensor, position: Tensor, purpose: int) -> Tensor:
    """Return one uniform number in [0, 1) per row, which is a pure function of that row and the purpose.

    seed, choice_index, position: [N] integers; returns [N] float64 (float32 where the device has no
    float64). Philox4x32-10 with the seed as key and the counter (position low, position high,
    choice_index, purpose), after Salmon et al. 2011.
    """
    position = position.long()
    counter = (position, position >> 32, choice_index.long(), torch.full_like(position, purpose))
    x0, x1, _, _ = philox4x32(counter, (seed.long(), seed.long() >> 32))
    if sum_dtype(seed) == torch.float32:
        return (x0 >> 8).float() * 2.0**-24
    return ((x0 >> 5) * 2**26 + (x1 >> 6)).double() * 2.0**-53


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ten rounds of Philox4x32 on 32-bit words in int64 tensors, of which only the low 32 bits are read."""
    c0, c1, c2, c3 = (word & LOW_32_BITS for word in counter)
    k0, k1 = (word & LOW_32_BITS for word in key)
    for _ in range(PHILOX_ROUNDS):
        # An int64 product wraps, which keeps all 64 bits of the unsigned product.
        product0, product1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        high0, high1 = (product0 >> 32) & LOW_32_BITS, (product1 >> 32) & LOW_32_BITS
        c0, c1 = high1 ^ c1 ^ k0, product1 & LOW_32_BITS
        c2, c3 = high0 ^ c3 ^ k1, product0 & LOW_32_BITS
        k0, k1 = (k0 + PHILOX_W0) & LOW_32_BITS, (k1 + PHILOX_W1) & LOW_32_BITS
    return c0, c1, c2, c3


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id [N] int64 and the value [N] of the greatest logit of each row of logits [N, V].

    This is the first NaN, else the greatest number with the lowest id.
    """
    token_ids = logits.argmax(-1)
    return token_ids, logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def log_softmax_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return max and log_sum = log(sum(exp(logits - max))), both [N] float32, of each row of logits [N, V] float32.

    The log-probability of a token is (logit - max) - log_sum; it is NaN for a row with a NaN, with +inf or with -inf
    only.
    """
    highest = logits.amax(-1)
    return highest, (logits - highest.unsqueeze(-1)).logsumexp(-1)


def rank_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rank [N] of a token of each row of logits [N, V], and ids and values [N, num_top] of the greatest.

    The rank is 1 more than the number of greater logits. Equal logits come by rising id on a CPU, in any order on a
    GPU. num_top: at most V. Rows with a NaN have results without meaning.
    """
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    ranks = (logits > chosen).sum(dim=-1) + 1
    top_logits, top_ids = logits.topk(num_top, dim=-1)
    return ranks, top_ids, top_logits


def mask_rows(logits: Tensor, masks: Tensor) -> Tensor:
    """Return logits [N, V] with -inf for the tokens whose bit is not set.

    masks: [N, B] uint8, one bit per token, least significant first; B is V / 8, rounded up.
    """
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = (masks.unsqueeze(-1) & bits).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~is_allowed, float("-inf"))


def argmax_allowed(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return argmax_rows(mask_rows(logits, masks)), and the greatest of all logits of each row [N], or NaN."""
    return *argmax_rows(mask_rows(logits, masks)), logits.amax(-1)


def mask_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Return logits [N, V] with -inf for tokens of less than min_p times the probability of the most likely one.

    temperature, min_p: [N]; the temperature is above 0. Nguyen et al. 2024, "Min-p Sampling", arXiv 2407.01082.
    """
    precise = logits.to(sum_dtype(logits))
    relative = ((precise - precise.amax(-1, keepdim=True)) / temperature.unsqueeze(1)).exp()
    return logits.masked_fill(relative < min_p.unsqueeze(1).to(relative.dtype), float("-inf"))


def edit_tokens(logits: Tensor, edits: TokenEdits) -> None:
    """Change single logits of logits [N, V] in place, step by step; each is rounded after every step.

    A step adds amounts. That of EditStep.REPETITION divides logits above 0 by them and multiplies others with them.
    """
    num_rows, starts = len(edits.row_ids), edits.starts.tolist()
    for step in EditStep:
        begin, end = starts[step * num_rows], starts[(step + 1) * num_rows]
        if begin == end:
            continue
        counts = edits.starts[step * num_rows : (step + 1) * num_rows + 1].diff()
        where = edits.row_ids.repeat_interleave(counts), edits.token_ids[begin:end]
        before, amounts = logits[where], edits.amounts[begin:end]
        changed = torch.where(before > 0, before / amounts, before * amounts)
        # A token that occurs twice is written twice, with the same value.
        logits[where] = changed if step == EditStep.REPETITION else before + amounts


def sample_tokens(logits: Tensor, draw: DrawOptions, masks: Tensor | None = None) -> Tensor:
    """Draw one token id per row of logits [N, V] float32; returns [N] int64. masks: as in mask_rows, which comes first.

    Temperature 0 gives the argmax (the lowest id on ties). Otherwise tokens are sorted by falling
    logit (equal ones by id); those with min_p times the probability of the first are kept, top_k of these, then the
    shortest prefix whose renormalised probability reaches top_p (at least one token), and the inverse CDF of `uniform`
    picks among these.
    Each row is a function of that row alone. If its greatest logit is not finite, its token is that of argmax_rows, or
    on a GPU any one.
    """
    if masks is not None:
        logits = mask_rows(logits, masks)
    token_ids, highest = argmax_rows(logits)
    rows = ((draw.temperature > 0) & highest.isfinite()).nonzero().squeeze(1)
    if not rows.numel():
        return token_ids
    logits = mask_min_p(logits[rows], draw.temperature[rows], draw.min_p[rows])
    temperature, _, top_k, top_p, uniform = (column[rows].unsqueeze(1) for column in draw)
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    columns = (top_k, top_p.to(sum_dtype(logits)), uniform.to(sum_dtype(logits)))
    drawn, is_final = _draw(probs, *sorted_head(logits), *columns)
    rest = (~is_final).nonzero().squeeze(1)
    if rest.numel():
        drawn[rest], _ = _draw(probs[rest], *sorted_whole(logits[rest]), *(column[rest] for column in columns))
    token_ids[rows] = drawn
    return token_ids


def sorted_head(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token ids of each row by falling key, equal ones by id, and how many of them [N, 1] are certain.

    Sorting the whole vocabulary takes twenty times as long, and the drawn token is nearly always in the head. Tokens
    that tie with the last of the head may be missing from it, so they do not count as certain.
    """
    values, token_ids = keys.topk(min(SORTED_HEAD, keys.shape[-1]), dim=-1)
    num_certain = (values > values[:, -1:]).sum(-1, keepdim=True)
    token_ids = token_ids.sort(dim=-1).values
    order = keys.gather(1, token_ids).argsort(dim=-1, descending=True, stable=True)
    return token_ids.gather(1, order), num_certain


def sorted_whole(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of sorted_head for the whole vocabulary."""
    order = keys.argsort(dim=-1, descending=True, stable=True)
    return order, torch.full_like(order[:, :1], order.shape[1])


def _draw(
    probs: Tensor, ordered_ids: Tensor, num_sorted: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the token id [N] drawn from ordered_ids [N, M], and whether the rest of the vocabulary cannot change it.

    probs: [N, V] by token id; num_sorted, top_k, top_p, uniform: [N, 1]. The first num_sorted of ordered_ids
    are the head of the vocabulary in sampling order.
    """
    prefix = kept_prefix(probs, ordered_ids, num_sorted, top_k, top_p)
    # Without top_p the mass is known even where the prefix extends beyond the head.
    kept_mass = torch.where(top_p < 1, prefix.mass.gather(1, prefix.size - 1), prefix.limit_mass)
    num_passed = (prefix.mass <= uniform * kept_mass).sum(-1, keepdim=True)
    is_final = prefix.is_final | (prefix.is_whole & (top_p >= 1) & (num_passed < num_sorted))
    # Rounding must not select a token that is too unlikely to be drawn at all.
    last = (prefix.mass < prefix.mass.gather(1, prefix.size - 1)).sum(-1, keepdim=True)
    token_ids = ordered_ids.gather(1, torch.minimum(num_passed, last))
    return token_ids.squeeze(1), is_final.squeeze(1)


class KeptPrefix(NamedTuple):
    """The first tokens of an order that top_k and top_p keep. All tensors are [N, 1], except mass, which is [N, M].

    size: number of tokens kept. mass: of each token and those before it, in units of 1 / PROBABILITY_ONE. limit_mass:
    of the first top_k tokens. is_whole: whether top_k removes no token. is_final: whether tokens that are not in order
    cannot change size.
    """

    size: Tensor
    mass: Tensor
    limit_mass: Tensor
    is_whole: Tensor
    is_final: Tensor


def kept_prefix(probs: Tensor, ordered_ids: Tensor, num_sorted: Tensor, top_k: Tensor, top_p: Tensor) -> KeptPrefix:
    """Return the shortest prefix of the first top_k (0: all) of ordered_ids whose share of their mass reaches top_p.

    The arguments are those of _draw. At least one token is kept; further ones only if their probability is not 0.
    """
    vocab_size, num_ordered = probs.shape[1], ordered_ids.shape[1]
    ordered = probs.gather(1, ordered_ids)
    parts = (ordered.to(sum_dtype(probs)) * PROBABILITY_ONE).round().long()
    mass = parts.cumsum(-1)
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    is_whole = limit == vocab_size
    limit_mass = mass.gather(1, limit.clamp(max=num_ordered) - 1)
    limit_mass = torch.where(is_whole, PROBABILITY_ONE, limit_mass)
    cut = torch.where(top_p < 1, top_p * limit_mass, float("inf"))
    rank = torch.arange(num_ordered, device=probs.device)
    size = ((mass - parts < cut) & (rank < limit) & (ordered > 0)).sum(-1, keepdim=True).clamp(min=1)
    is_final = (limit <= num_sorted) | (is_whole & (top_p < 1) & (size < num_sorted))
    return KeptPrefix(size, mass, limit_mass, is_whole, is_final)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return float64 where the device has it, else float32."""
    return torch.float32 if x.device.type == "mps" else torch.float64
