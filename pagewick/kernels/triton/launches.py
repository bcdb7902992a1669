"""Variants of the kernels of products.py, and the choice between them. T: rows of x; N: outputs; K: inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pagewick.kernels import batch_invariance
from pagewick.kernels.triton import layouts, products
from pagewick.kernels.triton.grouping import Grouping
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# Sizes of tiles; ROWS is not a tile of rows, but one row in a program.
ROWS, FEW, SOME, MANY = "rows", "few", "some", "many"
PLAIN: Final = "plain"
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
# Dtypes of x and of the result.
_PAIRS: Final = tuple((x, out) for x in _DTYPES for out in dict.fromkeys((x, torch.float32)))
_PLAIN_FORMAT: Final = layouts.Format(16, 16, 16, levels=layouts.PLAIN)
_IN_SAMPLE: Final = {(ROWS, "Q6_K"), (ROWS, "iq4_g32"), (FEW, "int4_g128"), (MANY, "Q4_K"), (SOME, PLAIN)}


class Tile(NamedTuple):
    """A part of the result that a program computes, and the columns that it reads at once."""

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights for a launch: the bytes of one or of num_experts (else 0) weights [num_rows, num_columns].

    row_scales: as in StoredQuantized.
    """

    data: Tensor
    num_rows: int
    num_columns: int
    format: str = PLAIN
    num_experts: int = 0
    row_scales: Tensor | None = None


def _format(name: str) -> layouts.Format:
    return _PLAIN_FORMAT if name == PLAIN else layouts.FORMATS[name]


def tile_of(kind: str, name: str) -> Tile:
    """Return the tile of a kind for weights of a format. It depends on neither the batch nor the GPU."""
    form = _format(name)
    if kind == ROWS:
        # A lane has up to 16 bytes of levels of each of four rows, so that it converts x once for four products.
        return Tile(1, 16, min(1024, 4096 // form.low_bits), 4, 2)
    if kind == FEW:
        # Six stages of 128 columns: for 4,096 outputs, 1.5 MB of Q4_K are on their way, about as much as an H100 needs.
        return Tile(16, 32, 128, 4, 6)
    if kind == SOME:
        # Plain weights need no registers between memory and the tensor cores, so that more of them can be on their way.
        return Tile(64, 64, 64, 4, 4 if name == PLAIN else 2)
    return Tile(128, 128, 64, 8, 2)


def _constants(form: layouts.Format) -> dict[str, int]:
    codebook_low, codebook_high = form.codebook_words
    return {
        # Larger groups are two of 64, so that a tile need not have 128 columns.
        "LEVELS": form.levels, "BLOCK": form.block, "GROUP": min(64, form.group), "LOW_BITS": form.low_bits,
        "HIGH_BITS": form.high_bits, "OFFSET": form.offset, "CODEBOOK_LOW": codebook_low,
        "CODEBOOK_HIGH": codebook_high, "SCALE_BYTES": 2 if form.is_half else 4, "GROUP_SCALES": form.group_scales,
        "MINIMA": form.minima,
    }  # fmt: skip


def _signature(kind: str, name: str, dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, str]:
    """Return the types of the arguments of a product."""
    x, form = f"*{TYPE_NAMES[dtype]}", _format(name)
    weight = (x, x, x) if name == PLAIN else ("*i32", "*u8", "*fp16" if form.is_half else "*fp32")
    pointers = {"x": x, **dict(zip(("words", "codes", "scales"), weight, strict=True)), "bias": x}
    pointers["out"] = f"*{TYPE_NAMES[out_dtype]}"
    places = {"expert_ids": "*i32"} if kind == ROWS else {"order": "*i32", "tiles": "*i32", "num_choices": "i32"}
    multiples = ("num_rows", "num_columns", "x_stride", "out_stride")
    numbers = ("num_experts", "choices_per_row", "num_biases", "row_words", *_PLANES)
    return {**pointers, **places, **dict.fromkeys(multiples, "i32:16"), **dict.fromkeys(numbers, "i32")}


def _variant(kind: str, name: str, dtype: torch.dtype, out_dtype: torch.dtype) -> Variant:
    tile = tile_of(kind, name)
    blocks = {"BLOCK_N": tile.outputs, "BLOCK_K": tile.columns}
    return Variant(
        name=f"{kind} {name} {TYPE_NAMES[dtype]} {TYPE_NAMES[out_dtype]}",
        kernel=products.rows_kernel if kind == ROWS else products.tiles_kernel,
        signature=_signature(kind, name, dtype, out_dtype),
        constexprs={**({} if kind == ROWS else {"BLOCK_M": tile.rows}), **blocks, **_constants(_format(name))},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        uses_tensor_cores=kind != ROWS,
        in_sample=(kind, name) in _IN_SAMPLE and dtype == out_dtype == torch.bfloat16,
    )


def _gather(name: str, dtype: torch.dtype) -> Variant:
    form = layouts.FORMATS[name]
    pointers = {"row_ids": "*i64", "words": "*i32", "codes": "*u8", "scales": "*fp16" if form.is_half else "*fp32"}
    sizes = {"out": f"*{TYPE_NAMES[dtype]}", "num_rows": "i32", "num_columns": "i32:16"}
    return Variant(
        name=f"gather {name} {TYPE_NAMES[dtype]}",
        kernel=products.gather_kernel,
        signature={**pointers, **sizes, **dict.fromkeys(("row_words", *_PLANES), "i32")},
        constexprs={"BLOCK_N": 1, "BLOCK_K": _GATHER_COLUMNS, **_constants(form)},
    )


_PLANES: Final = ("high_at", "group_scales_at", "group_minima_at", "scales_at", "minima_at")
_GATHER_COLUMNS: Final = 1024
PRODUCTS: Final[Mapping[tuple[str, str, torch.dtype, torch.dtype], Variant]] = {
    (kind, name, dtype, out_dtype): _variant(kind, name, dtype, out_dtype)
    for kind in (ROWS, FEW, SOME, MANY)
    for name in (*layouts.FORMATS, PLAIN)
    for dtype, out_dtype in _PAIRS
    if kind == ROWS or dtype != torch.float32
}
GATHERS: Final[Mapping[tuple[str, torch.dtype], Variant]] = {
    (name, dtype): _gather(name, dtype) for name in layouts.FORMATS for dtype in _DTYPES
}


def kind_for(num_rows: int, dtype: torch.dtype) -> str:
    """Return the kind of tile for products of x [num_rows, K]. Batch-invariant products have one kind for all numbers.

    Tensor cores have no float32, and tiles of it would spill registers.
    """
    if dtype == torch.float32:
        return ROWS
    if batch_invariance.is_required():
        return FEW
    if num_rows == 1:
        return ROWS
    return FEW if num_rows <= 16 else SOME if num_rows <= 256 else MANY


def places(name: str, num_columns: int) -> dict[str, int]:
    """Return the arguments that say where the planes of a row of a format lie."""
    if name == PLAIN:
        return {"row_words": num_columns, **dict.fromkeys(_PLANES, 0)}
    planes, scale_bytes = layouts.planes(name, num_columns), 2 if layouts.FORMATS[name].is_half else 4
    return {
        "row_words": planes.row_bytes // 4, "high_at": planes.high // 4, "group_scales_at": planes.group_scales,
        "group_minima_at": planes.group_minima, "scales_at": planes.scales // scale_bytes,
        "minima_at": planes.minima // scale_bytes,
    }  # fmt: skip


def views(data: Tensor, name: str) -> dict[str, Tensor]:
    """Return the bytes of weights as arguments, in the types in which kernels read them."""
    if name == PLAIN:
        return {"words": data, "codes": data, "scales": data}
    scales = data.view(torch.float16 if layouts.FORMATS[name].is_half else torch.float32)
    return {"words": data.view(torch.int32), "codes": data, "scales": scales}


def launch_product(
    kind: str, x: Tensor, weight: Stored, bias: Tensor | None, out: Tensor, *, choices_per_row: int = 1,
    expert_ids: Tensor | None = None, grouping: Grouping | None = None,
) -> None:  # fmt: skip
    """Write the products of x [T, K] or of its choices to out [T or choices, N], whose rows may lie apart.

    expert_ids: of each choice, int32, if weight has experts and kind is ROWS; grouping: theirs for other kinds.
    """
    tile = tile_of(kind, weight.format)
    by_outputs = -(-weight.num_rows // tile.outputs)
    arguments: dict[str, Any] = {
        "x": x, **views(weight.data, weight.format), "bias": x if bias is None else bias, "out": out,
        "num_rows": weight.num_rows, "num_columns": weight.num_columns, "num_experts": weight.num_experts,
        "choices_per_row": choices_per_row, "num_biases": 0 if bias is None else weight.num_rows,
        "x_stride": x.stride(0), "out_stride": out.stride(0), **places(weight.format, weight.num_columns),
    }  # fmt: skip
    # A pointer that is not read may point anywhere.
    unread = torch.empty(0, dtype=torch.int32, device=x.device)
    if kind == ROWS:
        grid = (len(out), by_outputs)
        arguments["expert_ids"] = unread if expert_ids is None else expert_ids
    else:
        order, tiles = grouping or (unread, unread)
        grid = (-(-len(out) // tile.rows) if grouping is None else len(tiles), by_outputs)
        arguments |= {"order": order, "tiles": tiles, "num_choices": len(out)}
    PRODUCTS[kind, weight.format, x.dtype, out.dtype].launch(grid, **arguments)


def launch_gather(row_ids: Tensor, weight: Stored, out: Tensor) -> None:
    """Write rows row_ids [n] int64 of a quantized weight as numbers to out [n, K]."""
    grid = (len(row_ids), -(-weight.num_columns // _GATHER_COLUMNS))
    GATHERS[weight.format, out.dtype].launch(
        grid, row_ids=row_ids, **views(weight.data, weight.format), out=out, num_rows=weight.num_rows,
        num_columns=weight.num_columns, **places(weight.format, weight.num_columns),
    )  # fmt: skip


def workload(operation: str, name: str, num_tokens: int, num_rows: int, num_columns: int) -> Workload:
    """Return the bytes and operations of a product in bfloat16, for its limit on paper: weights are read once."""
    weight = layouts.planes(name, num_columns).row_bytes * num_rows
    return Workload(
        operation, f"{name}, {num_tokens} x {num_rows} x {num_columns}",
        weight + 2 * num_tokens * (num_rows + num_columns), 2 * num_tokens * num_rows * num_columns,
        on_tensor_cores=num_tokens > 1,
    )  # fmt: skip
