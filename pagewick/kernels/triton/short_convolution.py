"""Short convolutions: with gates c * convolution(b * x), as in LFM2, or silu(convolution(x)), as in Mamba-1.

Definition: short_convolution of reference_scan.py. A token is computed from its own inputs and the K - 1 before it, in
one order, so that its bits depend on its own sequence alone. The convolution and its inputs are in windows.py.

Dimensions: T tokens, B sequences, K inputs of the convolution for each of its D channels.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_scan
from pagewick.kernels.options import AttentionMetadata, ConvolutionOptions
from pagewick.kernels.triton import windows
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload
from pagewick.kernels.triton.windows import convolved_block, silu

# D is a multiple of this.
MULTIPLE = 16
# Channels of a program. It is one warp, which finds its sequence without waiting for others.
_CHANNELS = 256


@triton.jit(do_not_specialize=["num_seqs"])
def convolve_products(
    rows_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_seqs, num_channels,
    width, row_stride, block_floats, table_stride, HAS_GATES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Compute channels program_id(1) of the result for token program_id(0).

    rows: [T, 3 * D], or [T, D] without gates; out: [T, D].
    """
    token, channels, inside, total = convolved_block(
        rows_ptr, weight_ptr, bias_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_seqs, num_channels, width,
        row_stride, block_floats, table_stride, HAS_GATES, BLOCK, BLOCK_B,
    )  # fmt: skip
    if HAS_GATES:
        gate_ptr = rows_ptr + token * row_stride + num_channels
        result = tl.load(gate_ptr + channels, mask=inside, other=0.0).to(tl.float32) * total
    else:
        result = silu(total)
    tl.store(out_ptr + token * num_channels + channels, result.to(out_ptr.dtype.element_ty), mask=inside)


def _convolution(dtype: torch.dtype, has_bias: bool, has_gates: bool) -> Variant:
    pointers = {**dict.fromkeys(("rows_ptr", "out_ptr"), f"*{TYPE_NAMES[dtype]}"), "weight_ptr": "*fp32"}
    bias = {"bias_ptr": "*fp32"} if has_bias else {}
    return Variant(
        name=f"convolve_{'products' if has_gates else 'inputs'}_{'bias_' if has_bias else ''}{TYPE_NAMES[dtype]}",
        kernel=convolve_products,
        signature={**pointers, **bias, **windows.BATCH, **windows.SIZES, "num_seqs": "i32"},
        constexprs={
            **({} if has_bias else {"bias_ptr": None}),
            "HAS_GATES": has_gates,
            "BLOCK": _CHANNELS,
            "BLOCK_B": windows.BLOCK_B,
        },
        num_warps=1,
        # So that a product in the window has the bits that it has when it is stored.
        fuses=False,
        in_sample=(dtype, has_bias, has_gates) == (torch.bfloat16, False, True),
    )


_CONVOLUTIONS = {key: _convolution(*key) for key in itertools.product(windows.DTYPES, (False, True), (False, True))}
VARIANTS = (*_CONVOLUTIONS.values(), *windows.PRODUCT_KEEPS.values())

# LFM2-1.2B: 2,048 channels. States are read and written once for each sequence.
WORKLOADS = tuple(
    Workload("short_convolution", f"{seqs} x {tokens} tokens, 3 inputs of 2,048 channels, bf16",
             seqs * 2048 * (2 * 2 * 4 + tokens * 4 * 2), seqs * tokens * 2048 * 8, on_tensor_cores=False)
    for seqs, tokens in ((1, 1), (64, 1), (1, 2048))
)  # fmt: skip


def short_convolution(bcx: Tensor, states: Tensor, batch: AttentionMetadata, options: ConvolutionOptions) -> Tensor:
    """reference_scan.short_convolution."""
    if not _is_served(bcx, states, options):
        return by_definition(reference_scan.short_convolution, bcx, states, batch, options)
    num_channels, width = options.weight.shape
    out = torch.empty((len(bcx), num_channels), dtype=bcx.dtype, device=bcx.device)
    where = windows.where(states, batch, num_channels, width)
    _CONVOLUTIONS[bcx.dtype, options.bias is not None, options.has_gates].launch(
        (len(bcx), -(-num_channels // _CHANNELS)), weight_ptr=options.weight, out_ptr=out,
        num_seqs=len(batch.context_lens), **({} if options.bias is None else {"bias_ptr": options.bias}),
        **windows.rows_of(bcx), **where,
    )  # fmt: skip
    keeps = windows.PRODUCT_KEEPS if options.has_gates else windows.KEEPS
    windows.keep(keeps[bcx.dtype], bcx, where)
    return out


def _is_served(bcx: Tensor, states: Tensor, options: ConvolutionOptions) -> bool:
    constants = [each for each in (options.weight, options.bias) if each is not None]
    fits = len(options.weight) % MULTIPLE == 0 and bcx.stride(-1) == 1 and states.is_contiguous()
    return bcx.dtype in windows.DTYPES and fits and all(each.is_contiguous() for each in constants)
