"""Weights in block formats that are no types of ggml's: a rank's share, whole blocks only, and no NaN."""

from __future__ import annotations

import pytest
import torch

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels.block_formats import unpack
from pagewick.quantization.block_formats import OWN_FORMATS
from pagewick.quantization.ggml import GgmlMethod
from pagewick.quantization.share import Part, Share
from pagewick.quantization.weight import Weight
from pagewick.weights.tensor_headers import TensorInfo
from tests.kernels.block_rows import OWN, random_rows

CPU = torch.device("cpu")


def test_sizes_of_blocks() -> None:
    assert {name: sizes[:2] for name, sizes in OWN.items()} == OWN_FORMATS


@pytest.mark.parametrize("name", OWN)
def test_a_rank_keeps_its_share_of_rows_and_columns(name: str) -> None:
    rows = random_rows(name, 97, 512)
    weight = Weight(
        Share((Part(None, 97, ((3, 50), (90, 97))),), 512, (256, 512)), [GgmlMethod(name)], torch.float32, CPU
    )
    weight.load(None, "weight", rows)
    kept = torch.cat([rows[3:50], rows[90:97]])
    assert torch.equal(weight.unpack(), unpack(name, kept).numbers()[:, 256:])


@pytest.mark.parametrize("name", [name for name in OWN if OWN[name][0] > 32])
def test_a_cut_inside_a_block_is_refused(name: str) -> None:
    share = Share((Part(None, 8, ((0, 8),)),), 256, (0, 32))
    weight = Weight(share, [GgmlMethod(name)], torch.float32, CPU)
    with pytest.raises(ConfigError, match=f"the weights are packed in units of {OWN[name][0]}"):
        weight.load(None, "weight", random_rows(name, 8, 256))


@pytest.mark.parametrize("byte", [127, 255])
@pytest.mark.parametrize("name", ["fp8_g32", "fp8_g128"])
def test_nan_in_a_weight_is_refused(name: str, byte: int) -> None:
    rows = random_rows(name, 8, 256)
    rows[5, -1] = byte
    weight = Weight(Share((Part(None, 8, ((0, 8),)),), 256, (0, 256)), [GgmlMethod(name)], torch.float32, CPU)
    with pytest.raises(ModelLoadError, match="weight holds NaN\n  the checkpoint is damaged"):
        weight.load(None, "weight", rows)


def test_a_rank_may_have_no_columns() -> None:
    weight = Weight(Share((Part(None, 8, ((0, 8),)),), 256, (256, 256)), [GgmlMethod("fp8_g128")], torch.float32, CPU)
    weight.load(None, "weight", random_rows("fp8_g128", 8, 256))
    assert weight.linear(torch.ones(2, 0)).tolist() == [[0.0] * 8] * 2


@pytest.mark.parametrize("name", OWN)
def test_a_tensor_of_a_header_is_in_blocks(name: str) -> None:
    numbers, num_bytes, _ = OWN[name]
    tensor = TensorInfo("x.weight", name, (6, 256), 6 * 256 // numbers * num_bytes)
    assert tensor.is_in_blocks and tensor.block_size == numbers and tensor.kept_bytes == tensor.num_bytes
