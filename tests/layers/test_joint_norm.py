"""Norms of all heads together, on one rank and on several, against PyTorch's own in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels import batch_invariance
from pagewick.layers.context import LayerContext
from pagewick.layers.norm import JointHeadNorm, norm_jointly
from pagewick.parallel.sharding import kv_heads_of_rank, shard_bounds
from tests.layers.ranks import on_ranks

HEAD_DIM, NUM_HEADS, EPS = 5, 6, 1e-3


@pytest.mark.parametrize("must_be_invariant", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_ranks_normalise_their_heads_by_the_root_mean_square_of_all(
    num_ranks: int, num_kv_heads: int, must_be_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several ranks hold the same key heads."""
    monkeypatch.setattr(batch_invariance, "is_required", lambda: must_be_invariant)
    generator = torch.Generator().manual_seed(num_ranks)
    counts = NUM_HEADS, num_kv_heads
    whole = [3 * torch.randn(7, count, HEAD_DIM, generator=generator) for count in counts]
    weights = [torch.rand(count * HEAD_DIM, generator=generator) for count in counts]
    expected = [
        F.rms_norm(x.flatten(1).double(), weight.shape, weight.double(), EPS).view_as(x)
        for x, weight in zip(whole, weights, strict=True)
    ]

    def act(context: LayerContext) -> list[tuple[list[int], Tensor]]:
        first, last = shard_bounds(NUM_HEADS, context.tp_rank, num_ranks)
        held = list(range(first, last)), kv_heads_of_rank(NUM_HEADS, num_kv_heads, context.tp_rank, num_ranks)
        earlier = {
            head
            for rank in range(context.tp_rank)
            for head in kv_heads_of_rank(NUM_HEADS, num_kv_heads, rank, num_ranks)
        }
        norms = []
        for heads, before, count, weight in zip(held, (set(), earlier), counts, weights, strict=True):
            norm = JointHeadNorm(context, HEAD_DIM, EPS, heads=heads, total_num_heads=count, earlier=before)
            norm.load_weight("weight", weight, None)
            norms.append(norm)
        fused = torch.cat([x[:, heads].flatten(1) for x, heads in zip(whole, held, strict=True)], dim=1)
        parts = fused.split([len(heads) * HEAD_DIM for heads in held], dim=1)
        norm_jointly(norms, parts, context.collectives)
        return [(heads, part.unflatten(1, (-1, HEAD_DIM))) for heads, part in zip(held, parts, strict=True)]

    for found in on_ranks(num_ranks, act):
        for (heads, normed), wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(normed.double(), wanted[:, heads], rtol=0, atol=2e-6)
