"""Packing: cutting stored tensors in logical units, checked against cutting and packing by hand."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import ConfigError
from pagewick.quantization.method import COLUMNS, PLAIN, ROW_VECTOR, ROWS, Axis, Dimension, Packing

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
def test_stored_range(packing: Packing, dim: Dimension, logical: tuple[int, int, int], stored: tuple[int, int]) -> None:
    assert packing.stored_range(dim, *logical) == stored


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
        packing.stored_range(dim, *logical)


def test_a_tensor_without_the_dimension() -> None:
    with pytest.raises(ValueError, match="dimension 1"):
        ROW_VECTOR.stored_range(COLUMNS, 0, 1, 2)
    bias = torch.arange(6)
    assert ROW_VECTOR.cut(bias, COLUMNS, 1, 2, 4) is bias
    assert ROW_VECTOR.cut(bias, ROWS, 2, 5, 6).tolist() == [2, 3, 4]


def test_can_shard() -> None:
    assert PLAIN.can_shard(ROWS, 3) and PLAIN.can_shard(COLUMNS, 3)
    assert GGML_Q4_K.can_shard(COLUMNS, 512) and not GGML_Q4_K.can_shard(COLUMNS, 384)
    assert GPTQ_ACT_ORDER.can_shard(ROWS, 3) and not GPTQ_ACT_ORDER.can_shard(COLUMNS, 256)
    assert (GGML_Q4_K.unit(ROWS), GGML_Q4_K.unit(COLUMNS), ROW_VECTOR.unit(COLUMNS)) == (1, 256, 1)


def pack_nibbles(weight: torch.Tensor) -> torch.Tensor:
    """GPTQ's order: eight consecutive inputs of one output in an int32, the first in the lowest bits."""
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
