"""torchao: tensors of several classes, which the headers of the files describe, since its version 0.15.

A weight M.weight is stored as M._weight_qdata, M._weight_scale and others. The metadata in a file's header have an
entry for each tensor, named like it: JSON with the name of its class (_type) and the class's attributes (_data), which
torchao_tensors.py reads. It, and not config.json, says how a weight is packed, since torchao looks at nothing else.

The `quant_type` of config.json is the configuration by which the weights were quantized, or one for each module
(FqnToConfig). Pagewick reads what weights need in memory from it, and whether they are symmetric.

Configurations also say how activations are rounded while the model runs, which Pagewick does in its own way.

Source: https://github.com/pytorch/ao (prototype/safetensors, core/config.py, quantization/quant_api.py) and
transformers (TorchAoConfig).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pagewick.weights.name_patterns import Place
from pagewick.weights.packed.adapted import FactoredFormat
from pagewick.weights.packed.compressed_tensors import IntegerFormat
from pagewick.weights.packed.fp4 import MODELOPT_NVFP4, Fp4Format
from pagewick.weights.packed.fp8 import Fp8Format, block_size
from pagewick.weights.packed.layout import PackedFormat, PackedRules, PackedWeight
from pagewick.weights.packed.settings import Settings, named
from pagewick.weights.packed.torchao_int4 import TorchaoInt4Format
from pagewick.weights.packed.torchao_tensors import (
    INTEGERS,
    MARKS,
    MXFP4,
    MXFP8,
    SUFFIXES,
    TorchaoTensors,
    check_names,
    unwrapped,
)
from pagewick.weights.stack_kinds import stacks_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

_DEFAULT: Final = "_default"
_TILED: Final = "tile_packed_to_4d"
# Tiles of 16 rows are for AMD's GPUs, and in another order.
_ROWS_OF_TILE: Final = 8
_MAPPINGS: Final = ("symmetric", "symmetric_no_clipping_err", "asymmetric")
# Configurations around that of weights; those of the first have factors for activations, too.
_WITH_FACTORS, _GPTQ = ("AWQConfig", "SmoothQuantConfig"), "GPTQConfig"


@dataclass(frozen=True, slots=True)
class TorchaoFormat(PackedFormat):
    """expected: the format by config.json; None if it says nothing about a weight. Headers decide which one it is."""

    expected: PackedFormat | None

    @property
    def label(self) -> str:
        return "torchao" if self.expected is None else self.expected.label

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        return (self.expected or Fp8Format(None)).planned(name, rows, columns)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        form = self.expected.inner if isinstance(self.expected, FactoredFormat) else self.expected
        is_symmetric = isinstance(form, IntegerFormat) and form.bits == 8 and form.is_symmetric
        return TorchaoTensors(prefix, parts).weight(is_symmetric=is_symmetric)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        raise NotImplementedError("a weight has the format that its header describes")


def read_rules(settings: Settings) -> PackedRules:
    """Return what the quantization_config of a torchao checkpoint says. Raises ModelLoadError."""
    quant_type = settings.child("quant_type")
    whole = None if quant_type is None else quant_type.child("default")
    if quant_type is None or whole is None:
        raise settings.wrong("quant_type", "an object with a configuration as default")
    formats, by_module = _by_module(whole)
    has_embeddings = settings.flag("include_input_output_embeddings", default=False)
    # Without a list, transformers leaves out the head.
    skipped = () if has_embeddings else ("lm_head",)
    is_left_out = named(settings.texts("modules_to_not_convert") if "modules_to_not_convert" in settings else skipped)

    def format_of(prefix: str) -> PackedFormat | None:
        found = None if is_left_out(prefix) else by_module(prefix)
        return None if found is None else TorchaoFormat(found)

    labels = ", ".join(dict.fromkeys(form.label for form in formats if form is not None))
    return PackedRules(
        f"{labels} of torchao".strip(),
        SUFFIXES,
        MARKS,
        format_of,
        by_tensors=lambda prefix: TorchaoFormat(by_module(prefix)),
        check_names=check_names,
    )


def _by_module(whole: Settings) -> tuple[list[PackedFormat | None], Callable[[str], PackedFormat | None]]:
    """Return the formats of a configuration, and the function from a weight's prefix to one. Raises ModelLoadError."""
    entries = _module_entries(whole)
    if entries is None:
        form = _format(whole)
        return [form], lambda _: form
    formats = {name: _module_format(entries, name) for name in entries.values}
    patterns = [
        (entries.pattern(name, f"(?:{name.removeprefix('re:')})$", Place.START), form)
        for name, form in formats.items() if name.startswith("re:")
    ]  # fmt: skip

    def format_of(prefix: str) -> PackedFormat | None:
        names = (f"{prefix}.weight", prefix, *stacks_of(prefix))
        for name in names:
            if name in formats:
                return formats[name]
        for matches, form in patterns:
            if any(matches(name) for name in names):
                return form
        return formats.get(_DEFAULT)

    return list(formats.values()), format_of


def _module_entries(config: Settings) -> Settings | None:
    """Return the configurations for modules; None for a configuration for all."""
    if config.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig", "AOPerModuleConfig"):
        return None
    data = config.child("_data")
    name = next((name for name in ("fqn_to_config", "module_fqn_to_config") if data and data.get(name)), None)
    entries = None if data is None or name is None else data.child(name)
    if entries is None:
        raise config.wrong("_data", "an object with configurations for modules, fqn_to_config")
    return entries


def _module_format(entries: Settings, name: str) -> PackedFormat | None:
    config = entries.child(name)
    return None if config is None else _format(config)


def _format(config: Settings) -> PackedFormat:
    """Return the format of a configuration's weights. Raises ModelLoadError."""
    kind = config.choice("_type", tuple(_CONFIGURATIONS))
    data = config.child("_data") or Settings({}, f"{config.path}._data")
    return _CONFIGURATIONS[kind](Settings({key: unwrapped(value) for key, value in data.values.items()}, data.path))


def _fp8(data: Settings) -> PackedFormat:
    # The second of two is for weights.
    found = data.get("granularity")
    found = found[-1] if isinstance(found, list) and found else found
    if isinstance(found, Mapping) and found.get("_type") == "PerBlock" and isinstance(found.get("_data"), Mapping):
        return Fp8Format(block_size(Settings(found["_data"], f"{data.path}.granularity"), "block_size"))
    return Fp8Format(None)


def _int8(data: Settings) -> PackedFormat:
    size = data.size("group_size") if "group_size" in data else _group_size(data, "granularity")
    return IntegerFormat(8, size, is_symmetric=True, is_packed=False)


def _intx(data: Settings) -> PackedFormat:
    bits = int(data.word("weight_dtype", INTEGERS, "int8").removeprefix("int"))
    data.demand("intx_packing_format", ("UNPACKED_TO_INT8", "unpacked_to_int8"))
    mapping, granularity = (
        next((name for name in (f"weight_{entry}", entry) if name in data), entry)
        for entry in ("mapping_type", "granularity")
    )
    is_symmetric = data.word(mapping, _MAPPINGS, "symmetric") != "asymmetric"
    return IntegerFormat(bits, _group_size(data, granularity), is_symmetric, is_packed=False)


def _int4(data: Settings) -> PackedFormat:
    layout = data.word("int4_packing_format", ("plain", _TILED), "plain")
    if layout == _TILED:
        data.demand("int4_tile_packed_ntile", (_ROWS_OF_TILE,))
    return TorchaoInt4Format(data.size("group_size", 128), is_tiled=layout == _TILED)


def _symmetric_int4(data: Settings) -> PackedFormat:
    # Preshuffled is the configuration's own default.
    data.word("int4_packing_format", ("plain",), "preshuffled")
    return TorchaoInt4Format(data.size("group_size", 128), has_zeros=False)


def _mx(data: Settings) -> PackedFormat:
    data.choice("block_size", (32,), 32)
    dtype = data.word("weight_dtype", ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"), "float8_e4m3fn")
    return MXFP4 if dtype == "float4_e2m1fn_x2" else MXFP8


def _nvfp4(data: Settings) -> Fp4Format:
    return MODELOPT_NVFP4


def _of_base(data: Settings) -> PackedFormat:
    """Return the format of the configuration within another one. Raises ModelLoadError."""
    base = data.child("base_config")
    if base is None:
        raise data.wrong("base_config", "a configuration")
    base.choice("_type", tuple(kind for kind in _CONFIGURATIONS if kind not in (*_WITH_FACTORS, _GPTQ)))
    return _format(base)


def _factored(data: Settings) -> PackedFormat:
    return FactoredFormat(_of_base(data))


def _group_size(data: Settings, name: str) -> int:
    """Return the columns that share a scale, by a granularity; -1 for a row, or the whole weight."""
    found: Any = data.get(name)
    if isinstance(found, list) and found:
        found = found[-1]
    if found is None:
        return -1
    inner = Settings(found, f"{data.path}.{name}") if isinstance(found, Mapping) else None
    if inner is None:
        raise data.wrong(name, "a granularity, or two")
    kind = inner.choice("_type", ("PerGroup", "PerAxis", "PerRow", "PerTensor"))
    entries = inner.child("_data")
    if kind != "PerGroup":
        return -1
    if entries is None:
        raise inner.wrong("_data", "an object with a group_size")
    return entries.size("group_size")


_CONFIGURATIONS: Final[Mapping[str, Callable[[Settings], PackedFormat]]] = {
    **dict.fromkeys(
        ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig",
         "Float8StaticActivationFloat8WeightConfig"), _fp8,
    ),
    **dict.fromkeys(
        ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig"),
        _int8,
    ),
    **dict.fromkeys(("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"), _intx),
    "Int4WeightOnlyConfig": _int4,
    "Float8DynamicActivationInt4WeightConfig": _symmetric_int4,
    "MXDynamicActivationMXWeightConfig": _mx,
    **dict.fromkeys(("NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4WeightOnlyConfig"), _nvfp4),
    **dict.fromkeys(_WITH_FACTORS, _factored),
    _GPTQ: _of_base,
}  # fmt: skip
