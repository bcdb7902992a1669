"""Writers of GPTQ, AWQ and Marlin tensors: plain loops over numbers, from the formats' definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.weights.packed.harness import Writer


def quantize(
    weight: Tensor, bits: int, groups: Tensor, *, is_symmetric: bool
) -> tuple[np.ndarray, Tensor, np.ndarray, Tensor]:
    """Return levels [N, C], scales [N, G] float16, zero points [N, G] and the numbers that they mean, [N, C].

    groups: [C], the group of each column.
    """
    most, num_groups = 2**bits - 1, int(groups.max()) + 1
    scales, zeros = [], []
    for group in range(num_groups):
        numbers = weight[:, groups == group]
        low, high = numbers.amin(1).clamp(max=-1e-4), numbers.amax(1).clamp(min=1e-4)
        if is_symmetric:
            scales.append(2 * torch.maximum(high, -low) / most)
            zeros.append(torch.full_like(low, (most + 1) // 2))
        else:
            scales.append((high - low) / most)
            zeros.append((-low / scales[-1]).round().clamp(1, most))
    scale, zero = torch.stack(scales, 1).half(), torch.stack(zeros, 1)
    levels = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, most)
    meant = (levels - zero[:, groups]) * scale.float()[:, groups]
    return levels.numpy().astype(np.int64), scale, zero.numpy().astype(np.int64), meant


def pack(numbers: np.ndarray, bits: int) -> Tensor:
    """Return rows of numbers [n, m] as rows of words of 32 bits, the first number in the lowest bits: [n, m b / 32]."""
    stream = (numbers[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(numbers), -1)
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32))


def gptq(
    bits: int = 4, group_size: int = 128, *, sym: bool = True, desc_act: bool = False, is_v2: bool = False
) -> Writer:
    def write(prefix: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_columns = weight.shape[1]
        groups = torch.arange(num_columns) // (num_columns if group_size == -1 else group_size)
        if desc_act:
            seed = torch.Generator().manual_seed(sum(map(ord, prefix)))
            groups = groups[torch.randperm(num_columns, generator=seed)]
        levels, scales, zeros, meant = quantize(weight, bits, groups, is_symmetric=sym)
        return {
            f"{prefix}.qweight": pack(levels, bits).t(),
            f"{prefix}.qzeros": pack((zeros - (0 if is_v2 else 1)).T, bits),
            f"{prefix}.scales": scales.t(),
            f"{prefix}.g_idx": groups.int(),
        }, meant

    return write


def awq(group_size: int = 128, version: str = "gemm") -> Writer:
    def write(prefix: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_rows, num_columns = weight.shape
        groups = torch.arange(num_columns) // (num_columns if group_size == -1 else group_size)
        levels, scales, zeros, meant = quantize(weight, 4, groups, is_symmetric=False)
        if version == "gemm":
            order = [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[i % 8] for i in range(num_rows)]
            return {
                f"{prefix}.qweight": pack(levels.T[:, order], 4),
                f"{prefix}.qzeros": pack(zeros.T[:, order], 4),
                f"{prefix}.scales": scales.t(),
            }, meant
        multiple = {64: 16, 32: 32}.get(group_size, 8)
        width = -(-zeros.shape[1] // multiple) * multiple
        filled = np.zeros((num_rows, width), np.int64)
        filled[:, : zeros.shape[1]] = zeros
        filled_scales = torch.zeros(num_rows, width, dtype=torch.float16)
        filled_scales[:, : zeros.shape[1]] = scales
        if version == "gemv_fast":
            return {
                f"{prefix}.qweight": interleave(levels),
                f"{prefix}.qzeros": -(filled_scales * torch.from_numpy(filled)).half().t(),
                f"{prefix}.scales": filled_scales.t(),
            }, meant
        return {
            f"{prefix}.qweight": pack(levels, 4),
            f"{prefix}.qzeros": pack(filled, 4),
            f"{prefix}.scales": filled_scales,
        }, meant

    return write


def interleave(levels: np.ndarray) -> Tensor:
    """Return the words of gemv_fast: columns 8 b + 2 r + h of 32 lie at 8 r + 4 h + b; four rows alternate by 64."""
    num_rows, num_columns = levels.shape
    words = np.zeros((num_rows // 4, num_columns), np.uint16)
    for row in range(num_rows):
        for column in range(num_columns):
            b, r, h = column % 32 // 8, column % 8 // 2, column % 2
            place = column % 64 // 32 * 32 + 8 * r + 4 * h + b
            word = column // 64 * 64 + row % 4 * 16 + place // 4
            words[row // 4, word] |= levels[row, column] << 4 * (place % 4)
    return torch.from_numpy(words.view(np.int16))


def marlin(group_size: int = 128, names: tuple[str, str] = ("B", "s")) -> Writer:
    def write(prefix: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_rows, num_columns = weight.shape
        groups = torch.arange(num_columns) // (num_columns if group_size == -1 else group_size)
        levels, scales, _, meant = quantize(weight, 4, groups, is_symmetric=True)
        # Tiles of 16 inputs by 16 outputs, each stored row by row, then the order of the threads in four tiles.
        tiles = levels.T.reshape(num_columns // 16, 16, num_rows // 16, 16).transpose(0, 2, 1, 3)
        runs = tiles.reshape(-1, 1024)[:, thread_order()].reshape(num_columns // 16, num_rows * 16)
        single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        order = single if scales.shape[1] == 1 else [i + 8 * j for i in range(8) for j in range(8)]
        stored = scales.t().reshape(-1, len(order))[:, order].reshape(scales.shape[1], num_rows)
        return {f"{prefix}.{names[0]}": pack(runs, 4), f"{prefix}.{names[1]}": stored}, meant

    return write


def thread_order() -> np.ndarray:
    """The permutation that the Marlin kernel's authors publish."""
    order: list[int] = []
    for i in range(32):
        of_thread = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                of_thread.append(16 * row + i // 4 + 8 * block)
        for tile in range(4):
            order.extend(place + 256 * tile for place in of_thread)
    return np.array(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()


WRITERS: dict[str, Callable[..., Writer]] = {"gptq": gptq, "awq": awq, "marlin": marlin}
