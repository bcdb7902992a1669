"""Whole numbers with scales and zero points, from words of bits to rows of a block format.

N: rows, C: columns, G: groups of a row. A number is scale * (level - zero), in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.weights.packed.layout import NUMBERS

# Numbers that are decoded at a time; temporary memory is a few times as many bytes.
_CHUNK_SIZE: Final = 2**21
_INT8_FORMATS: Final = ("Q8_0", "int8_g32")

Levels = Callable[[int, int], Tensor]
"""(first row, end) -> the levels of these rows, [n, C] uint8."""


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of `bits` bits in words [n, W] int32, from the lowest bit on: [n, 32 W / bits] uint8."""
    if bits == 3:
        return _unpack_threes(words)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    octets = words.contiguous().view(torch.uint8)
    return (octets.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _unpack_threes(words: Tensor) -> Tensor:
    """Three words hold 32 numbers of three bits, two of which lie in two words."""
    triples = torch.unflatten(words.long() & 0xFFFFFFFF, 1, (-1, 3))
    starts = torch.arange(0, 96, 3)
    first = starts // 32
    pairs = triples[..., first] | triples[..., (first + 1).clamp(max=2)] << 32
    return (pairs >> starts % 32 & 7).to(torch.uint8).flatten(1)


def unpack_loose(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in words [n, W] int32, none of which lies in two words: [n, 32 // bits * W] uint8."""
    shifts = torch.arange(32 // bits) * bits
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def unpack_rows(words: Tensor, rows_in_word: Sequence[int]) -> Tensor:
    """Return the numbers of 4 bits in words [n, N / 8] int32, each of which holds neighbouring rows: [N, n] uint8.

    rows_in_word: which of its eight rows a word holds, from the lowest bit on.
    """
    found = torch.unflatten(unpack_words(words, 4), 1, (-1, len(rows_in_word)))
    return found[..., torch.tensor(rows_in_word).argsort()].flatten(1).t().contiguous()


def levels_in_rows(words: Tensor, rows_in_word: Sequence[int]) -> Levels:
    """Return the levels in words, which are as for unpack_rows, by rows."""
    size = len(rows_in_word)

    def levels(first: int, end: int) -> Tensor:
        first_word = first // size
        rows = unpack_rows(words[:, first_word : -(-end // size)], rows_in_word)
        return rows[first - first_word * size : end - first_word * size]

    return levels


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Do the reverse of unpack_words: numbers [n, m] uint8 become words [n, m bits / 32] int32."""
    if bits == 3:
        return torch.cat([_pack_threes(rows) for rows in torch.split(numbers, max(1, _CHUNK_SIZE // numbers.shape[1]))])
    step = 8 // bits
    octets = numbers[:, ::step].clone(memory_format=torch.contiguous_format)
    for place in range(1, step):
        octets |= numbers[:, place::step] << bits * place
    return octets.view(torch.int32)


def _pack_threes(numbers: Tensor) -> Tensor:
    single = (numbers.unsqueeze(-1) >> torch.arange(3, dtype=torch.uint8) & 1).reshape(len(numbers), -1, 8)
    return (single << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8).view(torch.int32)


def groups_of(num_columns: int, group_size: int) -> Tensor:
    """Return the group of each column [C] int32, if groups are neighbours."""
    size = num_columns if group_size == -1 else group_size
    return torch.arange(num_columns, dtype=torch.int32) // size


def zeros_of(zeros: Tensor, bits: int) -> Tensor | None:
    """Return zero points as uint8; None if all are in the middle of the levels. Raises ModelLoadError above 255."""
    if bool((zeros == 1 << bits - 1).all()):
        return None
    if bool((zeros > 255).any()):
        raise ModelLoadError("a zero point is larger than 255\n  download or copy the file again")
    return zeros.to(torch.uint8)


def zero_points(zeros: Tensor | None, like: Tensor, bits: int) -> Tensor:
    """Return zero points [N, G] int16 in the shape of the scales; those of symmetric levels are all in the middle."""
    return torch.full(like.shape, 1 << bits - 1, dtype=torch.int16) if zeros is None else zeros.short()


def check_groups(groups: Tensor, group_size: int, contradicted: str = "") -> None:
    """Raise ModelLoadError unless the groups [C] of columns are neighbours of equal size.

    contradicted: the entry of config.json that says so, and the fix; empty if the groups have been sorted.
    """
    size = len(groups) if group_size == -1 else group_size
    if not torch.equal(groups.long(), torch.arange(len(groups)) // size):
        raise ModelLoadError(
            f"its g_idx says that groups of columns are not neighbours (act-order), and {contradicted}"
            if contradicted
            else f"its g_idx does not give every group {size} columns\n  download the file again"
        )


def order_of(groups: Tensor, group_size: int) -> Tensor:
    """Return the columns sorted by their groups [C]: [C] int64. Raises ModelLoadError for groups of other sizes."""
    order = groups.long().argsort(stable=True)
    check_groups(groups[order], group_size)
    return order


def encode(kind: str, shape: tuple[int, int], levels: Levels, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Return rows of blocks [N, bytes] uint8 of the format `kind`, or float32 numbers [N, C] if it is NUMBERS.

    scales, zeros: [N, G]; the last group may be smaller. Raises ModelLoadError if levels do not fit a format of bytes.
    """
    num_rows, num_columns = shape
    step = max(1, _CHUNK_SIZE // num_columns)
    numbers, num_bytes = (1, 4) if kind == NUMBERS else BLOCK_FORMATS[kind]
    # The group of each block, or of each number.
    groups = torch.arange(0, num_columns, numbers) // group_size
    found = torch.empty(num_rows, num_columns // numbers, num_bytes, dtype=torch.uint8)
    for first in range(0, num_rows, step):
        end = min(num_rows, first + step)
        of_blocks = [values[first:end].index_select(1, groups).unsqueeze(-1) for values in (scales, zeros)]
        _encode_rows(kind, found[first:end], torch.unflatten(levels(first, end), 1, (-1, numbers)), *of_blocks)
    return found.flatten(1).view(torch.float32) if kind == NUMBERS else found.flatten(1)


def _encode_rows(kind: str, found: Tensor, levels: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """Write blocks [n, B, bytes] for levels [n, B, S] uint8, and a scale and a zero for each block."""
    if kind == NUMBERS:
        found.copy_(((levels.short() - zeros).float() * scales.float()).view(torch.uint8))
    elif kind in _INT8_FORMATS:
        signed = levels.short() - zeros
        if bool((signed.to(torch.int8) != signed).any()):
            raise ModelLoadError("it has zero points, and quantization_config says that it is symmetric (sym)")
        in_file = scales.to(torch.float16 if kind == "Q8_0" else torch.float32)
        found[..., : in_file.itemsize] = in_file.view(torch.uint8)
        found[..., in_file.itemsize :] = signed.to(torch.int8).view(torch.uint8)
    else:
        halves = torch.unflatten(levels, -1, (-1, 2, 16))
        found[..., :4] = scales.float().view(torch.uint8)
        if bool((zeros.to(torch.uint8) != zeros).any()):
            raise ModelLoadError("a zero point is not one of 0 .. 255\n  download or copy the file again")
        found[..., 4:5] = zeros
        found[..., 5:] = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
