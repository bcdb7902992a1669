"""Products of FP8 weights with activations that are rounded to FP8, too: --fp8-activations. E4M3 on both sides.

Definition: reference_quantized.quantize_activations, and the product of both sides' numbers in float32, rounded once.
There are two kinds of products, and both have a scale for each row of x at least:

- Weights whose rows have one scale each: PyTorch's `_scaled_mm`, with a scale for each row of x. Which of its forms a
  GPU has is tried once (`form_on`).
- All others with groups of 128 columns, experts included: `fp8_tiles_kernel`, with a scale for each 128 columns of x,
  as https://arxiv.org/abs/2412.19437 (DeepSeek-V3, 3.3) proposes: tensor cores add the products of a group, and the
  groups' sums are scaled and added in float32.

T: rows of x; N: outputs; K: inputs.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import fp8_activations
from pagewick.kernels.triton import layouts
from pagewick.kernels.triton.cache_numbers import fp8_bits
from pagewick.kernels.triton.grouping import Grouping
from pagewick.kernels.triton.launches import MANY, SOME, Stored, tile_of
from pagewick.kernels.triton.products import choices_of, tile_of_choices
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant

GROUP: Final = 128
_FORMAT: Final = "fp8_g128"
# Other kinds of products have few rows for each weight, and are bound by its bytes: activations stay as they are.
_KINDS: Final = (SOME, MANY)
_TARGETS: Final = ("sm_89", "sm_90")
_DTYPES: Final = (torch.bfloat16, torch.float16)
# Rows of a tile -> its outputs, warps and stages.
_TILES: Final = {64: (64, 8, 4), 128: (64, 8, 3)}
# Columns that the kernel below reads at once if a row has one scale.
_COLUMNS: Final = 1024
# Forms of PyTorch's product: scales of rows and columns inside it; or none, and they are multiplied behind it.
ROWS_INSIDE, BEHIND = "rows inside", "behind"


@triton.jit
def quantize_kernel(x, levels, scales, num_columns, group_size, x_stride, BLOCK: tl.constexpr):
    """Define reference_quantized.quantize_activations: a group of a row, BLOCK columns at once. Grid: [T, K / G]."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += row * x_stride + group * group_size
    levels += row * num_columns + group * group_size
    # Magnitudes as whole numbers, because a maximum of floating-point numbers passes over a NaN.
    bits = tl.zeros([BLOCK], tl.int32)
    for first in range(0, group_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + column, mask=column < group_size, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest_bits = tl.max(bits, 0)
    is_finite = largest_bits < 0x7F800000
    scale = tl.math.div_rn(largest_bits.to(tl.float32, bitcast=True), 448.0)
    divisor = tl.where(is_finite & (scale > 0), scale, 1.0)
    for first in range(0, group_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + column, mask=column < group_size, other=0.0).to(tl.float32)
        numbers = tl.math.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape))
        numbers = tl.where(is_finite, tl.minimum(tl.maximum(numbers, -448.0), 448.0), 0.0)
        tl.store(levels + column, fp8_bits(numbers, 3, 7).to(tl.uint8), mask=column < group_size)
    place = row * (num_columns // group_size) + group
    tl.store(scales + place, tl.where(is_finite, scale, float("nan")))


@triton.jit(do_not_specialize=["num_choices"])
def fp8_tiles_kernel(
    x, x_scales, levels, scales, bias, out, order, tiles, num_choices, num_rows, num_columns, num_experts,
    choices_per_row, num_biases, out_stride, row_bytes, scales_at,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of x [T, K] by BLOCK_N rows of a weight: a tile of out. Grid: [tiles of rows, N / BLOCK_N].

    x_scales: [T, K / GROUP]. levels, scales: the same memory, whose rows have row_bytes bytes, as E4M3 and as float32,
    where a row's scales begin at scales_at. The other arguments are those of products.tiles_kernel.
    """
    expert, start, end = tile_of_choices(tiles, num_choices, num_experts, BLOCK_M)
    if start >= end:
        return
    is_expert = expert < tl.maximum(num_experts, 1)
    choice, is_choice = choices_of(order, start, end, num_experts, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and choices that do not exist are computed from others and not stored: masks would take registers.
    row, first_byte = tl.where(n < num_rows, n, 0), tl.where(is_expert, expert, 0).to(tl.int64) * num_rows * row_bytes
    x_row = tl.where(is_choice, choice, 0) // choices_per_row
    of_x = x + x_row.to(tl.int64)[:, None] * num_columns
    of_levels = levels + first_byte + row.to(tl.int64)[:, None] * row_bytes
    # Each thread has scales of many rows: their places are of 32 bits, which spares registers.
    scales += first_byte // 4 + scales_at
    of_scales = row * (row_bytes // 4)
    column = tl.arange(0, GROUP)
    num_groups = num_columns // GROUP
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, num_groups):
        at = (group * GROUP + column)[None, :]
        left, right = tl.load(of_x + at), tl.load(of_levels + at)
        left_scale, right_scale = tl.load(x_scales + group + x_row * num_groups), tl.load(scales + group + of_scales)
        total += tl.dot(left, tl.trans(right)) * left_scale[:, None] * right_scale[None, :]
    has_biases = tl.where(is_expert, num_biases, 0)
    total += tl.load(bias + expert.to(tl.int64) * num_biases + n, mask=n < has_biases, other=0.0)[None, :]
    total += tl.where(is_expert, 0.0, float("nan"))
    mask = is_choice[:, None] & (n < num_rows)[None, :]
    tl.store(out + choice.to(tl.int64)[:, None] * out_stride + n[None, :], total.to(out.dtype.element_ty), mask=mask)


def _quantizer(dtype: torch.dtype, block: int) -> Variant:
    pointers = {"x": f"*{TYPE_NAMES[dtype]}", "levels": "*u8", "scales": "*fp32"}
    return Variant(
        name=f"quantize activations {TYPE_NAMES[dtype]} {block}",
        kernel=quantize_kernel,
        signature={**pointers, "num_columns": "i32:16", "group_size": "i32:16", "x_stride": "i32:16"},
        constexprs={"BLOCK": block},
        in_sample=dtype == torch.bfloat16 and block == _COLUMNS,
        targets=_TARGETS,
    )


def _tiles(rows: int, dtype: torch.dtype, out_dtype: torch.dtype) -> Variant:
    outputs, num_warps, num_stages = _TILES[rows]
    x, result = f"*{TYPE_NAMES[dtype]}", f"*{TYPE_NAMES[out_dtype]}"
    pointers = {"x": "*fp8e4nv", "x_scales": "*fp32", "levels": "*fp8e4nv", "scales": "*fp32", "bias": x, "out": result}
    multiples = ("num_rows", "num_columns", "out_stride", "row_bytes")
    numbers = ("num_choices", "num_experts", "choices_per_row", "num_biases", "scales_at")
    return Variant(
        name=f"fp8 tiles {rows} {TYPE_NAMES[dtype]} {TYPE_NAMES[out_dtype]}",
        kernel=fp8_tiles_kernel,
        signature={
            **pointers, "order": "*i32", "tiles": "*i32", **dict.fromkeys(multiples, "i32:16"),
            **dict.fromkeys(numbers, "i32"),
        },
        constexprs={"BLOCK_M": rows, "BLOCK_N": outputs, "GROUP": GROUP},
        num_warps=num_warps,
        num_stages=num_stages,
        uses_tensor_cores=True,
        in_sample=rows == 128 and dtype == out_dtype == torch.bfloat16,
        targets=_TARGETS,
    )  # fmt: skip


_QUANTIZERS: Final = {(dtype, block): _quantizer(dtype, block) for dtype in _DTYPES for block in (GROUP, _COLUMNS)}
_PRODUCTS: Final = {
    (rows, dtype, out): _tiles(rows, dtype, out)
    for rows in _TILES
    for dtype in _DTYPES
    for out in (dtype, torch.float32)
}
VARIANTS: Final = (*_QUANTIZERS.values(), *_PRODUCTS.values())


def serves(kind: str, weight: Stored, dtype: torch.dtype) -> bool:
    """Whether `multiply` is to take the product of a kind (launches.py) of activations in a dtype with a weight."""
    is_fp8 = weight.format == _FORMAT or weight.row_scales is not None
    return is_fp8 and kind in _KINDS and dtype in _DTYPES and fp8_activations.is_required()


def multiply(
    kind: str, x: Tensor, weight: Stored, bias: Tensor | None, out: Tensor, *, choices_per_row: int = 1,
    grouping: Grouping | None = None,
) -> None:  # fmt: skip
    """launches.launch_product with x [T, K] rounded to FP8."""
    if weight.row_scales is not None:
        _multiply_rows(x, weight, weight.row_scales, bias, out)
        return
    levels, x_scales = quantize_activations(x, GROUP)
    planes, rows = layouts.planes(weight.format, weight.num_columns), tile_of(kind, weight.format).rows
    # A pointer that is not read may point anywhere.
    unread = torch.empty(0, dtype=torch.int32, device=x.device)
    order, tiles = grouping or (unread, unread)
    num_tiles = -(-len(out) // rows) if grouping is None else len(tiles)
    variant = _PRODUCTS[rows, x.dtype, out.dtype]
    variant.launch(
        (num_tiles, -(-weight.num_rows // variant.constexprs["BLOCK_N"])),
        x=levels, x_scales=x_scales, levels=weight.data.view(torch.float8_e4m3fn),
        scales=weight.data.view(torch.float32), bias=x if bias is None else bias, out=out, order=order, tiles=tiles,
        num_choices=len(out), num_rows=weight.num_rows, num_columns=weight.num_columns, num_experts=weight.num_experts,
        choices_per_row=choices_per_row, num_biases=0 if bias is None else weight.num_rows, out_stride=out.stride(0),
        row_bytes=planes.row_bytes, scales_at=planes.scales // 4,
    )  # fmt: skip


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """reference_quantized.quantize_activations of x [T, K], whose rows may lie apart."""
    num_rows, num_columns = x.shape
    levels = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, num_columns // group_size, dtype=torch.float32, device=x.device)
    _QUANTIZERS[x.dtype, GROUP if group_size == GROUP else _COLUMNS].launch(
        (num_rows, num_columns // group_size), x=x, levels=levels.view(torch.uint8), scales=scales,
        num_columns=num_columns, group_size=group_size, x_stride=x.stride(0),
    )  # fmt: skip
    return levels, scales


def _multiply_rows(x: Tensor, weight: Stored, row_scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply by a weight with a scale for each row."""
    levels, x_scales = quantize_activations(x, x.shape[1])
    right = weight.data.view(torch.float8_e4m3fn)[:, : weight.num_columns].t()
    form = form_on(x.device)
    if form == ROWS_INSIDE and out.dtype == torch.bfloat16:
        out.copy_(_product(form, levels, right, x_scales, row_scales, bias))
        return
    product = _product(BEHIND, levels, right, x_scales, row_scales, None)
    out.copy_(product if bias is None else product.add_(bias))


def _product(
    form: str, left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Return left [T, K] times right [K, N] times scales [T, 1] and [N]; with scales inside, plus bias, in bfloat16."""
    if form == ROWS_INSIDE:
        return torch._scaled_mm(
            left, right, scale_a=left_scales, scale_b=right_scales[None], bias=bias, out_dtype=torch.bfloat16
        )
    one = torch.ones((), device=left.device)
    product = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product.mul_(left_scales).mul_(right_scales)


@functools.cache
def form_on(device: torch.device) -> str | None:
    """Return the form of PyTorch's product that a device has, the faster one if it has both; None: it has none.

    Which GPUs and versions have a scale for each row is written nowhere, so a product whose result is known is tried.
    Rows of the weight lie apart, as in a packed one. PyTorch's kernel for capability 8.9 takes them for adjacent ones.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, (size, 64), generator=generator).float() for size in (32, 48))
    left_scales, right_scales = (2.0 ** torch.arange(size).remainder(7) for size in (32, 48))
    expected = (left * left_scales[:, None]) @ (right * right_scales[:, None]).t()
    left, right = left.to(device, torch.float8_e4m3fn), F.pad(right, (0, 16)).to(device, torch.float8_e4m3fn)[:, :64]
    for form in (ROWS_INSIDE, BEHIND):
        try:
            found = _product(form, left, right.t(), left_scales[:, None].to(device), right_scales.to(device), None)
        except (RuntimeError, ValueError):
            continue
        if torch.equal(found.cpu().float(), expected):
            return form
    return None
