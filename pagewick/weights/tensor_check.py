"""Whether the tensors of a checkpoint are those of its model, by names and headers alone. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Final

from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import check_block_format
from pagewick.weights.files import name_some
from pagewick.weights.tensor_headers import TensorInfo

_DTYPES: Final = ("BF16", "F16", "F32", "F64")
_WHOLE: Final = ("I32", "I64")
_BIAS: Final = "bias"
_FIX: Final = "  config.json and the weights do not belong together; download or copy both again"


def check_names(expected: Collection[str], names: Sequence[str], ignored: Iterable[str]) -> None:
    """Raise ModelLoadError if `names`, a checkpoint's tensors, are not the `expected` ones.

    ignored: regular expressions of tensors that may be there and are not used. spare_biases may be there, too; headers
    do not show whether they are zeros.
    """
    present, patterns = set(names), [re.compile(pattern) for pattern in ignored]
    missing = [name for name in expected if name not in present]
    unexpected = [name for name in names if name not in expected and not any(p.fullmatch(name) for p in patterns)]
    spare = set(spare_biases(expected, unexpected))
    unexpected = [name for name in unexpected if name not in spare]
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {_count(missing)} of this model: {name_some(missing)}")
    if unexpected:
        problems.append(f"the model has no place for {_count(unexpected)}: {name_some(unexpected)}")
    if problems:
        raise ModelLoadError("\n".join([*problems, _FIX]))


def spare_biases(expected: Collection[str], names: Iterable[str]) -> list[str]:
    """Return the biases among `names` of weights that have none in the model.

    AutoGPTQ gave a bias of zeros to every weight that it quantized (Llama 2 and Mistral by TheBloke). The
    caller has to check that they are zeros.
    """
    biases = (name for name in names if name.endswith(f".{_BIAS}") and name not in expected)
    return [name for name in biases if f"{name.removesuffix(_BIAS)}weight" in expected]


def check_headers(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Collection[TensorInfo],
    ignored: Iterable[str],
    tables: Collection[str] = (),
) -> None:
    """Raise what loading these tensors would raise: ModelLoadError, or ConfigError for a type that is not supported.

    expected: the shape of every tensor of the model, by name. ignored: as in check_names. tables: those that
    hold whole numbers.
    """
    check_names(expected.keys(), [tensor.name for tensor in tensors], ignored)
    for tensor in tensors:
        shape = expected.get(tensor.name, tensor.shape)
        # The headers of some packed weights say only how many numbers they have.
        if tensor.shape != shape and not (tensor.label and tensor.shape == (prod(shape),)):
            raise ModelLoadError(
                f"cannot load {tensor.name}: its shape is {list(tensor.shape)}, and config.json says {list(shape)}\n"
                + _FIX
            )
        if tensor.name not in expected:
            continue
        if tensor.is_in_blocks:
            check_block_format(tensor.dtype, tensor.name)
        elif tensor.dtype not in (known := _WHOLE if tensor.name in tables else _DTYPES):
            raise ModelLoadError(
                f"cannot load {tensor.name}: it is stored as {tensor.dtype}, and must be one of {', '.join(known)}\n"
                "  use the model's original, unquantized checkpoint instead"
            )


def cut_inside_block(tensors: Iterable[TensorInfo], kept_columns: Mapping[str, int]) -> str:
    """Return which tensor is cut inside a block, and where; empty if none is.

    tensors: those that are in blocks, of supported formats. kept_columns: columns that the first rank keeps, by name.
    """
    for tensor in tensors:
        columns, kept = tensor.shape[-1], kept_columns.get(tensor.name, tensor.shape[-1])
        if kept < columns and tensor.has_column_order:
            return f"{tensor.name}: its {columns} columns are sorted by group (desc_act), and cannot be shared"
        if kept < columns and kept % tensor.block_size:
            return (
                f"{tensor.name}: its {columns} columns are in blocks of {tensor.block_size} ({tensor.dtype}), "
                f"and the first rank would get {kept}"
            )
    return ""


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"
