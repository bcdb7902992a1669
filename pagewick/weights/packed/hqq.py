"""HQQ: half-quadratic quantization, with zero points that are not whole numbers.

A weight of N rows and C columns is a matrix of groups: with axis 1 each of its L rows is a group of `group_size`
neighbouring numbers, with axis 0 each of its K columns is one.

    .W_q    [L / w, K] bytes that hold w levels, the highest bits those of the first L / w rows; 3 bits: ten in int32
    .scale  [L, 1] or [1, K]; a number is (level - zero) * scale
    .zero   likewise
    .shape  N and C

Further tensors repeat what config.json says (.nbits, .group_size, .axis ...).

Source: https://github.com/mobiusml/hqq (core/quantize.py, core/bitpack.py) and transformers (integrations/hqq.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp8 import matrix_shape
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings
from pagewick.weights.packed.sizes import SCALE_DTYPES
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_NEEDED: Final = (".W_q", ".scale", ".zero", ".shape")
# Numbers that config.json has, too.
_REPEATED: Final = (".nbits", ".group_size", ".axis")
_SUFFIXES: Final = (
    *_NEEDED, *_REPEATED, ".packing", ".unpack_view_dtype", ".view_as_float", ".quant_scale", ".quant_zero",
    ".compute_dtype", ".offload_meta", ".encoded_state_dict", ".stores_quant_config", ".channel_wise", ".optimize",
    ".round_zero",
)  # fmt: skip
# Bits -> how many levels W_q holds in a number.
_PER_WORD: Final[Mapping[int, int]] = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}


@dataclass(frozen=True, slots=True)
class HqqFormat(PackedFormat):
    """group_size: -1 for a whole row."""

    bits: int
    group_size: int
    axis: int

    @property
    def label(self) -> str:
        return f"HQQ int{self.bits} {'per row' if self.group_size == -1 else f'g{self.group_size}'}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        num_groups = rows if self.group_size == -1 else rows * columns // self.group_size
        num_bytes = rows * columns * self.bits // 8 + 4 * num_groups
        return TensorInfo(name, NUMBERS, (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, _NEEDED, self.label)
        packed, scale = parts[".W_q"], parts[".scale"]
        _, width = matrix_shape(packed)
        num_rows, num_columns = matrix_shape(scale)
        if self.axis == 1:
            shape, of_scale = (num_rows, width if self.group_size == -1 else self.group_size), (num_rows, 1)
        else:
            shape, of_scale = (self.group_size, num_columns), (1, num_columns)
        per_word = _PER_WORD[self.bits]
        check_part(packed, ("I32",) if self.bits == 3 else ("U8",), (-(-shape[0] // per_word), shape[1]))
        check_part(scale, SCALE_DTYPES, of_scale)
        check_part(parts[".zero"], SCALE_DTYPES, of_scale)
        check_part(parts[".shape"], ("I64", "I32"), (2,))
        for suffix in _REPEATED:
            if suffix in parts:
                check_part(parts[suffix], ("I32", "I64", "U8"), (), (1,))
        return PackedWeight(f"{prefix}.weight", (1, shape[0] * shape[1]), NUMBERS, self, parts, is_flat=True)

    def resolved(self, weight: PackedWeight, get: GetTensor) -> PackedWeight:
        rows, columns = weight.part(".shape", get).tolist()
        if min(rows, columns) < 1 or rows * columns != weight.shape[1]:
            raise ModelLoadError(
                f"cannot load {weight.name}: its shape {[rows, columns]} does not fit its {weight.shape[1]} numbers\n"
                "  download the file again"
            )
        return replace(weight, shape=(rows, columns), is_flat=False)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        expected = (self.bits, self.group_size, self.axis)
        for suffix, value in zip(_REPEATED, expected, strict=True):
            if suffix in weight.parts and value != -1 and (found := int(weight.part(suffix, get).item())) != value:
                raise ModelLoadError(
                    f"its {suffix[1:]} is {found}, and config.json says {value}\n  download or copy both again"
                )
        scale, zero = weight.part(".scale", get).float(), weight.part(".zero", get).float()
        # Three bits: the last rows of words are not full.
        levels = self._levels(weight.part(".W_q", get))[: len(scale) if self.axis == 1 else self.group_size]
        numbers = (levels - zero) * scale
        if not bool(numbers.isfinite().all()):
            raise ModelLoadError("a number is infinite or NaN\n  download the file again")
        return numbers.view(weight.shape)

    def _levels(self, packed: Tensor) -> Tensor:
        """Return the levels [L, K], perhaps with more rows: the first ones have the highest bits."""
        import torch

        shifts = range(self.bits * (_PER_WORD[self.bits] - 1), -1, -self.bits)
        return torch.cat([packed >> shift & (1 << self.bits) - 1 for shift in shifts])


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of an HQQ checkpoint says. Raises ModelLoadError."""
    config = settings.child("quant_config")
    if config is None:
        raise settings.wrong("quant_config", "an object with weight_quant_params, or one for each kind of layer")
    whole = _format(config) if "weight_quant_params" in config else None
    formats = {tag: _format(of_tag) for tag, of_tag in settings.children("quant_config")} if whole is None else {}
    skipped = settings.texts("skip_modules") if "skip_modules" in settings else ("lm_head",)
    labels = ", ".join(dict.fromkeys(form.label for form in (*formats.values(), whole) if form is not None))
    return PackedRules(labels or "HQQ", _SUFFIXES, (".W_q",), _chooser(formats, whole, skipped), "skip_modules")


def _chooser(
    formats: Mapping[str, HqqFormat], whole: HqqFormat | None, skipped: tuple[str, ...]
) -> Callable[[str], HqqFormat | None]:
    """Return the function from a weight's prefix to its format, which its tag decides: "self_attn.k_proj"."""

    def format_of(prefix: str) -> HqqFormat | None:
        tag = ".".join(part for part in prefix.split(".") if part not in ("model", "layers") and not part.isdecimal())
        # transformers lets the entry of a tag win over skip_modules.
        return formats.get(tag, None if tag in skipped else whole)

    return format_of


def _format(settings: Settings) -> HqqFormat:
    """Return the format of an object with weight_quant_params. Raises ModelLoadError."""
    for name in ("scale_quant_params", "zero_quant_params"):
        if name in settings:
            raise settings.wrong(name, "null: quantized scales are not supported")
    weights = settings.child("weight_quant_params") or settings
    weights.demand("view_as_float", (False,))
    weights.demand("channel_wise", (True,))
    axis = weights.choice("axis", (0, 1), 1)
    size = weights.size("group_size") if "group_size" in weights else -1
    if size == -1 and axis == 0:
        raise weights.wrong("group_size", "a whole number above 0, with axis 0")
    return HqqFormat(weights.choice("nbits", tuple(_PER_WORD)), size, axis)
