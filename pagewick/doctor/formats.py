"""Sizes of a model's weights in each of the usual formats. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.quantization.mixes import MixedModel, MixedWeights

# Formats of llama.cpp's quantize: files in which most matrices have a type of that name.
GGUF_FORMATS: Final = ("Q8_0", "Q6_K", "Q4_K_M")
_GPTQ_GROUP: Final = 128
# Elements and bytes, as of a block format.
_FLOAT32: Final = (1, 4)
_FLOAT16: Final = (1, 2)


def count(tensors: Collection[ModelTensor]) -> int:
    """Return the number of parameters."""
    return sum(tensor.num_elements for tensor in tensors)


def stored_formats(tensors: Collection[ModelTensor], model: ModelConfig) -> dict[str, int]:
    """Return the bytes of a model with these tensors in each of the usual formats.

    fp8 and int8: linear layers in 8 bits with a float32 scale per output row. gptq-int4 and awq-int4: linear layers in
    4 bits in groups of 128 with a 16-bit scale and a 4-bit zero each. All of these leave the rest in 16 bits. The GGUF
    formats are those of llama.cpp's quantize, which keeps vectors and routers in float32.
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
        **gguf_bytes(tensors, model),
    }


def _int4_bytes(rows: int, columns: int) -> int:
    """Return the bytes of the weights, and of a scale and a zero per group of input columns in each row."""
    num_groups = -(-columns // _GPTQ_GROUP)
    return rows * columns // 2 + num_groups * rows * 2 + num_groups * rows // 2


def gguf_bytes(tensors: Collection[ModelTensor], model: ModelConfig) -> dict[str, int]:
    """Return the bytes of a GGUF file's tensors in each of GGUF_FORMATS, by llama.cpp's rules."""
    facts = MixedModel(model.num_layers, model.num_heads, model.num_kv_heads, model.num_experts)
    weights = MixedWeights({_name_in_rules(tensor): tensor.shape for tensor in tensors}, facts)
    num_elements: Counter[str] = Counter()
    for tensor in tensors:
        num_elements[_name_in_rules(tensor)] += tensor.num_elements
    found = {}
    for name in GGUF_FORMATS:
        sums: Counter[str | None] = Counter()
        for weight, kind in weights.types(name.lower()).items():
            sums[kind] += num_elements[weight]
        found[name] = sum(_bytes_of(elements, kind) for kind, elements in sums.items())
    return found


def _bytes_of(num_elements: int, kind: str | None) -> int:
    block_elements, block_bytes = _FLOAT32 if kind is None else BLOCK_FORMATS.get(kind, _FLOAT16)
    return num_elements // block_elements * block_bytes


def _name_in_rules(tensor: ModelTensor) -> str:
    """Return the file's name of a weight, which tells its part, or the decoder's name where a file stacks experts."""
    return tensor.name if tensor.name.endswith("weight") else tensor.path
