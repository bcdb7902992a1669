"""Sizes of a model's weights in each of the usual formats. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from pagewick.models.tensors import ModelTensor
from pagewick.quantization.block_formats import BLOCK_FORMATS

# Formats of llama.cpp's quantize: files in which most matrices have a type of that name.
GGUF_FORMATS: Final = ("Q8_0", "Q6_K", "Q4_K_M")
_GPTQ_GROUP: Final = 128
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_SENSITIVE: Final = re.compile(r".*\.(v_proj|down_proj)\.weight")


def count(tensors: Collection[ModelTensor]) -> int:
    """Return the number of parameters."""
    return sum(tensor.num_elements for tensor in tensors)


def stored_formats(tensors: Collection[ModelTensor]) -> dict[str, int]:
    """Return the bytes of a model with these tensors in each of the usual formats.

    fp8 and int8: linear layers in 8 bits with a float32 scale per output row. gptq-int4 and awq-int4: linear layers in
    4 bits in groups of 128 with a 16-bit scale and a 4-bit zero each. All of these leave the rest in 16 bits. The GGUF
    formats are those of llama.cpp's quantize, which keeps vectors in float32.
    """
    total = count(tensors)
    linear = [tensor.shape for tensor in tensors if tensor.is_linear]
    rest = 2 * (total - sum(rows * columns for rows, columns in linear))
    eight = rest + sum(rows * columns + 4 * rows for rows, columns in linear)
    awq = rest + sum(_int4_bytes(rows, columns) for rows, columns in linear)
    return {
        "float32": 4 * total,
        "bfloat16": 2 * total,
        "float16": 2 * total,
        "fp8": eight,
        "int8": eight,
        # GPTQ also stores the group of each column, in 4 bytes.
        "gptq-int4": awq + sum(4 * columns for _, columns in linear),
        "awq-int4": awq,
        **{name: gguf_bytes(tensors, name) for name in GGUF_FORMATS},
    }


def _int4_bytes(rows: int, columns: int) -> int:
    """Return the bytes of the weights, and of a scale and a zero per group of input columns in each row."""
    num_groups = -(-columns // _GPTQ_GROUP)
    return rows * columns // 2 + num_groups * rows * 2 + num_groups * rows // 2


def gguf_bytes(tensors: Collection[ModelTensor], name: str) -> int:
    """Return the bytes of a GGUF file's tensors in one of GGUF_FORMATS."""
    num_layers = 1 + max((layer for tensor in tensors if (layer := _layer_of(tensor)) is not None), default=0)
    has_head = any(tensor.role == "head" for tensor in tensors)
    num_bytes = 0
    for tensor in tensors:
        if len(tensor.shape) == 1 or tensor.role == "router":
            num_bytes += 4 * tensor.num_elements
            continue
        block = _q4_k_m(tensor, num_layers, has_head=has_head) if name == "Q4_K_M" else name
        columns = tensor.shape[-1]
        if columns % 256 and block != "Q8_0":  # the K formats need whole blocks of 256
            block = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[block]
        block_elements, block_bytes = BLOCK_FORMATS[block] if columns % 32 == 0 else (1, 2)
        num_bytes += tensor.num_elements // block_elements * block_bytes
    return num_bytes


def _q4_k_m(tensor: ModelTensor, num_layers: int, *, has_head: bool) -> str:
    """Return Q6_K for the head, and for v_proj and down_proj in the outer eighths and each third layer between."""
    if tensor.role == "head" or (tensor.role == "embedding" and not has_head):
        return "Q6_K"
    layer = _layer_of(tensor)
    if layer is None or _SENSITIVE.fullmatch(tensor.path) is None:
        return "Q4_K"
    eighth = num_layers // 8
    needs_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if needs_more else "Q4_K"


def _layer_of(tensor: ModelTensor) -> int | None:
    match = _LAYER.match(tensor.path)
    return int(match[1]) if match else None
