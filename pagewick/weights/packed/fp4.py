"""FP4: two numbers in E2M1 in a byte, the lower half first, with a scale for each group of columns. NVFP4 and MXFP4.

For a weight of N rows and C columns, ModelOpt and compressed-tensors have these tensors of NVFP4:

    .weight          .weight_packed        [N, C / 2] bytes
    .weight_scale    .weight_scale         [N, C / 16] E4M3
    .weight_scale_2  .weight_global_scale  one number: ModelOpt multiplies scales by it, compressed-tensors divides them

Such weights are kept as fp4_g16, whose scales are in float32, since a product with the third tensor rounds them.

MXFP4 has groups of 32, whose scales are powers of two (E8M0, perhaps stored as bytes), and no third tensor; its blocks
become ggml's MXFP4.

Source: https://github.com/NVIDIA/TensorRT-Model-Optimizer, https://github.com/vllm-project/compressed-tensors, and the
Open Compute Project's specification of microscaling formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp8 import ZERO_POINTS, matrix_shape
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings, named
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_COLUMNS_OF_BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Fp4Format(PackedFormat):
    """packed: suffix of the numbers. group_size: columns that share a scale.

    factor: suffix of a number by which all scales are multiplied; with is_divisor, divided. Empty: there is none.
    scale: suffix of the scales. packed_dtypes: how the bytes of the numbers are called.
    """

    name: str
    packed: str
    group_size: int
    scale_dtypes: tuple[str, ...]
    factor: str = ""
    is_divisor: bool = False
    scale: str = ".weight_scale"
    packed_dtypes: tuple[str, ...] = ("U8",)

    @property
    def label(self) -> str:
        return self.name

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        num_bytes = rows * columns // 2 + rows * columns // self.group_size
        return TensorInfo(name, self._kind(columns), (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, (self.packed, self.scale, *(self.factor,) * bool(self.factor)), self.label)
        packed = parts[self.packed]
        rows, octets = matrix_shape(packed)
        columns = 2 * octets
        if columns % self.group_size:
            raise ModelLoadError(
                f"cannot load {packed.name}: {columns} columns are not a multiple of {self.group_size}\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )
        check_part(packed, self.packed_dtypes, (rows, octets))
        check_part(parts[self.scale], self.scale_dtypes, (rows, columns // self.group_size))
        if self.factor:
            check_part(parts[self.factor], ("F32",), (), (1,))
        return PackedWeight(f"{prefix}.weight", (rows, columns), self._kind(columns), self, parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        import torch

        from pagewick.quantization.expansion import fp4_values
        from pagewick.weights.packed.scaled_bytes import check_symmetric, encode, fp4_rows, scale_numbers

        if ZERO_POINTS in weight.parts:
            check_symmetric(weight.part(ZERO_POINTS, get))
        packed = weight.part(self.packed, get).view(torch.uint8)
        if weight.stored_type == "MXFP4":
            return fp4_rows(packed, weight.part(self.scale, get).view(torch.uint8))
        scales = scale_numbers(weight.part(self.scale, get))
        if self.factor:
            factor = weight.part(self.factor, get).view(())
            scales = scales / factor if self.is_divisor else scales * factor
        # Levels are twice the numbers.
        scales = scales / 2
        if weight.stored_type == "fp4_g16":
            return fp4_rows(packed, scales)
        block = (1, self.group_size)
        return encode(weight.stored_type, weight.shape, lambda first, end: fp4_values(packed[first:end]), scales, block)

    def _kind(self, columns: int) -> str:
        if columns % _COLUMNS_OF_BLOCK:
            return NUMBERS
        return "fp4_g16" if self.group_size % _COLUMNS_OF_BLOCK else "MXFP4"


MODELOPT_NVFP4: Final = Fp4Format("NVFP4", ".weight", 16, ("F8_E4M3",), ".weight_scale_2")
NVFP4: Final = Fp4Format("NVFP4", ".weight_packed", 16, ("F8_E4M3",), ".weight_global_scale", is_divisor=True)
MXFP4: Final = Fp4Format("MXFP4", ".weight_packed", 32, ("U8", "F8_E8M0"))


def read_mxfp4_rules(settings: Settings) -> PackedRules:
    """Read the rules of quant_method mxfp4, which is how gpt-oss stores its experts, and nothing else.

    All experts of a layer are in one tensor of numbers and one of scales; weights/stacked.py separates them.
    """
    is_left_out = named(settings.texts("modules_to_not_convert"))

    def format_of(prefix: str) -> PackedFormat | None:
        return MXFP4 if ".experts." in prefix and not is_left_out(prefix) else None

    return PackedRules("MXFP4", (".weight_packed", ".weight_scale"), (".weight_packed",), format_of)
