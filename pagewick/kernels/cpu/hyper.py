"""Streams of hyper-connections by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference_hyper
from pagewick.kernels.cpu.binding import DTYPES, Operation, address, empty, is_plain
from pagewick.kernels.cpu.structs import CollapseStreamsArgs, ExpandStreamsArgs, StreamWeightsArgs
from pagewick.kernels.options import HyperOptions, StreamWeights

_STREAM_WEIGHTS = Operation("stream_weights", StreamWeightsArgs)
_COLLAPSE = Operation("collapse_streams", CollapseStreamsArgs)
_EXPAND = Operation("expand_streams", ExpandStreamsArgs)


def stream_weights(products: Tensor, streams: Tensor, options: HyperOptions) -> StreamWeights:
    """reference_hyper.stream_weights. Raises ValueError for tensors that do not fit together."""
    if streams.dtype not in DTYPES or not (is_plain(products) and is_plain(streams)) or not streams.numel():
        return reference_hyper.stream_weights(products, streams, options)
    num_tokens, num_streams, size = _shape_of(streams)
    num_kinds = len(options.scales)
    num_weights = sum((num_streams, num_streams, num_streams**2)[:num_kinds])
    if products.shape != (num_tokens, num_weights) or products.dtype != torch.float32 or products.stride(1) != 1:
        raise ValueError(f"products must be float32 {[num_tokens, num_weights]}, not {list(products.shape)}")
    _check_floats("biases", options.biases, (num_weights,))
    if num_kinds not in (1, 2, 3):
        raise ValueError(f"there are 1, 2 or 3 kinds of weights, not {num_kinds}")
    _check_floats("scales", options.scales, (num_kinds,))
    before = empty((num_tokens, num_streams), torch.float32)
    after = None if num_kinds < 2 else empty(before.shape, torch.float32)
    mixing = None if num_kinds < 3 else empty((num_tokens, num_streams, num_streams), torch.float32)
    args = StreamWeightsArgs(
        products=products.data_ptr(), streams=streams.data_ptr(), biases=options.biases.data_ptr(),
        scales=options.scales.data_ptr(), before=before.data_ptr(), after=address(after), mixing=address(mixing),
        num_tokens=num_tokens, num_streams=num_streams, size=size, product_stride=products.stride(0),
        num_iterations=options.num_iterations, eps=options.eps, norm_eps=options.norm_eps, magnitude=options.magnitude,
        dtype=DTYPES[streams.dtype],
    )  # fmt: skip
    _STREAM_WEIGHTS.run(args)
    return StreamWeights(before, after, mixing)


def collapse_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """reference_hyper.collapse_streams. Raises ValueError for tensors that do not fit together."""
    if streams.dtype not in DTYPES or not (is_plain(streams) and is_plain(weights)) or not streams.numel():
        return reference_hyper.collapse_streams(streams, weights)
    num_tokens, num_streams, size = _shape_of(streams)
    _check_floats("weights", weights, (num_tokens, num_streams))
    out = empty((num_tokens, size), streams.dtype)
    args = CollapseStreamsArgs(
        streams=streams.data_ptr(), weights=weights.data_ptr(), out=out.data_ptr(), num_tokens=num_tokens,
        num_streams=num_streams, size=size, dtype=DTYPES[streams.dtype],
    )  # fmt: skip
    _COLLAPSE.run(args)
    return out


def expand_streams(streams: Tensor, output: Tensor, weights: StreamWeights) -> Tensor:
    """reference_hyper.expand_streams. Raises ValueError for tensors that do not fit together."""
    assert weights.after is not None, "a sum alone is not expanded"
    if streams.dtype not in DTYPES or not (is_plain(streams) and is_plain(output)) or not streams.numel():
        return reference_hyper.expand_streams(streams, output, weights)
    num_tokens, num_streams, size = _shape_of(streams)
    if output.shape != (num_tokens, size) or output.dtype != streams.dtype or output.stride(1) != 1:
        raise ValueError(f"output {output.dtype} {list(output.shape)} must be {streams.dtype} {[num_tokens, size]}")
    _check_floats("after", weights.after, (num_tokens, num_streams))
    if weights.mixing is not None:
        _check_floats("mixing", weights.mixing, (num_tokens, num_streams, num_streams))
    out = empty(streams.shape, streams.dtype)
    args = ExpandStreamsArgs(
        streams=streams.data_ptr(), output=output.data_ptr(), after=weights.after.data_ptr(),
        mixing=address(weights.mixing), out=out.data_ptr(), num_tokens=num_tokens, num_streams=num_streams, size=size,
        output_stride=output.stride(0), dtype=DTYPES[streams.dtype],
    )  # fmt: skip
    _EXPAND.run(args)
    return out


OPERATIONS = {stream_weights: (torch.float32,), collapse_streams: DTYPES, expand_streams: DTYPES}


def _shape_of(streams: Tensor) -> tuple[int, int, int]:
    if streams.dim() != 3 or not streams.is_contiguous():
        raise ValueError(f"streams {list(streams.shape)} must be contiguous [T, S, H]")
    num_tokens, num_streams, size = streams.shape
    return num_tokens, num_streams, size


def _check_floats(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"{name} {tensor.dtype} {list(tensor.shape)} must be contiguous float32 {list(shape)}")
