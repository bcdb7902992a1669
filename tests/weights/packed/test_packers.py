"""Weights that are packed, against decoders of each format's definition, and against what is read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.quantization.calibrated.results import QuantizedLinear
from pagewick.weights.packed.awq import AwqFormat
from pagewick.weights.packed.gptq import GptqFormat
from pagewick.weights.packed.integer_format import IntegerFormat
from pagewick.weights.packed.marlin import MarlinFormat
from pagewick.weights.tensor_headers import file_tensors
from tests.weights.packed.writers import thread_order

N, C = 192, 384


def linear_of(
    bits: int, group_size: int, *, sym: bool, order: bool = False, least_zero: int = 1, shape: tuple[int, int] = (N, C)
) -> QuantizedLinear:
    """Return a weight of random levels, which take the smallest and the largest value."""
    seed = torch.Generator().manual_seed(bits * 1000 + group_size + sym)
    rows, columns = shape
    num_groups = 1 if group_size == -1 else columns // group_size
    levels = torch.randint(0, 2**bits, shape, generator=seed, dtype=torch.uint8)
    zeros = torch.randint(least_zero, 2**bits, (rows, num_groups), generator=seed, dtype=torch.uint8)
    zeros[0, 0], zeros[-1, -1] = least_zero, 2**bits - 1
    scales = torch.rand(rows, num_groups, generator=seed).half() / 64
    groups = torch.arange(columns, dtype=torch.int32) // (columns if group_size == -1 else group_size)
    shuffled = groups[torch.randperm(columns, generator=seed)] if order else None
    return QuantizedLinear("a.b", levels, scales, None if sym else zeros, shuffled, bits, group_size)


def bits_at(words: np.ndarray, place: int, bits: int) -> int:
    """Return the number at a place in a row of words of 32 bits, the first one in the lowest bits."""
    stream = int.from_bytes(words.astype("<i4").tobytes(), "little")
    return stream >> place * bits & (1 << bits) - 1


def decode_gptq(parts: dict[str, Tensor], bits: int, less: int) -> tuple[Tensor, Tensor]:
    """Return levels [N, C] and zero points [N, G]: a column of .qweight is a row of the weight."""
    words, zero_words = parts[".qweight"].numpy(), parts[".qzeros"].numpy()
    rows, columns = words.shape[1], words.shape[0] * 32 // bits
    levels = [[bits_at(words[:, n], c, bits) for c in range(columns)] for n in range(rows)]
    zeros = [[bits_at(zero_words[g], n, bits) + less for g in range(len(zero_words))] for n in range(rows)]
    return torch.tensor(levels, dtype=torch.uint8), torch.tensor(zeros, dtype=torch.uint8)


def decode_awq_rows(words: np.ndarray) -> Tensor:
    """Return numbers [N, n] of words [n, N / 8]: bit 4 k of a word begins row (0, 2, 4, 6, 1, 3, 5, 7)[k] of eight."""
    found = np.zeros((words.shape[1] * 8, words.shape[0]), np.uint8)
    for k, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        found[row::8] = (words.astype(np.int64) >> 4 * k & 15).T
    return torch.from_numpy(found)


def decode_marlin(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return levels [N, C] and scales [N, G]."""
    words, scales = parts[".B"].numpy(), parts[".s"]
    columns, rows = words.shape[0] * 16, words.shape[1] // 2
    stored = np.stack([words.astype(np.int64) >> 4 * k & 15 for k in range(8)], -1).reshape(-1, 1024)
    tiles = np.zeros_like(stored)
    tiles[:, thread_order()] = stored
    by_column = tiles.reshape(columns // 16, rows // 16, 16, 16).transpose(0, 2, 1, 3).reshape(columns, rows)
    found = torch.zeros_like(scales)
    width = 32 if len(scales) == 1 else 64
    for n in range(rows):
        place = n % width
        # Row 8 a + b of 64 lies at 8 b + a; without groups, a thread of four has rows 2 i and 2 i + 1 of each eight.
        grouped, single = place % 8 * 8 + place // 8, place % 8 // 2 * 8 + place // 8 * 2 + place % 2
        stored_at = grouped if width == 64 else single
        found[:, n] = scales[:, n - place + stored_at]
    return torch.from_numpy(by_column.T.astype(np.uint8)), found.t()


def read_back(form: IntegerFormat, parts: dict[str, Tensor], directory: Path) -> QuantizedLinear:
    """Write the parts to a file, and return the weight that is read from it."""
    path = directory / "w.safetensors"
    save_file({f"a.b{suffix}": tensor for suffix, tensor in parts.items()}, path)
    infos = {tensor.name.removeprefix("a.b"): tensor for tensor in file_tensors(path)}
    return form.linear(form.weight("a.b", infos), lambda name: parts[name.removeprefix("a.b")])


def assert_same(found: QuantizedLinear, linear: QuantizedLinear) -> None:
    assert (found.name, found.bits, found.group_size) == (linear.name, linear.bits, linear.group_size)
    for one, other in (
        (found.levels, linear.levels),
        (found.scales, linear.scales),
        (found.zeros, linear.zeros),
        (found.group_of_column, linear.group_of_column),
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, group_size: int, sym: bool, tmp_path: Path) -> None:
    linear = linear_of(bits, group_size, sym=sym, order=group_size == 64, shape=(64, C))
    form = GptqFormat(bits, group_size, sym, has_order=group_size == 64)
    parts = form.pack(linear)
    levels, zeros = decode_gptq(parts, bits, 1)
    assert torch.equal(levels, linear.levels) and torch.equal(parts[".scales"].t(), linear.scales)
    assert torch.equal(zeros, torch.full_like(zeros, 1 << bits - 1) if linear.zeros is None else linear.zeros)
    assert torch.equal(parts[".g_idx"].long(), linear.groups)
    assert_same(read_back(form, parts, tmp_path), linear)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_zero_need_the_second_version(bits: int, tmp_path: Path) -> None:
    linear = linear_of(bits, 32, sym=False, least_zero=0, shape=(32, 64))
    with pytest.raises(ConfigError, match=r"a\.b cannot be written as GPTQ int. g32: a zero point is 0\n"):
        GptqFormat(bits, 32, is_symmetric=False, has_order=False).pack(linear)
    form = GptqFormat(bits, 32, is_symmetric=False, has_order=False, stored_less=0)
    parts = form.pack(linear)
    assert linear.zeros is not None and torch.equal(decode_gptq(parts, bits, 0)[1], linear.zeros)
    assert_same(read_back(form, parts, tmp_path), linear)


@pytest.mark.parametrize("for_marlin", [False, True])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq(group_size: int, sym: bool, for_marlin: bool, tmp_path: Path) -> None:
    linear = linear_of(4, group_size, sym=sym, least_zero=0)
    form = AwqFormat(group_size, has_marlin_zeros=for_marlin)
    parts = form.pack(linear)
    zeros = decode_awq_rows(parts[".qzeros"].numpy())
    if for_marlin:  # row 8 a + b of 64 lies at 8 b + a
        zeros = zeros[[n - n % 64 + n % 8 * 8 + n % 64 // 8 for n in range(N)]]
    assert torch.equal(decode_awq_rows(parts[".qweight"].numpy()), linear.levels)
    assert torch.equal(zeros, torch.full_like(zeros, 8) if linear.zeros is None else linear.zeros)
    assert torch.equal(parts[".scales"].t(), linear.scales)
    assert_same(read_back(form, parts, tmp_path), linear)


@pytest.mark.parametrize("group_size", [128, -1])
def test_marlin(group_size: int, tmp_path: Path) -> None:
    linear = linear_of(4, group_size, sym=True)
    form = MarlinFormat(group_size)
    parts = form.pack(linear)
    levels, scales = decode_marlin(parts)
    assert torch.equal(levels, linear.levels) and torch.equal(scales, linear.scales)
    assert_same(read_back(form, parts, tmp_path), linear)


@pytest.mark.parametrize(
    ("form", "linear", "reason"),
    [
        (MarlinFormat(128), linear_of(4, 128, sym=False), r"it has zero points \(it is not symmetric\)"),
        (MarlinFormat(128), linear_of(8, 128, sym=True), "it has 8 bits"),
        (MarlinFormat(-1), linear_of(4, 128, sym=True), "its 384 columns have 3 groups"),
        (MarlinFormat(32), linear_of(4, 32, sym=True, shape=(64, 96)), "64 x 96 are not multiples of 64 x 128"),
        (MarlinFormat(128), linear_of(4, 128, sym=True, shape=(96, 128)), "96 x 128 are not multiples of 64 x 128"),
        (MarlinFormat(128), linear_of(4, 128, sym=True, order=True), r"not neighbours \(act-order\)"),
        (AwqFormat(64), linear_of(4, 64, sym=True, order=True), r"not neighbours \(act-order\)"),
        (AwqFormat(64), linear_of(4, 64, sym=True, shape=(12, 64)), "12 x 64 numbers of 4 bits are not packed by 8"),
        (GptqFormat(3, 64, True, False), linear_of(3, 64, sym=True, shape=(24, 64)), "not packed by 32"),
        (GptqFormat(4, 64, True, False), linear_of(4, 64, sym=True, order=True), r"not neighbours \(act-order\)"),
    ],
)
def test_what_a_format_cannot_hold(form: IntegerFormat, linear: QuantizedLinear, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.b cannot be written as .*{reason}.*\n  choose another format: --to"):
        form.pack(linear)


def test_scales_that_marlin_cannot_hold() -> None:
    linear = linear_of(4, 128, sym=True)
    wide = QuantizedLinear("a.b", linear.levels, linear.scales.float() + 1e-9, None, None, 4, 128)
    with pytest.raises(ConfigError, match=r"float16 does not hold its scales, which are torch\.float32"):
        MarlinFormat(128).pack(wide)
