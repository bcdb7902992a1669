"""FP8: numbers of 8 bits, with scales for the whole weight, for rows, or for blocks such as 128 x 128.

For a weight of N rows and C columns and blocks of n x c:

    .weight            [N, C] E4M3 or E5M2
    .weight_scale_inv  [N / n, C / c], rounded up: a number is weight * weight_scale_inv, despite the name
    .weight_scale      one number, or [N, 1]: a number is weight * weight_scale
    .qscale_weight     Mistral's own name for either

`.input_scale`, `.activation_scale` or `.qscale_act` is for rounding activations to FP8, which Pagewick does not do.

Source: https://github.com/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md), https://github.com/neuralmagic/AutoFP8, and
transformers (FineGrainedFP8Config, FbgemmFp8Config).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings, named
from pagewick.weights.packed.sizes import SCALE_DTYPES
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

Block = tuple[int, int]

ZERO_POINTS: Final = ".weight_zero_point"
INPUT_SCALES: Final = (".input_scale", ".activation_scale", ".input_scale_ub", ".qscale_act")
_SCALES: Final = (".weight_scale", ".weight_scale_inv", ".qscale_weight")
_SUFFIXES: Final = (".weight", *_SCALES, *INPUT_SCALES)
# transformers' own default.
_USUAL_BLOCK: Final = (128, 128)
_GROUPS: Final = {128: "fp8_g128", 32: "fp8_g32"}


@dataclass(frozen=True, slots=True)
class Fp8Format(PackedFormat):
    """block: rows and columns that share a scale; None: a scale is for the whole weight or for a row.

    is_block_certain: config.json says so; otherwise the shape of the scales decides. has_byte_scales: scales that are
    stored as bytes are exponents. scales: suffixes of scales, of which a weight has one.
    """

    block: Block | None
    is_block_certain: bool = True
    has_byte_scales: bool = False
    scales: tuple[str, ...] = _SCALES

    @property
    def label(self) -> str:
        if self.block is None or not self.is_block_certain:
            return "FP8"
        return f"FP8 {self.block[0]}x{self.block[1]}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        shape = blocks_shape((rows, columns), self.block or (rows, columns))
        kind = fp8_type("F8_E4M3", columns, self.block[1] if self.block else columns)
        return TensorInfo(name, kind, (rows, columns), rows * columns + 4 * shape[0] * shape[1], label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        found = [suffix for suffix in self.scales if suffix in parts]
        demand_parts(prefix, parts, (".weight",), self.label)
        if not found:
            raise ModelLoadError(
                f"the checkpoint lacks {' or '.join(prefix + suffix for suffix in self.scales)}, one of which "
                f"{self.label} needs\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )
        if len(found) > 1:
            raise ModelLoadError(
                f"cannot load {prefix}.weight: it has {' and '.join(found)}, and one of them is possible\n"
                "  download the checkpoint again"
            )
        weight, scales = parts[".weight"], parts[found[0]]
        shape = matrix_shape(weight)
        check_part(weight, ("F8_E4M3", "F8_E5M2"), shape)
        dtypes = (*SCALE_DTYPES, "F8_E8M0", *("U8",) * self.has_byte_scales)
        check_part(scales, dtypes, *self._scale_shapes(shape))
        check_input_scales(parts)
        kind = fp8_type(weight.dtype, shape[1], self._block_of(shape, scales.shape)[1])
        return PackedWeight(f"{prefix}.weight", shape, kind, self, parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        from pagewick.weights.packed.scaled_bytes import check_symmetric, encode, scale_numbers

        if ZERO_POINTS in weight.parts:
            check_symmetric(weight.part(ZERO_POINTS, get))
        values = weight.part(".weight", get)
        suffix = next(suffix for suffix in self.scales if suffix in weight.parts)
        block = self._block_of(weight.shape, weight.parts[suffix].shape)
        scales = scale_numbers(weight.part(suffix, get)).view(blocks_shape(weight.shape, block))
        return encode(weight.stored_type, weight.shape, lambda first, end: values[first:end], scales, block)

    def _scale_shapes(self, shape: Block) -> tuple[tuple[int, ...], ...]:
        in_blocks = () if self.block is None else _shapes_in_blocks(blocks_shape(shape, self.block))
        if self.block is not None and self.is_block_certain:
            return in_blocks
        return (*in_blocks, *scale_shapes(shape))

    def _block_of(self, shape: Block, stored: tuple[int, ...]) -> Block:
        """Return the rows and columns that share a scale, for scales of the shape `stored`."""
        if self.block is not None and stored in _shapes_in_blocks(blocks_shape(shape, self.block)):
            return self.block
        return shape if len(stored) == 0 or stored[0] == 1 else (1, shape[1])


def read_rules(settings: Settings) -> PackedRules:
    """Return what a quantization_config with quant_method fp8 says. Raises ModelLoadError."""
    settings.word("activation_scheme", ("dynamic", "static"), "dynamic")
    settings.demand("fmt", ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"))
    settings.demand("expert_dtype", ("fp8",))
    settings.demand("scale_fmt", ("float", "float32", "ue8m0"))
    is_certain = "weight_block_size" in settings.values
    block = block_size(settings, "weight_block_size") if is_certain else _USUAL_BLOCK
    return _rules(settings, Fp8Format(block, is_certain, settings.get("scale_fmt") == "ue8m0"))


def read_fbgemm_rules(settings: Settings) -> PackedRules:
    """Return what a quantization_config with quant_method fbgemm_fp8 says: a scale for each row."""
    return _rules(settings, Fp8Format(None))


def _rules(settings: Settings, form: Fp8Format) -> PackedRules:
    entries = ("modules_to_not_convert", "ignored_layers")
    entry = next((name for name in entries if name in settings), entries[0])
    # Without a list, transformers leaves out the head.
    is_left_out = named(settings.texts(entry) if entry in settings else ("lm_head",))
    return PackedRules(form.label, _SUFFIXES, _SCALES, lambda prefix: None if is_left_out(prefix) else form, entry)


def block_size(settings: Settings, name: str) -> Block | None:
    """Return an entry with rows and columns of a block; None if it is null. Raises ModelLoadError."""
    value = settings.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        # Older versions of compressed-tensors write "128x128".
        value = [int(size) if size.isdecimal() and len(size) < 9 else 0 for size in value.lower().split("x")]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 0 < size < 2**24 for size in value)
    ):
        raise settings.wrong(name, "two whole numbers above 0")
    return value[0], value[1]


def fp8_type(dtype: str, columns: int, columns_of_scale: int) -> str:
    """Return the block format for a weight whose scales are for a number of columns each; NUMBERS if none fits."""
    if dtype != "F8_E4M3":
        return NUMBERS
    fits = (name for size, name in _GROUPS.items() if columns % size == 0 and columns_of_scale % size == 0)
    return next(fits, NUMBERS)


def matrix_shape(weight: TensorInfo) -> Block:
    """Return the shape of a weight. Raises ModelLoadError unless it is a matrix."""
    if len(weight.shape) != 2 or not weight.num_elements:
        raise ModelLoadError(
            f"cannot load {weight.name}: its shape is {list(weight.shape)}, and it must be a matrix\n"
            "  config.json and the weights do not belong together; download or copy both again"
        )
    return weight.shape[0], weight.shape[1]


def blocks_shape(shape: Block, block: Block) -> Block:
    """Return how many blocks a weight has, from top to bottom and from left to right."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _shapes_in_blocks(number: Block) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of scales for blocks, of which there are `number`; ModelOpt keeps dimensions of one."""
    return number, (number[0], 1, number[1], 1)


def scale_shapes(shape: Block) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of scales for the whole weight and for each row."""
    return (), (1,), (1, 1), (shape[0],), (shape[0], 1)


def check_input_scales(parts: Mapping[str, TensorInfo], suffixes: tuple[str, ...] = INPUT_SCALES) -> None:
    """Raise ModelLoadError unless the scales for activations are single numbers."""
    for suffix in suffixes:
        if suffix in parts:
            check_part(parts[suffix], SCALE_DTYPES, (), (1,), (1, 1))
