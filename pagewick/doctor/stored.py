"""The tensors that a checkpoint holds by its config.json alone: unquantized, or packed. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.tensors import model_tensors
from pagewick.weights.tensor_headers import TensorInfo

_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BYTES: Final = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


def described_tensors(model: ModelConfig, config: Mapping[str, Any]) -> list[TensorInfo]:
    """All tensors of a checkpoint of `model` with this config.json, as they would be stored.

    Raises ModelLoadError for a quantization other than fp8 in blocks and GPTQ and AWQ of 4 bits.
    """
    stored = _stored_as(config, _NAMES[model.dtype])
    found: list[TensorInfo] = []
    for tensor in model_tensors(model):
        if tensor.is_linear and stored.method:
            found += stored.packed(tensor.name.removesuffix(".weight"), *tensor.shape)
        else:
            found.append(_tensor(tensor.name, stored.dtype, *tensor.shape))
    return found


@dataclass(frozen=True, slots=True)
class _StoredAs:
    """dtype: of unquantized tensors. method: how linear weights are quantized; empty if they are not.

    block: rows and columns that share a scale, in fp8. group_size: input columns that share a scale, in 4 bits.
    """

    dtype: str
    method: str = ""
    block: tuple[int, int] = (1, 1)
    group_size: int = 1

    def packed(self, prefix: str, rows: int, columns: int) -> Iterator[TensorInfo]:
        """The tensors of one linear weight. GPTQ packs eight 4-bit inputs into an integer, AWQ eight outputs."""
        if self.method == "fp8":
            yield _tensor(f"{prefix}.weight", "F8_E4M3", rows, columns)
            scales = -(-rows // self.block[0]), -(-columns // self.block[1])
            yield _tensor(f"{prefix}.weight_scale_inv", "F32", *scales)
            return
        if rows % 8 or columns % 8:
            raise ModelLoadError(f"{prefix}: {rows} x {columns} cannot be packed by eight\n  check config.json")
        groups = -(-columns // self.group_size)
        is_gptq = self.method == "gptq"
        yield _tensor(f"{prefix}.qweight", "I32", *((columns // 8, rows) if is_gptq else (columns, rows // 8)))
        yield _tensor(f"{prefix}.qzeros", "I32", groups, rows // 8)
        yield _tensor(f"{prefix}.scales", "F16", groups, rows)
        if is_gptq:
            yield _tensor(f"{prefix}.g_idx", "I32", columns)


def _stored_as(config: Mapping[str, Any], dtype: str) -> _StoredAs:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return _StoredAs(dtype)
    if not isinstance(quantization, Mapping):
        raise _unknown("a quantization that is no object")
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
            raise _unknown("fp8 without weight_block_size")
        return _StoredAs(dtype, "fp8", (block[0], block[1]))
    if method in ("gptq", "awq") and bits == 4 and _is_size(group_size := quantization.get("group_size")):
        return _StoredAs(dtype, method, group_size=group_size)
    raise _unknown(f"{method or 'an unnamed method'} ({bits} bits)")


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _unknown(quantization: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json asks for {quantization}: which tensors that stores does not follow from it alone\n"
        "  put the model's *.safetensors there, too; known without them: fp8 in blocks, gptq and awq of 4 bits"
    )


def _tensor(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, math.prod(shape) * _BYTES[dtype])
