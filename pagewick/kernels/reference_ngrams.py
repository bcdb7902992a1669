"""Rows of tables of hashed n-grams, and what decides how much a stream takes of them, in plain PyTorch; of `reference`.

A token's n-gram of order k is its id and those of the k - 1 tokens before it. Its hash is, for each head, a row of the
head's part of a table (Qwen4-Exp; transformers is the source of the formulas, there is no publication).

T: tokens of a batch; n: the largest order; H: heads of an order; S: streams; W: numbers of a stream.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagewick.kernels.batch_invariance import sum_rows
from pagewick.kernels.options import NgramOptions

_LEAST_SIMILARITY = 1e-6


def ngram_rows(token_ids: Tensor, earlier: Tensor, options: NgramOptions) -> Tensor:
    """Return the rows of each token's n-grams, those of 2 tokens first: [T, (n - 1) * H] int64.

    token_ids: [T] int64. earlier: [T, n - 1] float32, one more than the ids of the tokens before each, the nearest
    first; 0 where its sequence has none. An n-gram ends before a token with options.end_id, and before the sequence's
    first: further tokens count as options.end_id. A hash is the exclusive or of the ids times the multipliers of their
    places, modulo the size of the head.
    """
    before = earlier.to(torch.int64) - 1
    is_within = torch.ones_like(token_ids, dtype=torch.bool)
    mixed = token_ids * options.multipliers[0]
    rows = []
    for place in range(before.shape[1]):
        token_id = before[:, place]
        is_within = is_within & (token_id >= 0) & (token_id != options.end_id)
        mixed = mixed ^ (token_id.where(is_within, options.end_id) * options.multipliers[place + 1])
        rows.append(mixed.unsqueeze(1) % options.sizes[place] + options.offsets[place])
    return torch.cat(rows, dim=1)


def stream_similarities(keys: Tensor, streams: Tensor, num_streams: int) -> Tensor:
    """Return a logit for each stream, [T, S] in the dtype of streams, from keys and streams [T, S * W].

    It is the root of the magnitude of key . stream / sqrt(W), at least 1e-6, with its sign.
    """
    dtype = torch.promote_types(streams.dtype, torch.float32)
    products = (keys.to(dtype) * streams.to(dtype)).view(len(streams), num_streams, -1)
    similarities = sum_rows(products) / math.sqrt(products.shape[2])
    roots = similarities.abs().clamp(min=_LEAST_SIMILARITY).sqrt() * similarities.sign()
    return roots.to(streams.dtype)
