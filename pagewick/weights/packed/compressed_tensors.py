"""compressed-tensors, the format of llm-compressor: whole numbers and FP8 and FP4, in groups of layers.

For a weight of N rows and C columns with G groups of columns, and numbers of `bits` bits:

    .weight_packed      [N, C * bits / 32] int32, from the lowest bit on; signed numbers plus 2 ** (bits - 1). Words of
                        3 bits that old versions wrote hold ten numbers, and leave two bits unused: [N, C / 10]
    .weight             [N, C] int8 or E4M3, where it is not packed
    .weight_scale       [N, G], [N, 1] or one number
    .weight_zero_point  signed like the numbers; packed ones lie below each other: [N * bits / 32, G]
    .weight_g_idx       [C] int32: the group of each column (act-order)
    .weight_shape       N and C

Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.name_patterns import Place
from pagewick.weights.packed.fp4 import MXFP4, NVFP4
from pagewick.weights.packed.fp8 import ZERO_POINTS, Fp8Format, block_size, matrix_shape, scale_shapes
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings
from pagewick.weights.packed.sizes import SCALE_DTYPES, group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_MARKS: Final = (".weight_packed", ".weight_scale")
_SUFFIXES: Final = (
    ".weight", *_MARKS, ZERO_POINTS, ".weight_shape", ".weight_g_idx", ".weight_global_scale",
    ".input_scale", ".input_zero_point", ".input_global_scale",
)  # fmt: skip
_NO_ORDER: Final = "actorder in config.json is not group\n  set actorder to group there"
_PACKED_BITS: Final = (2, 3, 4, 8)
# Numbers of 3 bits in a word of old versions.
_LOOSE: Final = 10
_CLASSES: Final = ("Linear", "Embedding")
_CLASS_NAME: Final = re.compile(r"[A-Z][A-Za-z0-9]*")
_EMBEDDINGS: Final = ("embed_tokens", "tok_embeddings", "wte")


@dataclass(frozen=True, slots=True)
class IntegerFormat(PackedFormat):
    """Whole numbers. group_size: -1 for all columns; a scale may also be for the whole weight.

    is_packed: in words of 32 bits. has_order: with .weight_g_idx.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    is_packed: bool
    has_order: bool = False

    @property
    def label(self) -> str:
        return f"int{self.bits} {group_label(self.group_size)}{' act-order' * self.has_order}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        num_scales = rows * num_groups(columns, self.group_size)
        num_bytes = rows * columns * (self.bits if self.is_packed else 8) // 8 + 2 * num_scales
        kind = self._kind(columns, "BF16")
        return TensorInfo(name, kind, (rows, columns), num_bytes, label=self.label, has_column_order=self.has_order)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        values = ".weight_packed" if self.is_packed else ".weight"
        needed = (values, ".weight_scale", *(ZERO_POINTS,) * (not self.is_symmetric))
        demand_parts(prefix, parts, (*needed, *(".weight_g_idx",) * self.has_order), self.label)
        shape = matrix_shape(parts[values])
        if self.is_packed:
            check_part(parts[values], ("I32",), shape)
            shape = shape[0], self._columns(shape[1], parts[".weight_scale"].shape)
        else:
            check_part(parts[values], ("I8",), shape)
        scales = parts[".weight_scale"]
        check_part(scales, SCALE_DTYPES, *self._scale_shapes(shape))
        if ZERO_POINTS in parts:
            self._check_zeros(parts, shape)
        if ".weight_g_idx" in parts:
            check_part(parts[".weight_g_idx"], ("I32", "I64"), (shape[1],))
        if ".weight_shape" in parts:
            check_part(parts[".weight_shape"], ("I32", "I64"), (2,))
        return PackedWeight(f"{prefix}.weight", shape, self._kind(shape[1], scales.dtype), self, parts, self.has_order)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        from pagewick.weights.packed.integers import check_groups, encode

        self._check_shape(weight, get)
        stored = weight.part(".weight_packed" if self.is_packed else ".weight", get)
        order = self.column_order(weight, get) if self.has_order else None
        if order is None and ".weight_g_idx" in weight.parts:
            check_groups(weight.part(".weight_g_idx", get), self.group_size, _NO_ORDER)
        rows, columns = weight.shape
        groups = num_groups(columns, self.group_size)
        scales = weight.part(".weight_scale", get)
        scales = scales.view(-1, scales.shape[-1] if scales.ndim == 2 else 1).expand(rows, groups)
        offset = 1 << (self.bits - 1)

        def levels(first: int, end: int) -> Tensor:
            rows = stored[first:end]
            found = self._unpacked(weight, rows)[:, :columns] if self.is_packed else _levels(rows, self.bits)
            return found if order is None else found.index_select(1, order)

        zeros = self._zeros(weight, get, offset).expand(rows, groups)
        return encode(
            weight.stored_type,
            weight.shape,
            levels,
            scales,
            zeros,
            columns if self.group_size == -1 else self.group_size,
        )

    def column_order(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        import torch

        from pagewick.weights.packed.integers import order_of

        groups = weight.part(".weight_g_idx", get)
        if bool((groups == -1).any()):
            # The quantizer has not reordered this weight.
            return torch.arange(len(groups))
        return order_of(groups, self.group_size)

    def _zeros(self, weight: PackedWeight, get: GetTensor, offset: int) -> Tensor:
        """Return zero points of the levels 0 .. 2 ** bits - 1, [N, G] or of a shape that expands to it, int16."""
        import torch

        from pagewick.weights.packed.scaled_bytes import check_symmetric

        if ZERO_POINTS not in weight.parts:
            return torch.full((1, 1), offset, dtype=torch.int16)
        stored = weight.part(ZERO_POINTS, get)
        if stored.dtype == torch.int32:
            found = self._unpacked(weight, stored.t()).t()[: weight.shape[0]].short()
        else:
            found = stored.view(-1, stored.shape[-1] if stored.ndim == 2 else 1).short() + offset
        if self.is_symmetric:
            check_symmetric(found - offset)
        return found

    def _kind(self, columns: int, scale_dtype: str) -> str:
        if self.bits == 8 and not self.is_symmetric:
            return NUMBERS
        return stored_type_of(self.bits, columns, self.group_size, scale_dtype)

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        return scale_shapes(shape) if self.group_size == -1 else ((shape[0], num_groups(shape[1], self.group_size)),)

    def _columns(self, num_words: int, scales: tuple[int, ...]) -> int:
        """Return the columns that the words of a row hold. scales: their shape."""
        in_groups = self.group_size * scales[-1] if self.group_size > 0 and scales else 0
        is_loose = self.bits == 3 and num_words == -(-in_groups // _LOOSE)
        return in_groups if is_loose else num_words * 32 // self.bits

    def _is_loose(self, parts: Mapping[str, TensorInfo], columns: int) -> bool:
        """Whether words of 3 bits hold ten numbers each."""
        return self.bits == 3 and parts[".weight_packed"].shape[1] * 32 // 3 != columns

    def _unpacked(self, weight: PackedWeight, words: Tensor) -> Tensor:
        """Return the numbers in words [n, W], perhaps with more at the end: [n, m] uint8."""
        from pagewick.weights.packed.integers import unpack_loose, unpack_words

        is_loose = self._is_loose(weight.parts, weight.shape[1])
        return unpack_loose(words, self.bits) if is_loose else unpack_words(words, self.bits)

    def _check_zeros(self, parts: Mapping[str, TensorInfo], shape: tuple[int, int]) -> None:
        """Raise ModelLoadError unless the zero points are some for the scales."""
        zeros = parts[ZERO_POINTS]
        if self.is_packed and zeros.dtype == "I32":
            words = -(-shape[0] // _LOOSE) if self._is_loose(parts, shape[1]) else -(-shape[0] * self.bits // 32)
            check_part(zeros, ("I32",), (words, num_groups(shape[1], self.group_size)))
        else:
            check_part(zeros, ("I8",), parts[".weight_scale"].shape)

    def _check_shape(self, weight: PackedWeight, get: GetTensor) -> None:
        """Raise ModelLoadError if .weight_shape contradicts the other tensors."""
        if ".weight_shape" in weight.parts and (found := weight.part(".weight_shape", get).tolist()) != [*weight.shape]:
            raise ModelLoadError(
                f"its weight_shape is {found}, and its other tensors say {[*weight.shape]}\n  download the file again"
            )


def _levels(signed: Tensor, bits: int) -> Tensor:
    """Return the levels 0 .. 2 ** bits - 1 of signed numbers in bytes, uint8. Raises ModelLoadError for others."""
    found = signed.short() + (1 << bits - 1)
    if bits < 8 and bool((found >> bits).any()):
        raise ModelLoadError(f"a number does not fit {bits} bits\n  download the file again")
    return found.byte()


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of a compressed-tensors checkpoint says. Raises ModelLoadError."""
    _check_dense(settings)
    settings.word("quantization_status", ("compressed", "frozen"), "compressed")
    groups = [(group, _format(settings, group)) for _, group in settings.children("config_groups")]
    by_target = {target: (group, form) for group, form in groups for target in group.texts("targets")}
    # A group without weights may be of another class, whose activations are rounded, such as LlamaAttention.
    by_target = {target: found for target, found in by_target.items() if found[1] or not _is_other_class(target)}
    if not by_target:
        raise settings.wrong("config_groups", "groups of layers with their targets")
    is_left_out = _matcher(settings, "ignore", settings.texts("ignore"))
    # The more exact target counts: a name, then a regular expression, then a class.
    ordered = sorted(by_target, key=lambda target: (target in _CLASSES, target.startswith("re:"), target))
    choices = [(_matcher(by_target[target][0], "targets", (target,)), by_target[target][1]) for target in ordered]

    def format_of(prefix: str) -> PackedFormat | None:
        if is_left_out(prefix):
            return None
        return next((form for fits, form in choices if fits(prefix)), None)

    labels = dict.fromkeys(form.label for _, form in groups if form is not None)
    return PackedRules(f"{', '.join(labels)} of compressed-tensors", _SUFFIXES, _MARKS, format_of, "ignore")


def _check_dense(settings: Settings) -> None:
    """Raise ModelLoadError for sparse weights, and for transforms of activations."""
    if (sparsity := settings.child("sparsity_config")) is not None:
        sparsity.demand("format", ("dense",))
    for name in ("transform_config", "moe_sparsity_config"):
        found = settings.child(name)
        if found is not None and any(found.values.values()):
            raise settings.wrong(name, "empty: it is not supported")


def _format(settings: Settings, group: Settings) -> PackedFormat | None:
    """Return the format of a group of layers; None if their weights are not quantized. Raises ModelLoadError."""
    weights = group.child("weights")
    owner = group if "format" in group else settings
    name = owner.word("format", ("dense", *_READERS), "dense")
    if weights is None or name == "dense":
        return None
    weights.demand("dynamic", (False,))
    return _READERS[name](weights)


def _packed_integers(weights: Settings) -> PackedFormat:
    weights.word("type", ("int",), "int")
    bits = weights.choice("num_bits", _PACKED_BITS, 8)
    has_order = weights.get("actorder") not in (None, False, "weight", "static")
    if has_order:
        weights.word("actorder", ("group", "dynamic"))
    size = _group_size(weights)
    return IntegerFormat(
        bits, size, weights.flag("symmetric", default=True), is_packed=True, has_order=has_order and size > 0
    )


def _plain_bytes(weights: Settings) -> PackedFormat:
    """Return the format of numbers that have a byte each: whole numbers of up to 8 bits, or FP8."""
    if weights.word("type", ("int", "float"), "int") == "int":
        bits = weights.choice("num_bits", tuple(range(2, 9)), 8)
        return IntegerFormat(bits, _group_size(weights), weights.flag("symmetric", default=True), is_packed=False)
    weights.choice("num_bits", (8,), 8)
    weights.choice("symmetric", (True,), default=True)
    if _strategy(weights) == "block":
        return Fp8Format(block_size(weights, "block_structure"))
    size = _group_size(weights)
    return Fp8Format(None if size == -1 else (1, size))


def _fp4(form: PackedFormat, group_size: int) -> Callable[[Settings], PackedFormat]:
    def read(weights: Settings) -> PackedFormat:
        weights.word("type", ("float",))
        weights.choice("num_bits", (4,))
        weights.choice("group_size", (group_size,))
        weights.choice("symmetric", (True,), default=True)
        return form

    return read


def _mxfp8(weights: Settings) -> PackedFormat:
    weights.word("type", ("float",))
    weights.choice("num_bits", (8,))
    return Fp8Format((1, weights.choice("group_size", (32,))), has_byte_scales=True)


# The formats of whole checkpoints or groups of layers -> the reader of a group's `weights`.
_READERS: Final[Mapping[str, Callable[[Settings], PackedFormat]]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _plain_bytes,
    "float-quantized": _plain_bytes,
    "naive-quantized": _plain_bytes,
    "nvfp4-pack-quantized": _fp4(NVFP4, 16),
    "mxfp4-pack-quantized": _fp4(MXFP4, 32),
    "mxfp8-quantized": _mxfp8,
}


def _strategy(weights: Settings) -> str:
    """Return what shares a scale: group, channel, tensor or block; without an entry, the group size decides."""
    size = weights.get("group_size")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    return weights.word("strategy", ("group", "channel", "tensor", "block"), usual)


def _group_size(weights: Settings) -> int:
    """Return the number of columns that share a scale, -1 for all of them."""
    strategy = _strategy(weights)
    if strategy == "block":
        raise weights.wrong("strategy", "group, channel or tensor for such numbers")
    return weights.size("group_size") if strategy == "group" else -1


def _matcher(settings: Settings, entry: str, targets: Sequence[str]) -> Callable[[str], bool]:
    """Return whether one of the targets fits a weight's prefix: a name, re: and a regular expression, or a class."""
    patterns = [
        settings.pattern(entry, target.removeprefix("re:"), Place.START)
        for target in targets
        if target.startswith("re:")
    ]
    names = {target for target in targets if not target.startswith("re:")}
    if unknown := list(filter(_is_other_class, names)):
        raise settings.wrong(
            entry, f"names, regular expressions and the classes {', '.join(_CLASSES)}: not {unknown[0]}"
        )

    def fits(prefix: str) -> bool:
        kind = "Embedding" if prefix.rpartition(".")[2] in _EMBEDDINGS else "Linear"
        return prefix in names or kind in names or any(matches(prefix) for matches in patterns)

    return fits


def _is_other_class(target: str) -> bool:
    return bool(_CLASS_NAME.fullmatch(target)) and target not in _CLASSES
