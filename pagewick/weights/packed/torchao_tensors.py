"""A weight that torchao has quantized: its tensors, and what the header of their file says about them.

For a weight of N rows and C columns in blocks of n x c (block_size), by the class that the header names:

    Float8Tensor              qdata [N, C] E4M3 or E5M2, scale [N / n, C / c]
    Int8Tensor                qdata [N, C] int8, scale [N / n, C / c], perhaps zero_point likewise, int8
    IntxUnpackedToInt8Tensor  the same, for numbers of 1 to 8 bits (target_dtype), each in a byte
    Int4Tensor, Int4TilePackedTo4dTensor: torchao_int4.py
    MXTensor                  MXFP8 and MXFP4: qdata [N, C], or [N, C / 2] bytes of two numbers; scale [N, C / 32]
    NVFP4Tensor               qdata [N, C / 2] bytes of two numbers, the lower half first; scale [N, C / 16] E4M3, and
                              perhaps per_tensor_scale, by which all scales are multiplied

Scales of the last two may be in the order that cuBLAS has for them (is_swizzled_scales). Columns of any weight may have
factors (act_pre_scale) by which torchao multiplies activations: AWQ and SmoothQuant. Other tensors are for rounding
activations.

Source: https://github.com/pytorch/ao (quantization/quantize_/workflows, prototype/mx_formats).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some
from pagewick.weights.packed.adapted import FACTORS, FactoredFormat, SwizzledFormat
from pagewick.weights.packed.compressed_tensors import IntegerFormat
from pagewick.weights.packed.fp4 import MODELOPT_NVFP4, Fp4Format
from pagewick.weights.packed.fp8 import ZERO_POINTS, Fp8Format, matrix_shape
from pagewick.weights.packed.layout import PackedFormat, PackedWeight, demand_parts
from pagewick.weights.packed.settings import Settings
from pagewick.weights.packed.torchao_int4 import SCALES_AND_ZEROS, TorchaoInt4Format
from pagewick.weights.stack_kinds import stacks_of
from pagewick.weights.tensor_headers import TensorInfo

_STEM: Final = "._weight_"
# torchao's name of a tensor -> the suffix that the formats have for it; without one, it is for activations.
_PARTS: Final = {
    "qdata": ".weight",
    "scale": ".weight_scale",
    "zero_point": ZERO_POINTS,
    "scale_and_zero": SCALES_AND_ZEROS,
    "per_tensor_scale": MODELOPT_NVFP4.factor,
    "act_pre_scale": FACTORS,
    "act_quant_scale": "",
    "act_quant_zero_point": "",
    "act_per_tensor_scale": "",
}
_PLAIN: Final = ".weight"
SUFFIXES: Final = (*(_STEM + part for part in _PARTS), _PLAIN)
MARKS: Final = tuple(_STEM + part for part in ("qdata", "scale", "scale_and_zero"))
_ENDS: Final = tuple(f"_{part}" for part in _PARTS if part != "scale")
INTEGERS: Final = tuple(f"int{bits}" for bits in range(1, 9))
MXFP4: Final = Fp4Format("MXFP4", ".weight", 32, ("F8_E8M0",))
MXFP8: Final = Fp8Format((1, 32))
_NVFP4_WITHOUT_FACTOR: Final = Fp4Format("NVFP4", ".weight", 16, ("F8_E4M3",))
_FP8_DTYPES: Final = ("float8_e4m3fn", "float8_e5m2")
_FP4_DTYPE: Final = "float4_e2m1fn_x2"
_MAX_DESCRIPTION: Final = 100_000
# Beginnings of names of modules that files still have, and those in transformers. Headers have the latter.
_OTHER_NAMES: Final = (
    ("language_model.model.", "model.language_model."),
    ("model.language_model.", "language_model.model."),
    ("model.", "model.language_model."),
    ("", "model."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchaoTensors:
    """The tensors of a weight, by the end of their name. Every method raises ModelLoadError."""

    prefix: str
    parts: Mapping[str, TensorInfo]

    def weight(self, *, is_symmetric: bool) -> PackedWeight:
        """Return the weight. is_symmetric: config.json says that numbers of 8 bits have no zero points."""
        if _PLAIN in self.parts:
            raise ModelLoadError(
                f"{self.prefix} has both a weight and tensors of a quantized one\n  download the checkpoint again"
            )
        entries, is_stacked = self._description()
        kind = entries.choice("_type", _STACKED_KINDS if is_stacked else tuple(_KINDS))
        data = entries.child("_data")
        if data is None:
            raise entries.wrong("_data", "an object")
        attributes = Settings({k: unwrapped(v) for k, v in data.values.items()}, data.path, data.file)
        if is_stacked:
            attributes = _of_one(attributes)
        demand_parts(self.prefix, self.parts, [_STEM + part for part in _NEEDED.get(kind, ("qdata", "scale"))], kind)
        parts = {
            suffix: tensor
            for name, tensor in self.parts.items()
            if (suffix := _PARTS[name.removeprefix(_STEM)])
        }  # fmt: skip
        form = _KINDS[kind](attributes, parts, is_symmetric)
        return (FactoredFormat(form) if FACTORS in parts else form).weight(self.prefix, parts)

    def _description(self) -> tuple[Settings, bool]:
        """Return what the header says about the weight, and whether it says so about all experts of the layer."""
        tensor = next(iter(self.parts.values()))
        file = f"the header of {tensor.file_name or 'the file'}"
        texts = tensor.metadata or {}
        names = {f"{name}.weight": False for name in _names(self.prefix)}
        names |= dict.fromkeys((name for stack in stacks_of(self.prefix) for name in _names(stack)), True)
        key = next((key for key in names if key in texts), "")
        found = texts.get(key)
        problem = "says nothing about it, as torchao's files do"
        if found is not None:
            try:
                entries = json.loads(found) if len(found) <= _MAX_DESCRIPTION else None
            except (ValueError, RecursionError):
                entries = None
            if isinstance(entries, dict):
                return Settings(entries, key, file), names[key]
            problem = "has no JSON object about it"
        raise ModelLoadError(
            f"cannot load {self.prefix}.weight: {file} {problem}\n"
            "  the file is damaged, or another program wrote it: download or copy it again"
        )


def _names(prefix: str) -> list[str]:
    """Return the names that a module of a file may have in its header."""
    return [prefix, *(new + prefix.removeprefix(old) for old, new in _OTHER_NAMES if prefix.startswith(old))]


def unwrapped(value: Any) -> Any:
    """Return the name of a constant or a data type, which torchao writes as an object; any other value as it is."""
    if isinstance(value, Mapping) and isinstance(value.get("_data"), str):
        return value["_data"]
    return value


def check_names(names: Iterable[str]) -> None:
    """Raise ModelLoadError if other tensors than weights of modules are quantized, or if names are of version 0.14."""
    found = list(names)
    if old := [name for name in found if name.endswith(":qdata")]:
        raise ModelLoadError(
            f"version 0.14 of torchao wrote this checkpoint, with names such as {old[0]}, which are not read\n"
            "  load it with transformers and torchao, and save it again with version 0.15 or a later one"
        )
    if others := [name for name in found if name.endswith(_ENDS) and not name.endswith(SUFFIXES)]:
        raise ModelLoadError(
            f"torchao has quantized tensors other than weights of layers: {name_some(others)}\n"
            "  biases are not read if they are quantized, nor are all experts of a layer in such a tensor\n"
            "  use a checkpoint where they are not, or the unquantized one with --quantization q4_k_m"
        )


_Parts = Mapping[str, TensorInfo]


def _float8(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    if not data.get("block_size"):
        return Fp8Format(None)
    shape, block = matrix_shape(parts[".weight"]), _block(data, parts)
    return Fp8Format(None if block in ((1, shape[1]), shape) else block)


def _int8(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    has_zeros = ZERO_POINTS in parts and not is_symmetric
    return IntegerFormat(8, _group_size(data, parts), not has_zeros, is_packed=False)


def _intx(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    bits = int(data.word("target_dtype", INTEGERS).removeprefix("int"))
    return IntegerFormat(bits, _group_size(data, parts), bits == 8 and is_symmetric, is_packed=False)


def _int4(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    size, shape = _columns_of_group(data), _shape(data)
    # For activations in FP8, torchao's kernels have no zero points.
    activations = data.word("activation_dtype", ("bfloat16", "float8_e4m3fn"), "bfloat16")
    return TorchaoInt4Format(size, has_zeros=activations == "bfloat16", shape=shape)


def _tiled_int4(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    return TorchaoInt4Format(_columns_of_group(data), is_tiled=True, shape=_shape(data))


def _mx(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    data.choice("block_size", (32,))
    dtype = data.word("elem_dtype", (*_FP8_DTYPES, _FP4_DTYPE))
    return _swizzled(data, MXFP4 if dtype == _FP4_DTYPE else MXFP8, 32, 2 if dtype == _FP4_DTYPE else 1)


def _nvfp4(data: Settings, parts: _Parts, is_symmetric: bool) -> PackedFormat:
    data.choice("block_size", (16,))
    return _swizzled(data, MODELOPT_NVFP4 if MODELOPT_NVFP4.factor in parts else _NVFP4_WITHOUT_FACTOR, 16, 2)


_KINDS: Final[Mapping[str, Callable[[Settings, _Parts, bool], PackedFormat]]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tiled_int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
# Those whose tensors have a part for each expert, if all experts of a layer are in one.
_STACKED_KINDS: Final = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "MXTensor", "NVFP4Tensor")
# Those that need more than numbers and scales.
_NEEDED: Final = {
    "IntxUnpackedToInt8Tensor": ("qdata", "scale", "zero_point"),
    "Int4Tensor": ("qdata", "scale", "zero_point"),
    "Int4TilePackedTo4dTensor": ("qdata", "scale_and_zero"),
}


def _swizzled(data: Settings, form: PackedFormat, group_size: int, per_byte: int) -> PackedFormat:
    is_swizzled = data.flag("is_swizzled_scales", default=False)
    return SwizzledFormat(form, group_size, per_byte) if is_swizzled else form


def _of_one(data: Settings) -> Settings:
    """Return the attributes of a single expert's weight, by those of all experts. Raises ModelLoadError."""
    block = data.get("block_size")
    if not isinstance(block, list):
        return data
    if len(block) != 3 or block[0] != 1:
        raise data.wrong("block_size", "a list of three that begins with 1: others are not supported for experts")
    return Settings({**data.values, "block_size": block[1:]}, data.path, data.file)


def _pair(data: Settings, name: str) -> tuple[int, int]:
    """Return two sizes. Raises ModelLoadError."""
    found = data.get(name)
    if not isinstance(found, list) or not all(type(size) is int and 0 < size <= 2**24 for size in found):
        raise data.wrong(name, "a list of whole numbers above 0")
    if len(found) != 2:
        raise data.wrong(name, "a list of two: weights with other than two dimensions are not supported")
    return found[0], found[1]


def _block(data: Settings, parts: _Parts) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Raises ModelLoadError."""
    block = _pair(data, "block_size")
    if any(size % own for size, own in zip(matrix_shape(parts[".weight"]), block, strict=True)):
        raise data.wrong("block_size", f"sizes that divide the weight's, {list(parts['.weight'].shape)}")
    return block


def _group_size(data: Settings, parts: _Parts) -> int:
    """Return the columns that share a scale, -1 for a row or the whole weight. Raises ModelLoadError."""
    (rows, columns), (num_rows, num_columns) = _block(data, parts), matrix_shape(parts[".weight"])
    if columns == num_columns and rows in (1, num_rows):
        return -1
    if rows != 1:
        raise data.wrong("block_size", "one row, or the whole weight: other blocks are not supported")
    return columns


def _columns_of_group(data: Settings) -> int:
    rows, columns = _pair(data, "block_size")
    if rows != 1:
        raise data.wrong("block_size", "one row: other blocks are not supported")
    return columns


def _shape(data: Settings) -> tuple[int, int]:
    return _pair(data, "shape")
