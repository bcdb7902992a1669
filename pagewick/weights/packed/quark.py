"""AMD's Quark: FP8, MXFP4 and whole numbers, described by a quantization_config.

For a weight of N rows and C columns with G groups of columns, by the `dtype` and `qscheme` of the configuration:

    fp8_e4m3             .weight [N, C], .weight_scale: one number, [N], or [N / n, C / c] for blocks of n x c
    fp4                  .weight [N, C / 2] bytes of two numbers, the lower half first; .weight_scale [N, C / 32]
                         exponents (MXFP4)
    int8                 .weight [N, C], .weight_scale and perhaps .weight_zero_point: one number, or [N]
    int4, uint4          .weight [C, N / 8] int32, a word holds eight neighbouring rows of a column; .weight_scale
                         [G, N]; .weight_zero_point [G, N / 8] int32, packed likewise. With pack_method "reorder" a word
                         holds the rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bit on, with "order" they are in order.
                         int4 is in two's complement

Scales of activations (.input_scale, .output_scale) are not needed, because Pagewick does not round activations to these
types; those of the outputs of k_proj and v_proj are for an FP8 cache.

Source: https://github.com/amd/Quark (quark/torch/utils/pack.py, quark/torch/quantization/config).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from pagewick.weights.name_patterns import Place
from pagewick.weights.packed.compressed_tensors import IntegerFormat
from pagewick.weights.packed.fp4 import Fp4Format
from pagewick.weights.packed.fp8 import ZERO_POINTS, Fp8Format, block_size, matrix_shape
from pagewick.weights.packed.layout import PackedFormat, PackedRules, PackedWeight, check_part, demand_parts
from pagewick.weights.packed.settings import Settings
from pagewick.weights.packed.sizes import SCALE_DTYPES, group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_MARKS: Final = (".weight_scale",)
_SUFFIXES: Final = (
    ".weight", *_MARKS, ZERO_POINTS, ".input_scale", ".input_zero_point", ".output_zero_point",
)  # fmt: skip
_MXFP4: Final = Fp4Format("MXFP4", ".weight", 32, ("U8", "F8_E8M0"))
_WORD: Final = 8
_ROWS_IN_WORD: Final = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": tuple(range(_WORD))}
# Algorithms that leave nothing for the engine to do; a rotation may.
_ALGORITHMS: Final = ("smooth", "autosmoothquant", "awq", "gptq", "gptaq", "autoround", "qronos", "rotation")
_ONLINE_ROTATIONS: Final = ("r3", "r4", "online_r1_rotation")


@dataclass(frozen=True, slots=True)
class QuarkInt4Format(PackedFormat):
    """Numbers of 4 bits in groups of columns. rows_in_word: which rows a word holds, from the lowest bit on."""

    group_size: int
    is_signed: bool
    rows_in_word: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"Quark int4 {group_label(self.group_size)}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        num_bytes = rows * columns // 2 + num_groups(columns, self.group_size) * rows * 5 // 2
        return TensorInfo(name, self._kind(columns), (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        needed = (".weight", ".weight_scale", *(ZERO_POINTS,) * (not self.is_signed))
        demand_parts(prefix, parts, needed, self.label)
        columns, words = matrix_shape(parts[".weight"])
        rows, groups = words * _WORD, num_groups(columns, self.group_size)
        check_part(parts[".weight"], ("I32",), (columns, words))
        check_part(parts[".weight_scale"], SCALE_DTYPES, (groups, rows))
        if ZERO_POINTS in parts:
            check_part(parts[ZERO_POINTS], ("I32",), (groups, words))
        return PackedWeight(f"{prefix}.weight", (rows, columns), self._kind(columns), self, parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        import torch

        from pagewick.weights.packed.integers import encode, levels_in_rows, unpack_rows

        scales = weight.part(".weight_scale", get).t()
        stored = levels_in_rows(weight.part(".weight", get), self.rows_in_word)
        # The lowest signed number, -8, becomes the level 0.
        lowest = 8 if self.is_signed else 0
        zeros = torch.full(scales.shape, lowest, dtype=torch.int16)
        if ZERO_POINTS in weight.parts:
            zeros = (unpack_rows(weight.part(ZERO_POINTS, get), self.rows_in_word) ^ lowest).short()
        return encode(
            weight.stored_type,
            weight.shape,
            lambda first, end: stored(first, end) ^ lowest,
            scales,
            zeros,
            self.group_size,
        )

    def _kind(self, columns: int) -> str:
        return stored_type_of(4, columns, self.group_size, "F16")


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of a Quark checkpoint says. Raises ModelLoadError."""
    export = settings.child("export") or Settings({}, f"{settings.path}.export")
    export.demand("weight_format", ("real_quantized",))
    order = _ROWS_IN_WORD[export.word("pack_method", tuple(_ROWS_IN_WORD), "reorder")]
    _check_algorithms(settings)
    for name in ("layer_type_quant_config", "online_rotation_layers"):
        if settings.get(name):
            raise settings.wrong(name, "empty: it is not supported")
    whole = _format(settings.child("global_quant_config"), order)
    layers = [
        (_matcher(settings, "layer_quant_config", name), _format(layer, order))
        for name, layer in settings.children("layer_quant_config")
    ]
    left_out = [_matcher(settings, "exclude", name) for name in settings.texts("exclude")]

    def format_of(prefix: str) -> PackedFormat | None:
        if any(matches(prefix) for matches in left_out):
            return None
        return next((form for matches, form in layers if matches(prefix)), whole)

    labels = dict.fromkeys(form.label for form in (whole, *(form for _, form in layers)) if form is not None)
    return PackedRules(f"{', '.join(labels)} of Quark", _SUFFIXES, _MARKS, format_of, "exclude")


def _check_algorithms(settings: Settings) -> None:
    """Raise ModelLoadError for an algorithm that changes activations while the model runs."""
    found = settings.get("algo_config")
    for entries in found if isinstance(found, list) else [] if found is None else [found]:
        if not isinstance(entries, Mapping):
            raise settings.wrong("algo_config", "a list of objects")
        algorithm = Settings(entries, f"{settings.path}.algo_config")
        algorithm.choice("name", _ALGORITHMS)
        for name in _ONLINE_ROTATIONS:
            algorithm.demand(name, (False,))


def _format(layer: Settings | None, order: tuple[int, ...]) -> PackedFormat | None:
    """Return the format of a layer's weights; None if they are not quantized. Raises ModelLoadError."""
    spec = None if layer is None else layer.child("weight")
    if spec is None:
        return None
    spec.demand("is_dynamic", (False,))
    dtype = spec.word("dtype", ("fp8_e4m3", "fp4", "int8", "int4", "uint4"))
    return _READERS[dtype](spec, order)


def _fp8(spec: Settings, order: tuple[int, ...]) -> PackedFormat:
    scheme = spec.word("qscheme", ("per_tensor", "per_channel", "per_block"))
    if scheme == "per_block":
        return Fp8Format(block_size(spec, "block_size"))
    _check_axis(spec, scheme, 0)
    return Fp8Format(None)


def _mxfp4(spec: Settings, order: tuple[int, ...]) -> PackedFormat:
    spec.word("qscheme", ("per_group",))
    spec.choice("group_size", (_MXFP4.group_size,))
    spec.word("scale_format", ("e8m0",))
    return _MXFP4


def _int8(spec: Settings, order: tuple[int, ...]) -> PackedFormat:
    scheme = spec.word("qscheme", ("per_tensor", "per_channel"))
    _check_axis(spec, scheme, 0)
    return IntegerFormat(8, -1, spec.flag("symmetric", default=True), is_packed=False)


def _int4(spec: Settings, order: tuple[int, ...]) -> PackedFormat:
    scheme = spec.word("qscheme", ("per_group",))
    _check_axis(spec, scheme, 1, -1)
    spec.demand("zero_point_type", ("int32",))
    return QuarkInt4Format(spec.size("group_size"), spec.get("dtype").lower() == "int4", order)


def _check_axis(spec: Settings, scheme: str, *axes: int) -> None:
    if scheme != "per_tensor":
        spec.demand("ch_axis", axes)


_READERS: Final[Mapping[str, Callable[[Settings, tuple[int, ...]], PackedFormat]]] = {
    "fp8_e4m3": _fp8,
    "fp4": _mxfp4,
    "int8": _int8,
    "int4": _int4,
    "uint4": _int4,
}


def _matcher(settings: Settings, entry: str, pattern: str) -> Callable[[str], bool]:
    """Return whether a pattern fits a module's name: a name, perhaps with wildcards, or re: and an expression."""
    if pattern.startswith("re:"):
        return settings.pattern(entry, pattern.removeprefix("re:"), Place.START)
    return lambda prefix: fnmatchcase(prefix, pattern)
