"""Tensors for tests of the quantizers, and the errors by which quantizers are compared."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pagewick.kernels.block_formats import unpack
from pagewick.kernels.reference_quantizers import FORMATS
from pagewick.quantization.block_formats import OWN_FORMATS

FIXTURES = Path(__file__).parent / "fixtures"
NUM_ROWS, NUM_COLUMNS = 16, 512


def tensors() -> dict[str, Tensor]:
    """Rows of float32 numbers by name: seeded ones, and pieces of two matrices of an earlier built-in model."""
    generator = torch.Generator().manual_seed(7)

    def gaussian() -> Tensor:
        return torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator)

    found = {"gaussian": gaussian() * 0.05}
    found["student"] = gaussian() * 0.03 / torch.stack([gaussian().square() for _ in range(4)]).mean(0).sqrt()
    found["product"] = gaussian() * gaussian()
    found["outlier columns"] = gaussian() * 0.02
    found["outlier columns"][:, 5::97] *= 20
    found["shifted"] = gaussian() * 0.1 + 0.3
    found["subnormal scales"] = gaussian() * 2e-6
    found["zeros"] = torch.zeros(2, NUM_COLUMNS)
    found["constant blocks"] = (torch.arange(8) - 3.3).view(4, 2).repeat_interleave(256, 1)
    demo = load_file(FIXTURES / "matrices.safetensors")
    return found | {name: tensor.float() for name, tensor in demo.items()}


def importance(num_columns: int) -> Tensor:
    """How much each column counts: some a thousand times as much as others."""
    return 0.01 + 10 * torch.rand(num_columns, generator=torch.Generator().manual_seed(9)) ** 3


def dequantized(rows: Tensor, name: str) -> Tensor:
    """Rows of blocks as numbers, by the `gguf` package if it has the format."""
    if name in OWN_FORMATS:
        return unpack(name, rows).numbers()
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]))


def errors(x: Tensor, found: Tensor, name: str, importance: Tensor | None) -> tuple[float, float]:
    """The mean squared error as llama.cpp weighs it, and the root of the mean squared error."""
    squares = (x - found).double().square()
    weighted = llama_cpp_weights(x, name, importance).double() * squares
    return weighted.mean().item(), squares.mean().sqrt().item()


def llama_cpp_weights(x: Tensor, name: str, importance: Tensor | None) -> Tensor:
    """How much llama.cpp counts the errors of rows x, as its quantizers choose scales."""
    if importance is not None:
        if name == "Q6_K":
            return importance.expand_as(x)
        # Twice the mean square, in Q3_K, Q4_K and Q5_K, of a block of 256; in blocks of 32, that of the row.
        factor = 2 if name in ("Q3_K", "Q4_K", "Q5_K") else 1
        return (
            importance * (factor * mean_square(x, 256 if FORMATS[name].numbers == 256 else x.shape[1]) + x * x).sqrt()
        )
    if name in ("Q4_K", "Q5_K"):
        return mean_square(x, 32).sqrt() + x.abs()
    return {"Q2_K": x.abs(), "Q3_K": x * x, "Q6_K": x * x}.get(name, torch.ones_like(x))


def mean_square(x: Tensor, size: int) -> Tensor:
    return x.square().unflatten(1, (-1, size)).mean(2).repeat_interleave(size, 1)


def gguf_quantized(x: Tensor, name: str) -> Tensor:
    """Rows of blocks by the `gguf` package, which rounds to nearest and has blocks of 32 only."""
    return torch.from_numpy(gguf.quants.quantize(np.asarray(x), gguf.GGMLQuantizationType[name]))
