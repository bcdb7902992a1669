"""Weights that are quantized while they load have the blocks of the whole weight, whatever a rank keeps of it."""

from __future__ import annotations

import pytest
import torch

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels import quantize_weight
from pagewick.quantization.at_load import QuantizingMethod
from pagewick.quantization.experts import make_experts
from pagewick.quantization.ggml import GgmlMethod
from pagewick.quantization.share import Part, Share
from pagewick.quantization.weight import Weight

CPU = torch.device("cpu")


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


def method(name: str) -> QuantizingMethod:
    return QuantizingMethod(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_a_share_of_rows_and_columns_has_the_blocks_of_the_whole(name: str, dtype: torch.dtype) -> None:
    whole = numbers(97, 768, dtype)
    share = Share((Part(None, 97, ((3, 50), (90, 97))),), 768, (256, 768))
    quantized = Weight(share, [method(name)], torch.float32, CPU)
    from_blocks = Weight(share, [GgmlMethod(name)], torch.float32, CPU)
    quantized.load(None, "weight", whole)
    from_blocks.load(None, "weight", quantize_weight(whole.float(), name))
    assert torch.equal(quantized.unpack(), from_blocks.unpack())
    x = numbers(5, 512)
    assert torch.equal(quantized.linear(x), from_blocks.linear(x))


def test_experts_lie_in_one_piece_as_those_of_a_file_do() -> None:
    share = Share((Part("gate_proj", 64, ((0, 32),)), Part("up_proj", 64, ((0, 32),))), 256, (0, 256))
    kinds = (method("Q6_K"), blocks("Q6_K"))
    found = [make_experts(3, share, [(kind, kind)] * 3, torch.float32, CPU) for kind in kinds]
    for expert in range(3):
        for part in ("gate_proj", "up_proj"):
            rows = numbers(64, 256) * (1 + expert)
            found[0].load(expert, part, "weight", rows)
            found[1].load(expert, part, "weight", quantize_weight(rows, "Q6_K"))
    x, ids = numbers(4, 256), torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2]], dtype=torch.int32)
    assert type(found[0]) is type(found[1])
    assert torch.equal(found[0].linear(x, ids), found[1].linear(x, ids))


def blocks(name: str) -> GgmlMethod:
    return GgmlMethod(name)


def test_a_cut_inside_a_block_is_refused() -> None:
    share = Share((Part(None, 8, ((0, 8),)),), 512, (0, 128))
    weight = Weight(share, [method("Q4_K")], torch.float32, CPU)
    with pytest.raises(ConfigError, match="the weights are packed in units of 256"):
        weight.load(None, "weight", numbers(8, 512))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(8, 128), r"its shape is \[8, 128\]"),
        (torch.zeros(8, 256, dtype=torch.int32), "it holds torch.int32"),
        (torch.full((8, 256), float("nan")), "it cannot be quantized: row 0 has a number that is not finite"),
    ],
)
def test_a_tensor_that_cannot_be_quantized_is_an_error(tensor: torch.Tensor, reason: str) -> None:
    weight = Weight(Share((Part(None, 8, ((0, 8),)),), 256, (0, 256)), [method("Q4_K")], torch.float32, CPU)
    with pytest.raises(ModelLoadError, match=reason):
        weight.load(None, "weight", tensor)
