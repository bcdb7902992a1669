"""Packing: cutting stored tensors in logical units, compared with cutting and packing by hand."""

from __future__ import annotations

import math
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import ConfigError
from pagewick.quantization.packing import COLUMNS, PLAIN, ROW_VECTOR, ROWS, Axis, Dimension, Packing

GGML_Q4_K: Final = Packing(rows=Axis(0), columns=Axis(1, unit=256, entries=144))
GPTQ_QWEIGHT: Final = Packing(rows=Axis(1), columns=Axis(0, unit=8))
GPTQ_QZEROS: Final = Packing(rows=Axis(1, unit=8), columns=Axis(0, unit=128))
GPTQ_ACT_ORDER: Final = Packing(rows=None, columns=Axis(0, can_cut=False))
FP8_SCALES: Final = Packing(rows=Axis(0, unit=128), columns=Axis(1, unit=128))
WHOLE: Final = Packing(rows=None, columns=None)


@pytest.mark.parametrize(
    ("packing", "shape"),
    [
        (PLAIN, (96, 512)),
        (ROW_VECTOR, (96,)),
        (GGML_Q4_K, (96, 288)),
        (GPTQ_QWEIGHT, (64, 96)),
        (GPTQ_QZEROS, (4, 12)),
        (GPTQ_ACT_ORDER, (512,)),
        (FP8_SCALES, (1, 4)),
        (WHOLE, ()),
    ],
)
def test_stored_shape(packing: Packing, shape: tuple[int, ...]) -> None:
    assert packing.stored_shape(96, 512) == shape


def stored_tensor(packing: Packing, dim: Dimension, size: int) -> torch.Tensor:
    """Return a stored tensor of different numbers, for a weight of `size` along `dim` and 512 along the other one."""
    shape = packing.stored_shape(*((size, 512) if dim == ROWS else (512, size)))
    return torch.arange(math.prod(shape)).view(shape)


@pytest.mark.parametrize(
    ("packing", "dim", "logical", "stored"),
    [
        (PLAIN, ROWS, (3, 7, 96), (3, 7)),
        (PLAIN, COLUMNS, (3, 7, 512), (3, 7)),
        (GGML_Q4_K, ROWS, (3, 7, 96), (3, 7)),
        (GGML_Q4_K, COLUMNS, (256, 512, 512), (144, 288)),
        (GPTQ_QWEIGHT, COLUMNS, (8, 24, 512), (1, 3)),
        (GPTQ_QWEIGHT, ROWS, (1, 2, 96), (1, 2)),
        (GPTQ_QZEROS, ROWS, (8, 96, 96), (1, 12)),
        (GPTQ_ACT_ORDER, COLUMNS, (0, 512, 512), (0, 512)),
        (FP8_SCALES, ROWS, (128, 300, 300), (1, 3)),  # the last block is incomplete
        (FP8_SCALES, ROWS, (0, 128, 300), (0, 1)),
        (PLAIN, ROWS, (5, 5, 96), (5, 5)),
    ],
)
def test_a_cut_holds_the_right_entries(
    packing: Packing, dim: Dimension, logical: tuple[int, int, int], stored: tuple[int, int]
) -> None:
    tensor, axis = stored_tensor(packing, dim, logical[2]), packing.axis(dim)
    assert axis is not None
    expected = tensor.transpose(0, axis.stored_dim)[stored[0] : stored[1]].transpose(0, axis.stored_dim)
    assert torch.equal(packing.cut(tensor, dim, *logical), expected)


@pytest.mark.parametrize(
    ("packing", "dim", "logical", "words"),
    [
        (GGML_Q4_K, COLUMNS, (0, 384, 768), "units of 256; choose a --tensor-parallel-size that divides 3"),
        (GGML_Q4_K, COLUMNS, (384, 768, 768), "units of 256"),
        (GPTQ_QZEROS, ROWS, (0, 12, 24), "output rows"),
        (FP8_SCALES, ROWS, (0, 150, 300), "units of 128"),
        (GPTQ_ACT_ORDER, COLUMNS, (0, 256, 512), "--tensor-parallel-size 1"),
        (GPTQ_ACT_ORDER, COLUMNS, (256, 512, 512), "input columns cannot be split"),
    ],
)
def test_cuts_inside_a_unit(packing: Packing, dim: Dimension, logical: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        packing.cut(stored_tensor(packing, dim, logical[2]), dim, *logical)


def test_a_tensor_without_the_dimension_stays_whole() -> None:
    bias = torch.arange(6)
    assert ROW_VECTOR.cut(bias, COLUMNS, 1, 2, 4) is bias
    assert ROW_VECTOR.cut(bias, ROWS, 2, 5, 6).tolist() == [2, 3, 4]


def pack_nibbles(weight: torch.Tensor) -> torch.Tensor:
    """Pack in GPTQ's order: eight consecutive inputs of an output in an int32, the first in the lowest bits."""
    groups = weight.T.reshape(weight.shape[1] // 8, 8, weight.shape[0])
    return sum(groups[:, i] << (4 * i) for i in range(8))  # type: ignore[return-value]


@given(rows=st.integers(1, 9), units=st.integers(1, 6), data=st.data())
def test_cutting_packed_weights_is_packing_cut_weights(rows: int, units: int, data: st.DataObject) -> None:
    weight = torch.randint(0, 8, (rows, 8 * units))
    start = data.draw(st.integers(0, units))
    stop = data.draw(st.integers(start, units))
    cut = GPTQ_QWEIGHT.cut(pack_nibbles(weight), COLUMNS, 8 * start, 8 * stop, 8 * units)
    assert torch.equal(cut, pack_nibbles(weight[:, 8 * start : 8 * stop]))
    row = data.draw(st.integers(0, rows))
    assert torch.equal(GPTQ_QWEIGHT.cut(pack_nibbles(weight), ROWS, row, rows, rows), pack_nibbles(weight[row:]))


def test_a_cut_is_a_view() -> None:
    tensor = torch.zeros(4, 6)
    PLAIN.cut(tensor, COLUMNS, 2, 4, 6).fill_(1)
    assert tensor[0].tolist() == [0, 0, 1, 1, 0, 0]
