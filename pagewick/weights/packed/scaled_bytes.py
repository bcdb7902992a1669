"""Numbers of one byte with scales, from tensors of a checkpoint to rows of a block format.

N: rows, C: columns of a weight. A number is scale * value, in float32, for a value in int8, E4M3 or E5M2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.weights.packed.layout import NUMBERS

# Numbers that are encoded at a time; temporary memory is a few times as many bytes.
_CHUNK_SIZE: Final = 2**21

Values = Callable[[int, int], Tensor]
"""(first row, end) -> the values of these rows, [n, C], of a type of one byte."""


def encode(kind: str, shape: tuple[int, int], values: Values, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return rows of blocks [N, bytes] uint8 of the format `kind`, or float32 numbers [N, C] if it is NUMBERS.

    scales: float32; each is for a block of rows and columns, of which the last ones may be smaller. Raises
    ModelLoadError for values and scales that are not finite.
    """
    num_rows, num_columns = shape
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("a scale is infinite or NaN\n  download the file again")
    numbers, num_bytes = (1, 4) if kind == NUMBERS else BLOCK_FORMATS[kind]
    columns = torch.arange(0, num_columns, numbers) // block[1]
    found = torch.empty(num_rows, num_columns // numbers, num_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK_SIZE // num_columns)
    for first in range(0, num_rows, step):
        end = min(num_rows, first + step)
        rows = torch.arange(first, end) // block[0]
        of_rows = values(first, end)
        _check_finite(of_rows)
        _write(kind, found[first:end], of_rows.contiguous(), scales.index_select(0, rows).index_select(1, columns))
    return found.flatten(1).view(torch.float32) if kind == NUMBERS else found.flatten(1)


def _write(kind: str, found: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write blocks [n, B, bytes] for values [n, C] and float32 scales, of which each block has one."""
    if kind == NUMBERS:
        found.copy_((values.float() * scales).unsqueeze(-1).view(torch.uint8))
        return
    numbers, num_bytes = BLOCK_FORMATS[kind]
    in_file = scales.to(torch.float16 if kind == "Q8_0" else torch.float32)
    found[..., : num_bytes - numbers] = in_file.view(torch.uint8).view(*found.shape[:2], -1)
    found[..., num_bytes - numbers :] = values.view(torch.uint8).view(*found.shape[:2], -1)


def _check_finite(values: Tensor) -> None:
    """Raise ModelLoadError for patterns of infinity and NaN."""
    if values.dtype == torch.float8_e4m3fn:
        is_finite = bool((values.view(torch.uint8) & 0x7F != 0x7F).all())
    else:
        is_finite = values.dtype == torch.int8 or bool(values.float().isfinite().all())
    if not is_finite:
        raise ModelLoadError("a number is infinite or NaN\n  download the file again")


def check_symmetric(zeros: Tensor) -> None:
    """Raise ModelLoadError unless all zero points are 0, which some checkpoints store for symmetric weights."""
    if bool(zeros.float().any()):
        raise ModelLoadError("it has zero points, and config.json says that it is symmetric\n  correct symmetric there")


def scale_numbers(stored: Tensor) -> Tensor:
    """Return scales in float32. Bytes are exponents (E8M0): 127 is the scale 1."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()


def fp4_rows(stored: Tensor, scales: Tensor) -> Tensor:
    """Return rows of blocks [n, bytes] uint8: 32 codes, the lower half first, after their scale or scales.

    stored: bytes [n, C / 2] that hold two codes, the lower half first. scales: E8M0 bytes [n, C / 32], or float32
    numbers [n, C / 16]. Raises ModelLoadError for a scale that is infinite or NaN.
    """
    if not bool((scales != 255 if scales.dtype == torch.uint8 else scales.isfinite()).all()):
        raise ModelLoadError("a scale is infinite or NaN\n  download the file again")
    blocks = len(stored), stored.shape[1] // 16
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).view(*blocks, 2, 16)
    heads = scales.contiguous().view(torch.uint8).view(*blocks, -1)
    return torch.cat([heads, codes[:, :, 0] | codes[:, :, 1] << 4], dim=-1).flatten(1)
