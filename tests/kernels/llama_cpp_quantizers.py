"""Writes fixtures/quantizers.json, the errors of llama.cpp's own quantizers on the tensors of weights_to_quantize.py.

The argument is ggml's base library, as in `llama_cpp/lib/libggml-base.so` of the package llama-cpp-python (0.3.36 for
the figures here), which has a function quantize_<type> for each format:

    python -m tests.kernels.llama_cpp_quantizers libggml-base.so
"""

from __future__ import annotations

import ctypes
import json
import sys

import torch
from torch import Tensor

from pagewick.kernels.reference_quantizers import FORMATS
from pagewick.quantization.block_formats import OWN_FORMATS
from tests.kernels.weights_to_quantize import FIXTURES, dequantized, errors, importance, tensors


def quantized(library: ctypes.CDLL, x: Tensor, name: str, weights: Tensor | None) -> Tensor:
    function = getattr(library, "quantize_" + name.replace("Q", "q"))
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    rows = torch.zeros(len(x), x.shape[1] // FORMATS[name].numbers * FORMATS[name].num_bytes, dtype=torch.uint8)
    num_bytes = function(
        x.data_ptr(), rows.data_ptr(), len(x), x.shape[1], None if weights is None else weights.data_ptr()
    )
    assert num_bytes == rows.numel()
    return rows


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    figures: dict[str, dict[str, list[float]]] = {}
    for title, x in tensors().items():
        figures[title] = {"mean square": [float(f"{x.double().square().mean().item():.6g}")]}
        for name in (one for one in FORMATS if one not in OWN_FORMATS):
            figures[title][name] = []
            for weights in (None, importance(x.shape[1])):
                found = dequantized(quantized(library, x.contiguous(), name, weights), name)
                figures[title][name] += [float(f"{error:.6g}") for error in errors(x, found, name, weights)]
    lines = [f"{json.dumps(title)}: {json.dumps(entry)}" for title, entry in figures.items()]
    (FIXTURES / "quantizers.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
