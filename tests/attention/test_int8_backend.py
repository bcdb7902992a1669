"""The second backend of engine tests computes attention with no more error than int8 causes."""

from __future__ import annotations

import pytest
import torch

from pagewick.attention.backend import AttentionBackend, GroupBatch, Scoring
from pagewick.attention.cache_spec import Kept, KeptHeads, KeptLatents
from pagewick.attention.native import NativeBackend
from pagewick.kernels.options import Rotation
from tests.attention.int8_backend import Int8Backend
from tests.attention.test_native import Step


def batch_of(block_size: int, *, first: int, num_tokens: int) -> Step:
    """Return the batch of one sequence, whose blocks are the last of 9, the one before, and so on."""
    table = torch.arange(8, -1, -1, dtype=torch.int32)
    positions = torch.arange(first, first + num_tokens)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    lengths = torch.tensor([0, num_tokens], dtype=torch.int32), torch.tensor([first + num_tokens], dtype=torch.int32)
    return Step(*lengths, [GroupBatch(slots, table.unsqueeze(0))])


def blocks_of(backend: AttentionBackend, kept: Kept) -> torch.Tensor:
    return torch.full((9, backend.cache_spec(kept).block_bytes), 255, dtype=torch.uint8)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_heads(window: int | None, soft_cap: float | None) -> None:
    torch.manual_seed(3)
    kept, scoring = KeptHeads(2, 24, window), Scoring(6, 0.3, soft_cap)
    q, k, v = torch.randn(31, 6, 24), torch.randn(31, 2, 24), torch.randn(31, 2, 24)
    outputs = []
    for backend, block_size in ((NativeBackend(8, "float32"), 8), (Int8Backend(5), 5)):
        bound = backend.bind_heads(kept, scoring, blocks_of(backend, kept), 0)
        parts = [
            bound.forward(q[a:b], k[a:b], v[a:b], batch_of(block_size, first=a, num_tokens=b - a))
            for a, b in ((0, 13), (13, 14), (14, 31))
        ]
        outputs.append(torch.cat(parts))
    torch.testing.assert_close(outputs[1], outputs[0], atol=0.05, rtol=0)
    assert not torch.equal(*outputs)


def test_latents() -> None:
    torch.manual_seed(3)
    kept, scoring = KeptLatents(20, 6), Scoring(4, 0.2)
    q, latents, matrix = torch.randn(31, 4, 16), torch.randn(31, 26), torch.randn(10, 20)
    angles = torch.arange(31)[:, None] * torch.tensor([1.0, 0.3, 0.02])
    outputs = []
    for backend, block_size in ((NativeBackend(8, "float32"), 8), (Int8Backend(5), 5)):
        bound = backend.bind_latents(kept, scoring, blocks_of(backend, kept), 0)
        parts = [
            bound.forward(
                q[a:b],
                latents[a:b],
                batch_of(block_size, first=a, num_tokens=b - a),
                lambda part: part[..., :10] @ matrix,
                norm_weight=torch.ones(20),
                norm_eps=1e-6,
                rotation=Rotation(angles[a:b].cos(), angles[a:b].sin(), interleaved=True),
            )
            for a, b in ((0, 13), (13, 14), (14, 31))
        ]
        outputs.append(torch.cat(parts))
    torch.testing.assert_close(outputs[1], outputs[0], atol=0.1, rtol=0)
    assert not torch.equal(*outputs)
