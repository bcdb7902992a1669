"""Operations on the parallel residual streams of AltUp (arXiv:2301.13310), and on sparse activations, in plain PyTorch.

A token has S = 1 + N streams. The first is active: the layer computes with it. T: tokens of a batch; H: hidden_size.
Results are computed in float32 and rounded once to the dtype of the first tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels.batch_invariance import sum_rows


def mix_streams(active: Tensor, others: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Add to each stream a weighted sum of all streams of the token: (active [T, H], others [T, N, H]).

    coefficients: [T, S * S]; the number j * S + i of a token is the weight of stream i in the sum for stream j.
    """
    streams = _stacked(active, others)
    num_streams = streams.shape[1]
    weights = coefficients.to(streams.dtype).view(len(active), num_streams, num_streams)
    mixed = streams
    # One stream after the other, so that no sum depends on the number of tokens.
    for source in range(num_streams):
        mixed = mixed + weights[:, :, source : source + 1] * streams[:, source : source + 1]
    return _divided(mixed.to(active.dtype))


def correct_streams(active: Tensor, others: Tensor, computed: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Add (1 + coefficient) * (computed - active) to each stream: (active [T, H], others [T, N, H]).

    computed: [T, H], what the layer made of the active stream. coefficients: [T, S], one for each stream.
    """
    streams = _stacked(active, others)
    innovation = computed.to(streams.dtype).unsqueeze(1) - streams[:, :1]
    corrected = streams + (1.0 + coefficients.to(streams.dtype)).unsqueeze(-1) * innovation
    return _divided(corrected.to(active.dtype))


def match_magnitude(x: Tensor, target: Tensor, least: float) -> Tensor:
    """Scale each row of x [T, ..., H] to the root mean square of the token's row of target [T, H].

    The mean square of a row of x counts as `least` where it is below that.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wanted = _mean(target.to(wide.dtype).square()).view(-1, *[1] * (x.dim() - 1))
    own = _mean(wide.square()).clamp(min=least)
    return (wide * torch.sqrt(wanted / own)).to(x.dtype)


def gaussian_top_k(x: Tensor, factor: float) -> Tensor:
    """Return max(0, x - (mean + factor * deviation)) with the mean and standard deviation of each row of x [..., I].

    The numbers of a normal distribution that stay above 0 are those beyond `factor` deviations (Spark Transformer,
    arXiv:2506.06644).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _mean(wide)
    deviation = _mean((wide - mean).square()).sqrt()
    return torch.relu(wide - (mean + factor * deviation)).to(x.dtype)


def _mean(rows: Tensor) -> Tensor:
    """Return the mean of each row [..., N]: [..., 1]."""
    return (sum_rows(rows) / rows.shape[-1]).unsqueeze(-1)


def _stacked(active: Tensor, others: Tensor) -> Tensor:
    """Return all streams, [T, S, H], in the dtype of computation."""
    streams = torch.cat((active.unsqueeze(1), others), dim=1)
    return streams.to(torch.promote_types(streams.dtype, torch.float32))


def _divided(streams: Tensor) -> tuple[Tensor, Tensor]:
    return streams[:, 0].contiguous(), streams[:, 1:].contiguous()
