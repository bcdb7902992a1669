"""Types that are expanded at load, against the gguf package: the same bits of every number."""

from __future__ import annotations

from unittest.mock import create_autospec

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pagewick.kernels.block_formats import UNPACK, unpack
from pagewick.kernels.quantized import QuantizedMatrix
from pagewick.quantization import expansion, ggml, method_chooser
from pagewick.quantization.block_formats import BLOCK_FORMATS, EXPANDED_BLOCKS, EXPANSIONS, OWN_FORMATS
from pagewick.quantization.ggml import dequantize
from pagewick.quantization.share import Part, Share
from pagewick.quantization.weight import Weight
from pagewick.weights.gguf.header import FORMATS
from tests.kernels.block_rows import EXPANDED, random_rows


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("is_extreme", [False, True])
def test_expanded_numbers_have_the_same_bits_as_in_gguf(
    name: str, is_extreme: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion, "_CHUNK_SIZE", 7 * 1024)  # of which 45 rows are no multiple
    rows = random_rows(name, 45, 1024, is_extreme=is_extreme)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]))
    kept = expansion.expand(name, rows, 1024)
    numbers, num_bytes = BLOCK_FORMATS[EXPANSIONS[name]]
    assert kept.shape == (45, 1024 // numbers * num_bytes)
    assert torch.equal(unpack(EXPANSIONS[name], kept).numbers().view(torch.int32), expected.view(torch.int32))
    assert torch.equal(dequantize(name, rows, 1024).view(torch.int32), expected.view(torch.int32))
    assert is_extreme or expected.isfinite().all()


def test_all_that_gguf_decodes_is_supported_but_two_types_by_name() -> None:
    decoded = {kind.name for kind in quants._type_traits} - {"BF16"}
    assert decoded == EXPANSIONS.keys() | BLOCK_FORMATS.keys() - OWN_FORMATS.keys()
    assert EXPANSIONS.keys() == EXPANDED.keys() == expansion._DECODE.keys()
    assert BLOCK_FORMATS.keys() == UNPACK.keys()


def test_sizes_of_blocks_are_those_of_gguf() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # which gguf counts with two float32 numbers, unlike ggml
            assert FORMATS[int(kind)] == (kind.name, *sizes)
            assert {**BLOCK_FORMATS, **EXPANDED_BLOCKS}.get(kind.name, sizes) == sizes


@pytest.mark.parametrize("name", EXPANDED)
def test_rows_on_a_gpu_are_expanded_in_host_memory(name: str) -> None:
    """Tensors without memory stand in for those of a GPU: PyTorch knows what cannot be mixed with host memory."""
    expanded: list[Tensor] = []
    matrix = create_autospec(QuantizedMatrix, instance=True, num_columns=1024)
    matrix.load.side_effect = lambda rows, first_row: expanded.append(rows)
    method = method_chooser({"a.weight": name})("a")
    assert isinstance(method, ggml.GgmlMethod)
    some = random_rows(name, 1, 1024)
    dequantize(name, some, 1024)  # makes the format's tables, which have memory
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.empty(40, some.shape[1], dtype=torch.uint8, device="cuda")
        method._load_rows(matrix, "a.weight", rows, 0, first_column=0)
    assert [(len(found), found.device.type) for found in expanded] == [(40, "cpu")]


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("columns", [(0, 1024), (512, 1024), (0, 288), (288, 1024), (1024, 1024)])
def test_a_rank_expands_its_share_alone(name: str, columns: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two ranks share a block of the file, whose blocks in memory are smaller, each rank expands all of it."""
    numbers_expanded = []

    def expand(name: str, rows: Tensor, num_columns: int) -> Tensor:
        numbers_expanded.append(len(rows) * num_columns)
        return expansion.expand(name, rows, num_columns)

    monkeypatch.setattr(ggml, "expand", expand)
    rows, kept = random_rows(name, 40, 1024), ((3, 10), (20, 33))
    expected = dequantize(name, rows, 1024)[:, slice(*columns)]
    numbers_expanded.clear()
    share = Share((Part("a", 40, kept), Part("b", 40, ((39, 40),))), 1024, columns)
    method = method_chooser({"a.weight": name})("a")
    weight = Weight(share, [method, method], torch.float32, torch.device("cpu"))
    for part in ("a", "b"):
        weight.load(part, "weight", rows)
    weight.finish()
    assert torch.equal(weight.unpack(), expected[[*range(3, 10), *range(20, 33), 39]])
    block, _ = EXPANDED_BLOCKS[name]
    first, last = columns[0] // block * block, -(-columns[1] // block) * block
    assert sum(numbers_expanded) == (21 * (last - first) if columns[0] < columns[1] else 0)
