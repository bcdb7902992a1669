"""Copies of GGUF files with matrices in other types: in mixes, as files that people download have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch

from pagewick.kernels import quantize_weight

Numbers = np.ndarray[Any, Any]
_HEAD: Final = r"^output\."
# Name -> regular expression for tensor names -> type; the first that fits counts. As llama.cpp's, for two layers.
MIXES: Final[Mapping[str, Mapping[str, str]]] = {
    "Q8_0": {"": "Q8_0"},
    "Q6_K": {"": "Q6_K"},
    "Q5_K_M": {_HEAD: "Q6_K", r"^blk\.0\.(attn_v|ffn_down)": "Q6_K", "": "Q5_K"},
    "Q4_K_M": {_HEAD: "Q6_K", r"^blk\.0\.(attn_v|ffn_down)": "Q6_K", "": "Q4_K"},
    "Q4_0": {_HEAD: "Q6_K", "": "Q4_0"},
    "Q3_K_M": {_HEAD: "Q6_K", r"attn_v": "Q5_K", r"attn_output|ffn_down": "Q4_K", "": "Q3_K"},
    "Q2_K": {_HEAD: "Q6_K", r"attn_v|attn_output|ffn_down": "Q3_K", "": "Q2_K"},
}
# For rows that blocks of 256 do not fill.
_FOR_SHORT_ROWS: Final = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def type_of(mix: str, tensor_name: str, num_columns: int, *, is_tied: bool) -> str:
    """Return the type of a matrix in a mix; a name that is no mix is the type of all.

    is_tied: the embeddings are the vocabulary head, too, and have its type.
    """
    if is_tied and tensor_name == "token_embd.weight":
        tensor_name = "output.weight"
    kinds = MIXES.get(mix, {"": mix})
    kind = next(kind for pattern, kind in kinds.items() if re.search(pattern, tensor_name))
    return _FOR_SHORT_ROWS.get(kind, kind) if num_columns % 256 else kind


def quantize_rows(numbers: Numbers, kind: str) -> Numbers:
    """Return float32 rows as blocks of a type: those of the `gguf` package, or ours if it has none."""
    if kind.endswith("_K"):
        rows = torch.from_numpy(numbers.copy()).flatten(0, -2)
        return quantize_weight(rows, kind).view(*numbers.shape[:-1], -1).numpy()
    found: Numbers = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    return found


def quantize(source: Path, target: Path, mix: str = "Q8_0") -> Path:
    """Copy a float32 file with its matrices in a mix. Routers and norms stay in float32, as llama.cpp stores them."""
    is_tied = all(tensor.name != "output.weight" for tensor in gguf.GGUFReader(source).tensors)

    def change(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        if numbers.ndim > 1 and "norm" not in name and "ffn_gate_inp" not in name:
            kind = type_of(mix, name, numbers.shape[-1], is_tied=is_tied)
            yield name, quantize_rows(numbers, kind), kind
        else:
            yield name, numbers, "F32"

    return rewrite(source, target, change)


def rewrite(source: Path, target: Path, change: Callable[[str, Numbers], Iterable[tuple[str, Numbers, str]]]) -> Path:
    """Copy a float32 file. change: the name and the numbers of a tensor -> names, contents and types in their place."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        for name, content, kind in change(tensor.name, tensor.data):
            writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
