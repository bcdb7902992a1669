"""As what a checkpoint stores a parameter, by its config.json: as itself, or quantized. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.doctor.shape import read_size
from pagewick.errors import ModelLoadError
from pagewick.weights.tensor_headers import TensorInfo

_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BYTES: Final = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class StoredAs:
    """dtype: of what is not quantized. method: how the others are; empty if none is.

    block: rows and columns with one scale, of fp8. group_size: input columns with one scale, of 4 bits.
    """

    dtype: str
    method: str = ""
    block: tuple[int, int] = (1, 1)
    group_size: int = 1

    def tensors(self, name: str, shape: tuple[int, ...], is_linear: bool) -> Iterator[TensorInfo]:
        """The tensors of one parameter. is_linear: whether the quantization, if there is one, takes it."""
        if not is_linear or not self.method:
            yield _tensor(name, self.dtype, shape)
        elif self.method == "fp8":
            rows, columns = shape
            yield _tensor(name, "F8_E4M3", shape)
            yield _tensor(f"{name}_scale_inv", "F32", (-(-rows // self.block[0]), -(-columns // self.block[1])))
        else:
            yield from self._packed(name.removesuffix(".weight"), *shape)

    def _packed(self, prefix: str, rows: int, columns: int) -> Iterator[TensorInfo]:
        """Eight numbers of 4 bits in each integer: along the inputs with GPTQ, along the outputs with AWQ."""
        if rows % 8 or columns % 8:
            raise ModelLoadError(f"{prefix}: {rows} x {columns} cannot be packed by eight\n  check config.json")
        groups = -(-columns // self.group_size)
        is_gptq = self.method == "gptq"
        yield _tensor(f"{prefix}.qweight", "I32", (columns // 8, rows) if is_gptq else (columns, rows // 8))
        yield _tensor(f"{prefix}.qzeros", "I32", (groups, rows // 8))
        yield _tensor(f"{prefix}.scales", "F16", (groups, rows))
        if is_gptq:
            yield _tensor(f"{prefix}.g_idx", "I32", (columns,))


def stored_as(config: Mapping[str, Any], dtype: str) -> StoredAs:
    """How a checkpoint with this config.json stores its tensors. dtype: pagewick's name of the config's own.

    Known: no quantization, fp8 in blocks, GPTQ and AWQ of 4 bits. Raises ModelLoadError for another.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return StoredAs(_NAMES[dtype])
    if not isinstance(quantization, Mapping):
        raise _unknown("a quantization that is no object")
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise _unknown("fp8 without weight_block_size")
        return StoredAs(_NAMES[dtype], "fp8", (block[0], block[1]))
    if method in ("gptq", "awq") and bits == 4:
        return StoredAs(_NAMES[dtype], method, group_size=read_size(quantization, "group_size"))
    raise _unknown(f"{method or 'an unnamed method'} ({bits} bits)")


def _unknown(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json asks for {what}: what that stores does not follow from it alone\n"
        "  put the model's *.safetensors there, too; known without them: fp8 in blocks, gptq and awq of 4 bits"
    )


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype, shape, math.prod(shape) * _BYTES[dtype])
