"""GPTQ: whole numbers of 2, 3, 4 or 8 bits, for groups of columns that share a scale and a zero point.

For a weight of N rows and C columns with G groups of columns, and w = 32 / bits:

    .qweight [C / w, N] int32   a word holds w neighbouring columns of a row, from its lowest bits on
    .qzeros  [G, N / w] int32   zero points, likewise of neighbouring rows; in the format "gptq" one less is stored
    .scales  [G, N]             float16 as a rule
    .g_idx   [C] int32          the group of each column; with desc_act (act-order), groups are not neighbours

Source: https://github.com/AutoGPTQ/AutoGPTQ and https://github.com/ModelCloud/GPTQModel (dynamic, gptq_v2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed import marlin
from pagewick.weights.packed.choice import choose_format, left_out_entry
from pagewick.weights.packed.integer_format import IntegerFormat, Integers
from pagewick.weights.packed.layout import NUMBERS, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings
from pagewick.weights.packed.sizes import SCALE_DTYPES, group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.quantization.calibrated.results import QuantizedLinear
    from pagewick.weights.packed.layout import GetTensor

SUFFIXES: Final = (".qweight", ".qzeros", ".scales", ".g_idx")
_NO_ORDER: Final = "desc_act in config.json is false\n  set desc_act to true there"
_BITS: Final = (2, 3, 4, 8)
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "pack_dtype": ("int32", "torch.int32"), "rotation": ("",), "adapter": (), "hyb_act": (False,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptqFormat(IntegerFormat):
    """group_size: -1 for all columns. stored_less: what is missing from stored zero points, 1 in the format "gptq"."""

    bits: int
    group_size: int
    is_symmetric: bool
    has_order: bool
    stored_less: int = 1
    method: str = "GPTQ"

    @property
    def label(self) -> str:
        return f"{self.method} int{self.bits} {group_label(self.group_size)}{' act-order' * self.has_order}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        self._check_sizes(name, rows, columns)
        groups = num_groups(columns, self.group_size)
        num_bytes = (columns + groups) * rows * self.bits // 8 + 2 * groups * rows + 4 * columns
        kind = self._stored_type(columns, "F16")
        return TensorInfo(name, kind, (rows, columns), num_bytes, label=self.label, has_column_order=self._is_sorted)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, (*SUFFIXES[:3], *SUFFIXES[3:] * self._is_sorted), self.label)
        qweight, scales = parts[".qweight"], parts[".scales"]
        if len(qweight.shape) != 2 or len(scales.shape) != 2:
            raise ModelLoadError(f"cannot load {qweight.name}: it and its scales must have two dimensions")
        columns, rows = qweight.shape[0] * 32 // self.bits, qweight.shape[1]
        self._check_sizes(qweight.name, rows, columns)
        groups = num_groups(columns, self.group_size)
        check_part(qweight, ("I32",), (columns * self.bits // 32, rows))
        check_part(parts[".qzeros"], ("I32",), (groups, rows * self.bits // 32))
        check_part(scales, SCALE_DTYPES, (groups, rows))
        if ".g_idx" in parts:
            check_part(parts[".g_idx"], ("I32", "I64"), (columns,))
        kind = self._stored_type(columns, scales.dtype)
        return PackedWeight(f"{prefix}.weight", (rows, columns), kind, self, parts, self._is_sorted)

    @property
    def num_bits(self) -> int:
        return self.bits

    def integers(self, weight: PackedWeight, get: GetTensor) -> Integers:
        from pagewick.weights.packed.integers import check_groups, unpack_words

        qweight, scales = weight.part(".qweight", get), weight.part(".scales", get)
        zeros = unpack_words(weight.part(".qzeros", get), self.bits).short() + self.stored_less
        order = self.column_order(weight, get) if self._is_sorted else None
        if order is None and ".g_idx" in weight.parts:
            check_groups(weight.part(".g_idx", get), self.group_size, _NO_ORDER)

        def levels(first: int, end: int) -> Tensor:
            found = unpack_words(qweight[:, first:end].t(), self.bits)
            return found if order is None else found.index_select(1, order)

        return Integers(levels, scales.t(), zeros.t(), self.group_size)

    def pack(self, linear: QuantizedLinear) -> dict[str, Tensor]:
        from pagewick.weights.packed.integers import groups_of, pack_words, zero_points

        self.check(linear, has_order=self._is_sorted)
        stored = zero_points(linear.zeros, linear.scales, self.bits).t() - self.stored_less
        if int(stored.min()) < 0 or int(stored.max()) >> self.bits:
            raise self.refused(linear, f"a zero point is {int(stored.min()) + self.stored_less}")
        groups = linear.group_of_column
        if groups is None:
            groups = groups_of(linear.levels.shape[1], self.group_size)
        return {
            ".qweight": pack_words(linear.levels, self.bits).t().contiguous(),
            ".qzeros": pack_words(stored.byte(), self.bits),
            ".scales": linear.scales.t().contiguous(),
            ".g_idx": groups.int(),
        }

    def entries(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group_size, "sym": self.is_symmetric,
            "desc_act": self.has_order, "checkpoint_format": "gptq" if self.stored_less else "gptq_v2",
            "pack_dtype": "int32", "lm_head": False, **left_out_entry(left_out),
        }  # fmt: skip

    def misfit(self, rows: int, columns: int) -> str:
        unit = 32 if self.bits == 3 else 32 // self.bits
        fits = rows * columns and not rows % unit and not columns % unit
        return "" if fits else f"{rows} x {columns} numbers of {self.bits} bits are not packed by {unit}"

    def column_order(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        from pagewick.weights.packed.integers import order_of

        return order_of(weight.part(".g_idx", get), self.group_size)

    @property
    def _is_sorted(self) -> bool:
        return self.has_order and self.group_size != -1

    def _stored_type(self, columns: int, scale_dtype: str) -> str:
        if self.bits == 8 and not self.is_symmetric:
            return NUMBERS
        return stored_type_of(self.bits, columns, self.group_size, scale_dtype)

    def _check_sizes(self, name: str, rows: int, columns: int) -> None:
        """Raise ModelLoadError if words cannot hold a weight of this size."""
        if reason := self.misfit(rows, columns):
            raise ModelLoadError(
                f"cannot load {name}: {reason}\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of a GPTQ checkpoint says. Raises ModelLoadError."""
    for entry, supported in _UNSUPPORTED.items():
        settings.demand(entry, supported)
    kind = "checkpoint_format" if "checkpoint_format" in settings else "format"
    layout = settings.word(kind, ("gptq", "gptq_v2", "marlin"), "gptq")
    if layout == "marlin" or settings.flag("is_marlin_format", default=False):
        return marlin.read_rules(settings)
    whole = GptqFormat(
        settings.choice("bits", _BITS), settings.group_size(), settings.flag("sym", default=True),
        settings.flag("desc_act", default=False), 1 if layout == "gptq" else 0,
    )  # fmt: skip
    return PackedRules(whole.label, SUFFIXES, SUFFIXES[:2], choose_format(settings, whole, changed), "a rule")


def changed(whole: GptqFormat, settings: Settings) -> GptqFormat:
    """Return the format with the entries that an object has for some weights. Raises ModelLoadError."""
    return replace(
        whole,
        bits=settings.choice("bits", _BITS, whole.bits),
        group_size=settings.group_size(default=whole.group_size),
        is_symmetric=settings.flag("sym", default=whole.is_symmetric),
        has_order=settings.flag("desc_act", default=whole.has_order),
    )
