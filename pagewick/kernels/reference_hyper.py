"""Streams of hyper-connections (arXiv:2409.19606; mHC, arXiv:2512.24880) in plain PyTorch; a part of `reference`.

A token has S streams of H numbers in place of one residual. A part of a layer reads a weighted sum of them, and its
output is added to each with a weight of its own, after the streams were mixed. The weights depend on the token.

Weights are computed in float64 and rounded to float32, and sums over streams go one after the other, so that bits do
not depend on the batch. T: tokens of a batch; N: numbers that a projection makes for a token, S, 2 * S
or (2 + S) * S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels.options import HyperOptions, StreamWeights


def stream_weights(products: Tensor, streams: Tensor, options: HyperOptions) -> StreamWeights:
    """Return the weights of the streams [T, S, H] from the products [T, N] float32 of all their numbers with a matrix.

    The products are divided by the root mean square of the token's numbers, multiplied by scales and added to biases.
    With N = S they are those of the weighted sum, sigmoid(x) + eps. Otherwise these come first; then those of the
    output, magnitude * sigmoid(x), plus eps if N = 2 * S; and else a matrix, which mixes the streams: the softmax of
    its rows plus eps, of which num_iterations times columns and rows are divided by their sums plus eps in turn,
    columns first and last.
    """
    num_streams, eps = streams.shape[1], options.eps
    numbers = streams.flatten(1)
    squares = numbers.to(torch.promote_types(numbers.dtype, torch.float32)).square()
    mean = squares.sum(-1, keepdim=True, dtype=torch.float64) / numbers.shape[1]
    normed = products.double() * torch.rsqrt(mean + options.norm_eps)
    sizes, scales = (num_streams, num_streams, num_streams**2), options.scales.double()
    parts = sizes[: len(scales)]
    whole = torch.cat([scales[i : i + 1].expand(size) for i, size in enumerate(parts)]) * normed + options.biases
    before = (whole[:, :num_streams].sigmoid() + eps).float()
    if len(parts) == 1:
        return StreamWeights(before)
    after = options.magnitude * whole[:, num_streams : 2 * num_streams].sigmoid()
    if len(parts) == 2:
        return StreamWeights(before, (after + eps).float())
    mixing = whole[:, 2 * num_streams :].reshape(-1, num_streams, num_streams).softmax(-1) + eps
    mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
    for _ in range(options.num_iterations - 1):
        mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
    return StreamWeights(before, after.float(), mixing.float())


def collapse_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each token's streams [T, S, H] times weights [T, S] float32: [T, H], rounded once."""
    wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
    total = weights[:, :1] * wide[:, 0]
    for stream in range(1, streams.shape[1]):
        total = total + weights[:, stream : stream + 1] * wide[:, stream]
    return total.to(streams.dtype)


def expand_streams(streams: Tensor, output: Tensor, weights: StreamWeights) -> Tensor:
    """Return the streams [T, S, H], mixed, plus a layer's output [T, H] times the weight of each, rounded once.

    Stream k becomes the sum over j of mixing[:, j, k] * stream j, plus after[:, k] * output. Without `mixing`, it
    becomes stream k plus this product.
    """
    assert weights.after is not None, "a sum alone is not expanded"
    wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
    total = weights.after.unsqueeze(-1) * output.to(wide.dtype).unsqueeze(1)
    if weights.mixing is None:
        return (wide + total).to(streams.dtype)
    for stream in range(streams.shape[1]):
        total = total + weights.mixing[:, stream].unsqueeze(-1) * wide[:, stream : stream + 1]
    return total.to(streams.dtype)
