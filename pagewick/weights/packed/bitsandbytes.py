"""bitsandbytes: LLM.int8(), and 4 bits in NF4 or FP4.

For a weight of N rows and C columns in 8 bits:

    .weight  [N, C] int8; a number is weight * SCB / 127
    .SCB     [N] float32: the largest magnitude of each row

In 4 bits, with blocks of `blocksize` numbers, which do not end where rows do:

    .weight                                 [N * C / 2, 1] bytes with two indices, the upper half first
    .weight.quant_map                       [16] float32: the number of each index
    .weight.absmax                          the factor of each block, or with nested quantization an index in bytes
    .weight.nested_quant_map, nested_absmax the same for the factors, to which nested_offset is added
    .weight.quant_state.bitsandbytes__nf4   JSON: blocksize, shape, nested_blocksize, nested_offset

Source: https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py, QuantState).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp8 import matrix_shape
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings, named
from pagewick.weights.packed.sizes import stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_STATE: Final = ".weight.quant_state.bitsandbytes__"
_MAP, _ABSMAX = ".weight.quant_map", ".weight.absmax"
_NESTED_MAP, _NESTED_ABSMAX = ".weight.nested_quant_map", ".weight.nested_absmax"
_TYPES: Final = ("nf4", "fp4")
_INT8_SUFFIXES: Final = (".weight", ".SCB", ".weight_format")
_FOUR_BIT_SUFFIXES: Final = (
    ".weight", _MAP, _ABSMAX, _NESTED_MAP, _NESTED_ABSMAX, *(f"{_STATE}{kind}" for kind in _TYPES)
)  # fmt: skip
# .SCB is in units of this.
_INT8_UNIT: Final = 127
_MAX_STATE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Int8Format(PackedFormat):
    """LLM.int8(). bitsandbytes multiplies columns of outliers in 16 bits; here all columns are alike."""

    @property
    def label(self) -> str:
        return "bitsandbytes int8"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        kind = stored_type_of(8, columns, -1, "F32")
        return TensorInfo(name, kind, (rows, columns), rows * (columns + 4), label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, (".weight", ".SCB"), self.label)
        shape = matrix_shape(parts[".weight"])
        check_part(parts[".weight"], ("I8",), shape)
        check_part(parts[".SCB"], ("F32",), (shape[0],))
        if ".weight_format" in parts:
            check_part(parts[".weight_format"], ("U8",), ())
        return PackedWeight(f"{prefix}.weight", shape, stored_type_of(8, shape[1], -1, "F32"), self, parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        from pagewick.weights.packed.scaled_bytes import encode

        if ".weight_format" in weight.parts and weight.part(".weight_format", get).item() != 0:
            raise ModelLoadError(
                "its weight_format is a layout of one kind of GPU, and only rows can be read\n"
                "  save the checkpoint with a recent version of bitsandbytes"
            )
        values, scales = weight.part(".weight", get), weight.part(".SCB", get) / _INT8_UNIT
        block = 1, weight.shape[1]
        return encode(weight.stored_type, weight.shape, lambda first, end: values[first:end], scales.view(-1, 1), block)


@dataclass(frozen=True, slots=True)
class FourBitFormat(PackedFormat):
    """kind: nf4 or fp4. is_nested: the factors of blocks are quantized, too (bnb_4bit_use_double_quant)."""

    kind: str
    is_nested: bool

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind}{' nested' * self.is_nested}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        num_bytes = rows * columns // 2 + rows * columns // 64 * (1 if self.is_nested else 4)
        return TensorInfo(name, NUMBERS, (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        nested = (_NESTED_MAP, _NESTED_ABSMAX) * self.is_nested
        state = f"{_STATE}{self.kind}"
        demand_parts(prefix, parts, (".weight", _MAP, _ABSMAX, state, *nested), self.label)
        octets = parts[".weight"].num_elements
        check_part(parts[".weight"], ("U8",), (octets, 1), (1, octets))
        check_part(parts[_MAP], ("F32",), (16,))
        check_part(parts[_ABSMAX], ("U8",) if self.is_nested else ("F32",), (parts[_ABSMAX].num_elements,))
        check_part(parts[state], ("U8",), (min(_MAX_STATE_BYTES, parts[state].num_elements),))
        if self.is_nested:
            check_part(parts[_NESTED_MAP], ("F32",), (256,))
            check_part(parts[_NESTED_ABSMAX], ("F32",), (parts[_NESTED_ABSMAX].num_elements,))
        return PackedWeight(f"{prefix}.weight", (1, 2 * octets), NUMBERS, self, parts, is_flat=True)

    def resolved(self, weight: PackedWeight, get: GetTensor) -> PackedWeight:
        shape = self._state(weight, get)["shape"]
        rows, columns = shape
        if rows * columns != 2 * weight.parts[".weight"].num_elements:
            raise _wrong_state(weight, f"shape {shape} does not fit its numbers")
        return replace(weight, shape=(rows, columns), is_flat=False)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        import torch

        state = self._state(weight, get)
        absmax, stored = weight.part(_ABSMAX, get), weight.part(".weight", get).flatten()
        if self.is_nested:
            levels = weight.part(_NESTED_MAP, get).index_select(0, absmax.int())
            factors = _per_block(weight.part(_NESTED_ABSMAX, get), state["nested_blocksize"], len(levels))
            absmax = levels * factors + state["nested_offset"]
        indices = torch.stack([stored >> 4, stored & 15], dim=-1).flatten()
        numbers = weight.part(_MAP, get).index_select(0, indices.int())
        numbers *= _per_block(absmax, state["blocksize"], len(numbers))
        if not bool(numbers.isfinite().all()):
            raise ModelLoadError("a number is infinite or NaN\n  download the file again")
        return numbers.view(weight.shape)

    def _state(self, weight: PackedWeight, get: GetTensor) -> dict[str, Any]:
        """Return the JSON object of a weight. Raises ModelLoadError if it is wrong."""
        text = bytes(weight.part(f"{_STATE}{self.kind}", get).tolist())
        try:
            state = json.loads(text)
        except (ValueError, RecursionError):
            raise _wrong_state(weight, "it is no JSON") from None
        if not isinstance(state, dict):
            raise _wrong_state(weight, "it is no object")
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_size, shape)):
            raise _wrong_state(weight, "it has no shape of a matrix")
        if not all(_is_size(state.get(name)) for name in ("blocksize", *("nested_blocksize",) * self.is_nested)):
            raise _wrong_state(weight, "it has no size of blocks")
        if self.is_nested and not isinstance(state.get("nested_offset"), float):
            raise _wrong_state(weight, "it has no nested_offset")
        if state.get("quant_type") != self.kind:
            raise _wrong_state(weight, f"its quant_type is not {self.kind}")
        return state


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _per_block(values: Tensor, block_size: int, count: int) -> Tensor:
    """Return the value of the block that each of `count` numbers is in. Raises ModelLoadError if blocks lack values."""
    num_blocks = -(-count // block_size)
    if len(values) != num_blocks:
        raise ModelLoadError(
            f"{count} numbers in blocks of {block_size} need {num_blocks} factors, and it has {len(values)}\n"
            "  download the file again"
        )
    return values.repeat_interleave(block_size)[:count]


def _wrong_state(weight: PackedWeight, reason: str) -> ModelLoadError:
    return ModelLoadError(f"cannot load {weight.name}: its quant_state is damaged: {reason}\n  download the file again")


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of bitsandbytes says. Raises ModelLoadError."""
    # Without a list, transformers leaves out the head.
    skipped = settings.texts("llm_int8_skip_modules") if "llm_int8_skip_modules" in settings else ("lm_head",)
    is_left_out = named(skipped)
    form, suffixes, marks = _chosen(settings)
    return PackedRules(
        form.label, suffixes, marks, lambda prefix: None if is_left_out(prefix) else form, "llm_int8_skip_modules"
    )


def _chosen(settings: Settings) -> tuple[PackedFormat, tuple[str, ...], tuple[str, ...]]:
    is_int8 = settings.flag("load_in_8bit", default=False) or settings.flag("_load_in_8bit", default=False)
    is_four_bit = settings.flag("load_in_4bit", default=False) or settings.flag("_load_in_4bit", default=False)
    if is_int8 == is_four_bit:
        raise settings.wrong("load_in_8bit", "true, or load_in_4bit: exactly one of them")
    if is_int8:
        return Int8Format(), _INT8_SUFFIXES, (".SCB",)
    settings.demand("bnb_4bit_quant_storage", ("uint8",))
    kind = settings.word("bnb_4bit_quant_type", _TYPES, "fp4")
    form = FourBitFormat(kind, settings.flag("bnb_4bit_use_double_quant", default=False))
    return form, _FOUR_BIT_SUFFIXES, (_ABSMAX, _MAP)
