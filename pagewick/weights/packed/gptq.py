"""GPTQ: whole numbers of 2, 3, 4 or 8 bits, for groups of columns that share a scale and a zero point.

For a weight of N rows and C columns with G groups of columns, and w = 32 / bits:

    .qweight [C / w, N] int32   a word holds w neighbouring columns of a row, from its lowest bits on
    .qzeros  [G, N / w] int32   zero points, likewise of neighbouring rows; in the format "gptq" one less is stored
    .scales  [G, N]             float16 as a rule
    .g_idx   [C] int32          the group of each column; with desc_act (act-order), groups are not neighbours

Source: https://github.com/AutoGPTQ/AutoGPTQ and https://github.com/ModelCloud/GPTQModel (dynamic, gptq_v2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings, named
from pagewick.weights.packed.sizes import SCALE_DTYPES, group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_SUFFIXES: Final = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS: Final = (2, 3, 4, 8)
# What differs between the parts of a checkpoint, with the names in `dynamic`.
_CHANGEABLE: Final = ("bits", "group_size", "sym", "desc_act")
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "pack_dtype": ("int32", "torch.int32"), "rotation": ("",), "adapter": (), "hyb_act": (False,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptqFormat(PackedFormat):
    """group_size: -1 for all columns. stored_less: what is missing from stored zero points, 1 in the format "gptq"."""

    bits: int
    group_size: int
    is_symmetric: bool
    has_order: bool
    stored_less: int = 1
    name: str = "GPTQ"

    @property
    def label(self) -> str:
        return f"{self.name} int{self.bits} {group_label(self.group_size)}{' act-order' * self.has_order}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        self._check_sizes(name, rows, columns)
        groups = num_groups(columns, self.group_size)
        num_bytes = (columns + groups) * rows * self.bits // 8 + 2 * groups * rows + 4 * columns
        kind = self._stored_type(columns, "F16")
        return TensorInfo(name, kind, (rows, columns), num_bytes, label=self.label, has_column_order=self._is_sorted)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        demand_parts(prefix, parts, (*_SUFFIXES[:3], *_SUFFIXES[3:] * self._is_sorted), self.label)
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

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        from pagewick.weights.packed.integers import check_groups, encode, unpack_words

        qweight, scales = weight.part(".qweight", get), weight.part(".scales", get)
        zeros = unpack_words(weight.part(".qzeros", get), self.bits).short() + self.stored_less
        order = self.column_order(weight, get) if self._is_sorted else None
        if order is None and ".g_idx" in weight.parts:
            check_groups(weight.part(".g_idx", get), self.group_size, "desc_act")

        def levels(first: int, end: int) -> Tensor:
            found = unpack_words(qweight[:, first:end].t(), self.bits)
            return found if order is None else found.index_select(1, order)

        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return encode(weight.stored_type, weight.shape, levels, scales.t(), zeros.t(), size)

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
        unit = 32 if self.bits == 3 else 32 // self.bits
        if rows % unit or columns % unit or not rows * columns:
            raise ModelLoadError(
                f"cannot load {name}: {rows} x {columns} numbers of {self.bits} bits are not packed by {unit}\n"
                "  quantization_config and the weights do not belong together; download or copy both again"
            )


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of a GPTQ checkpoint says. Raises ModelLoadError."""
    for entry, supported in _UNSUPPORTED.items():
        settings.demand(entry, supported)
    kind = "checkpoint_format" if "checkpoint_format" in settings else "format"
    stored_less = 1 if settings.word(kind, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
    whole = GptqFormat(
        settings.choice("bits", _BITS), settings.group_size(), settings.flag("sym", default=True),
        settings.flag("desc_act", default=False), stored_less,
    )  # fmt: skip
    return PackedRules(whole.label, _SUFFIXES, _SUFFIXES[:2], _chooser(settings, whole), "quantization_config")


def _chooser(settings: Settings, whole: GptqFormat) -> Callable[[str], GptqFormat | None]:
    """Return the function from a weight's prefix to its format: GPTQModel's `dynamic`, and the other rules."""
    changed, rules = dict(settings.children("dynamic")), settings.child("dynamic")
    patterns = [(_pattern(settings, key), key[:2], key) for key in (rules.values if rules is not None else ())]
    is_left_out = named(settings.texts("modules_to_not_convert"))
    inside = settings.get("modules_in_block_to_quantize")
    listed = named(_names_inside(settings, inside))
    has_head = settings.flag("lm_head", default=False)

    def format_of(prefix: str) -> GptqFormat | None:
        for pattern, sign, key in patterns:
            if pattern.match(prefix):
                return None if sign == "-:" else changed_format(whole, changed.get(key))
        if is_left_out(prefix):
            return None
        if prefix.rpartition(".")[2] == "lm_head":
            return whole if has_head else None
        return whole if inside is None or listed(prefix) else None

    return format_of


def changed_format(whole: GptqFormat, settings: Settings | None) -> GptqFormat:
    """Return the format with the entries that an object has for some weights. Raises ModelLoadError."""
    if settings is None:
        return whole
    return replace(
        whole,
        bits=settings.choice("bits", _BITS, whole.bits),
        group_size=settings.group_size(default=whole.group_size),
        is_symmetric=settings.flag("sym", default=whole.is_symmetric),
        has_order=settings.flag("desc_act", default=whole.has_order),
    )


def _pattern(settings: Settings, key: str) -> re.Pattern[str]:
    try:
        return re.compile(key[2:] if key[:2] in ("+:", "-:") else key)
    except re.error as error:
        raise settings.wrong("dynamic", f"regular expressions with rules: {key!r} is none ({error})") from None


def _names_inside(settings: Settings, inside: Any) -> list[str]:
    """Return the names in modules_in_block_to_quantize: a list of lists, or of names."""
    groups = inside if isinstance(inside, list) else [] if inside is None else [None]
    found = [name for group in groups for name in (group if isinstance(group, list) else [group])]
    if not all(isinstance(name, str) for name in found):
        raise settings.wrong("modules_in_block_to_quantize", "lists of names")
    return found
