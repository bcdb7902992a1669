"""Streams of hyper-connections: stream_weights, collapse_streams and expand_streams of reference_hyper.py.

The weights of a token are some twenty numbers, for which PyTorch runs about a hundred kernels in each part of a layer;
here a program computes all of them. Everything is float32: the definition's float64 makes bits independent of the
batch, which the fixed order of a program does as well. A token's results depend on that token alone, bit for bit.

Streams that are not mixed, as Hy4's, are weighed and written by the definition.

Dimensions: T tokens, S streams of H numbers, N = S or (2 + S) * S weights of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_hyper
from pagewick.kernels.options import HyperOptions, StreamWeights
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# The most streams; DeepSeek V4 has as many.
MAX_STREAMS = 4
# Numbers of a stream that a program has at once, and those of all streams whose squares it adds at once.
BLOCK = 1024
_SQUARES = 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Numbers that vary.
_NUMBERS = ["num_streams", "num_iterations"]


@triton.jit(do_not_specialize=_NUMBERS)
def weigh_streams(
    products, streams, biases, scales, before, after, mixing,
    num_streams, num_numbers, product_stride, num_iterations, eps, norm_eps,
    STREAMS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Write the weights of token program_id(0). after, mixing: None if only the weights of a sum are wanted.

    products: [T, N] float32; streams: [T, S, H], num_numbers = S * H.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SQUARES)
    squares = tl.zeros((SQUARES,), tl.float32)
    for start in range(0, num_numbers, SQUARES):
        inside = start + columns < num_numbers
        x = tl.load(streams + token * num_numbers + start + columns, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    norm = tl.rsqrt(tl.sum(squares, 0) / num_numbers + norm_eps)
    row = products + token * product_stride
    j, k = tl.arange(0, STREAMS), tl.arange(0, STREAMS)
    is_stream = j < num_streams
    whole = tl.load(scales) * (tl.load(row + j, mask=is_stream, other=0.0) * norm)
    whole += tl.load(biases + j, mask=is_stream, other=0.0)
    tl.store(before + token * num_streams + j, 1.0 / (1.0 + tl.exp(-whole)) + eps, mask=is_stream)
    if after is not None:
        places = num_streams + j
        whole = tl.load(scales + 1) * (tl.load(row + places, mask=is_stream, other=0.0) * norm)
        whole += tl.load(biases + places, mask=is_stream, other=0.0)
        tl.store(after + token * num_streams + j, 2.0 / (1.0 + tl.exp(-whole)), mask=is_stream)
        inside = is_stream[:, None] & (k < num_streams)[None, :]
        cells = j[:, None] * num_streams + k[None, :]
        places = 2 * num_streams + cells
        whole = tl.load(scales + 2) * (tl.load(row + places, mask=inside, other=0.0) * norm)
        whole += tl.load(biases + places, mask=inside, other=0.0)
        # A row of padding is zeros, so that it adds nothing to a column.
        greatest = tl.max(tl.where(inside, whole, float("-inf")), 1)
        powers = tl.where(inside, tl.exp(whole - tl.where(is_stream, greatest, 0.0)[:, None]), 0.0)
        mixed = tl.where(inside, powers / tl.where(is_stream, tl.sum(powers, 1), 1.0)[:, None] + eps, 0.0)
        mixed = mixed / (tl.sum(mixed, 0) + eps)[None, :]
        for _ in range(1, num_iterations):
            mixed = mixed / (tl.sum(mixed, 1) + eps)[:, None]
            mixed = mixed / (tl.sum(mixed, 0) + eps)[None, :]
        tl.store(mixing + token * num_streams * num_streams + cells, mixed, mask=inside)


@triton.jit(do_not_specialize=_NUMBERS[:1])
def sum_streams(streams, weights, out, num_streams, size, BLOCK: tl.constexpr):
    """Write BLOCK numbers of token program_id(0) of out [T, H]: the streams times weights [T, S], one after another."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    row = token * num_streams
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in range(num_streams):
        x = tl.load(streams + (row + stream) * size + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + row + stream) * x
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS[:1])
def spread_output(
    streams, output, after, mixing, out, num_streams, size, output_stride, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write BLOCK numbers of each stream of token program_id(0) of out [T, S, H].

    That is after [T, S] times the output [T, H], to which the streams are added one after another, times
    mixing [T, S, S].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, STREAMS)
    inside, is_stream = columns < size, k < num_streams
    row = token * num_streams
    computed = tl.load(output + token * output_stride + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(after + row + k, mask=is_stream, other=0.0)[:, None] * computed[None, :]
    for stream in range(num_streams):
        x = tl.load(streams + (row + stream) * size + columns, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(mixing + (row + stream) * num_streams + k, mask=is_stream, other=0.0)
        total += weights[:, None] * x[None, :]
    places = (row + k)[:, None] * size + columns[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_stream[:, None] & inside[None, :])


def _weigh_variant(dtype: torch.dtype, has_mixing: bool) -> Variant:
    results = {"after": "*fp32", "mixing": "*fp32"}
    return Variant(
        name=f"weigh_{TYPE_NAMES[dtype]}{'_mixing' if has_mixing else ''}",
        kernel=weigh_streams,
        signature={
            "products": "*fp32", "streams": f"*{TYPE_NAMES[dtype]}", "biases": "*fp32", "scales": "*fp32",
            "before": "*fp32", **(results if has_mixing else {}), "num_streams": "i32", "num_numbers": "i32:16",
            "product_stride": "i32", "num_iterations": "i32", "eps": "fp32", "norm_eps": "fp32",
        },
        constexprs={
            **({} if has_mixing else dict.fromkeys(results)), "STREAMS": MAX_STREAMS, "SQUARES": _SQUARES,
        },
        num_warps=8,
        in_sample=dtype == torch.bfloat16 and has_mixing,
        # Else threads get sums that differ in their last bits: see Variant.
        fuses=False,
    )  # fmt: skip


def _sum_variant(dtype: torch.dtype) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    return Variant(
        name=f"sum_{TYPE_NAMES[dtype]}",
        kernel=sum_streams,
        signature={"streams": number, "weights": "*fp32", "out": number, "num_streams": "i32", "size": "i32:16"},
        constexprs={"BLOCK": BLOCK},
        in_sample=dtype == torch.bfloat16,
        fuses=False,
    )


def _spread_variant(dtype: torch.dtype) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    return Variant(
        name=f"spread_{TYPE_NAMES[dtype]}",
        kernel=spread_output,
        signature={
            "streams": number, "output": number, "after": "*fp32", "mixing": "*fp32", "out": number,
            "num_streams": "i32", "size": "i32:16", "output_stride": "i32:16",
        },
        constexprs={"STREAMS": MAX_STREAMS, "BLOCK": BLOCK},
        in_sample=dtype == torch.bfloat16,
        fuses=False,
    )  # fmt: skip


_WEIGH = {(dtype, has_mixing): _weigh_variant(dtype, has_mixing) for dtype in _DTYPES for has_mixing in (False, True)}
_SUM = {dtype: _sum_variant(dtype) for dtype in _DTYPES}
_SPREAD = {dtype: _spread_variant(dtype) for dtype in _DTYPES}
VARIANTS = (*_WEIGH.values(), *_SUM.values(), *_SPREAD.values())


def workloads(num_tokens: int) -> tuple[Workload, ...]:
    """Return the work of a batch with the sizes of DeepSeek V4 Flash: 4 streams of 4,096 numbers in bfloat16."""
    num_streams, size = MAX_STREAMS, 4096
    numbers = num_tokens * num_streams * size
    weights = 4 * num_tokens * (2 + num_streams) * num_streams
    shape = f"{num_tokens:,} x {num_streams} streams of {size:,}, bf16"
    return (
        Workload("stream_weights", shape, 2 * numbers + 2 * weights, 2 * numbers, False),
        Workload("collapse_streams", shape, 2 * (numbers + num_tokens * size), 2 * numbers, False),
        Workload(
            "expand_streams", shape, 2 * (2 * numbers + num_tokens * size), 2 * (num_streams + 1) * numbers, False
        ),
    )


WORKLOADS = (*workloads(64), *workloads(4096))


def stream_weights(products: Tensor, streams: Tensor, options: HyperOptions) -> StreamWeights:
    """reference_hyper.stream_weights, in float32."""
    num_tokens, num_streams, size = streams.shape
    are_plain = all(map(_is_plain, (products, options.biases, options.scales)))
    if options.scales.numel() == 2 or options.magnitude != 2.0 or not (_is_served(streams) and are_plain):
        return by_definition(reference_hyper.stream_weights, products, streams, options)
    has_mixing = products.shape[1] != num_streams
    kinds = (("before", (num_streams,)), ("after", (num_streams,)), ("mixing", (num_streams, num_streams)))
    results = {
        name: torch.empty((num_tokens, *shape), dtype=torch.float32, device=streams.device)
        for name, shape in kinds[: 3 if has_mixing else 1]
    }
    _WEIGH[streams.dtype, has_mixing].launch(
        (num_tokens,), products=products, streams=streams.contiguous(), biases=options.biases, scales=options.scales,
        num_streams=num_streams, num_numbers=num_streams * size, product_stride=products.stride(0),
        num_iterations=options.num_iterations, eps=options.eps, norm_eps=options.norm_eps, **results,
    )  # fmt: skip
    return StreamWeights(**results)


def collapse_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """reference_hyper.collapse_streams."""
    if not (_is_served(streams) and _is_plain(weights)):
        return by_definition(reference_hyper.collapse_streams, streams, weights)
    num_tokens, num_streams, size = streams.shape
    out = torch.empty((num_tokens, size), dtype=streams.dtype, device=streams.device)
    _SUM[streams.dtype].launch(
        (num_tokens, triton.cdiv(size, BLOCK)), streams=streams.contiguous(), weights=weights, out=out,
        num_streams=num_streams, size=size,
    )  # fmt: skip
    return out


def expand_streams(streams: Tensor, output: Tensor, weights: StreamWeights) -> Tensor:
    """reference_hyper.expand_streams."""
    after, mixing = weights.after, weights.mixing
    assert after is not None, "a sum alone is not expanded"
    fits = output.dtype == streams.dtype and output.stride(1) == 1
    if mixing is None or not (_is_served(streams) and fits and _is_plain(after) and _is_plain(mixing)):
        return by_definition(reference_hyper.expand_streams, streams, output, weights)
    num_tokens, num_streams, size = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    _SPREAD[streams.dtype].launch(
        (num_tokens, triton.cdiv(size, BLOCK)), streams=streams.contiguous(), output=output, after=after,
        mixing=mixing, out=out, num_streams=num_streams, size=size, output_stride=output.stride(0),
    )  # fmt: skip
    return out


def _is_served(streams: Tensor) -> bool:
    return streams.dim() == 3 and streams.dtype in _DTYPES and streams.shape[1] <= MAX_STREAMS


def _is_plain(numbers: Tensor) -> bool:
    """Whether these are float32 numbers that follow each other."""
    return numbers.dtype == torch.float32 and numbers.is_contiguous()
