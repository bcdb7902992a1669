"""Copies of GGUF files with matrices in other types: in mixes, as files that people download have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch

from pagewick.kernels import quantize_weight
from pagewick.quantization import mixes
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.quantization.mixes import MixedModel, fitting_type, is_quantizable, mix_types

Numbers = np.ndarray[Any, Any]
# The mixes with which models are compared. tests/quantization/test_mixes.py compares their rules with llama.cpp's own.
MIXES: Final = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")


def types_of(mix: str, shapes: Mapping[str, Sequence[int]], model: MixedModel) -> dict[str, str]:
    """Return the type of every tensor in a mix; a name that is no mix is the type of all matrices."""
    if mix.lower() in mixes.MIXES:
        return {name: kind or "F32" for name, kind in mix_types(mix.lower(), shapes, model).items()}

    def fitting(num_columns: int) -> str:
        return fitting_type(mix, num_columns) if mix in BLOCK_FORMATS else mix

    return {name: fitting(shape[-1]) if is_quantizable(name, shape) else "F32" for name, shape in shapes.items()}


def quantize_rows(numbers: Numbers, kind: str) -> Numbers:
    """Return float32 rows as blocks of a type: those of the `gguf` package, or ours if it has none."""
    if kind.endswith("_K"):
        rows = torch.from_numpy(numbers.copy()).flatten(0, -2)
        return quantize_weight(rows, kind).view(*numbers.shape[:-1], -1).numpy()
    found: Numbers = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    return found


def quantize(source: Path, target: Path, mix: str = "Q8_0") -> Path:
    """Copy a float32 file with its matrices in a mix. Routers and norms stay in float32, as llama.cpp stores them."""
    reader = gguf.GGUFReader(source)

    def size_of(key: str, default: int = 0) -> int:
        field = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.{key}")
        value = default if field is None else field.contents()
        return max(value) if isinstance(value, list) else int(value)

    num_heads = size_of("attention.head_count")
    num_kv_heads = size_of("attention.head_count_kv", num_heads)
    model = MixedModel(size_of("block_count"), num_heads, num_kv_heads, size_of("expert_count"))
    types = types_of(mix, {tensor.name: tensor.data.shape for tensor in reader.tensors}, model)

    def change(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        kind = types[name]
        yield name, numbers if kind == "F32" else quantize_rows(numbers, kind), kind

    return rewrite(source, target, change)


Change = Callable[[str, Numbers], Iterable[tuple[str, Numbers, str]]]
"""The name and the float32 numbers of a tensor -> names, contents and types in their place."""


def rewrite(source: Path, target: Path, change: Change, values: Mapping[str, Any] | None = None) -> Path:
    """Copy a float32 file with other tensors. values: of keys that change; None leaves a key out."""
    others = dict(values or {})
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            if (value := others.pop(key, field.contents())) is not None:
                writer.add_key_value(key, value, kind, sub_type=inner)
    for key, value in others.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        for name, content, kind in change(tensor.name, tensor.data):
            writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
