"""NVIDIA's ModelOpt: FP8 and NVFP4, described by hf_quant_config.json or a quantization_config.

Source: https://github.com/NVIDIA/TensorRT-Model-Optimizer (modelopt/torch/export).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp4 import MODELOPT_NVFP4
from pagewick.weights.packed.fp8 import INPUT_SCALES, Fp8Format
from pagewick.weights.packed.layout import PackedFormat, PackedRules
from pagewick.weights.packed.settings import Settings, named

SIDE_FILE: Final = "hf_quant_config.json"

_FORMATS: Final[Mapping[str, PackedFormat]] = {
    "FP8": Fp8Format(None),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Format(None),
    "NVFP4": MODELOPT_NVFP4,
}
_MIXED: Final = "MIXED_PRECISION"
_GROUP_SIZE: Final = 16
_MARKS: Final = (".weight_scale",)
_SUFFIXES: Final = (".weight", *_MARKS, ".weight_scale_2", *INPUT_SCALES)


def from_side_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that hf_quant_config.json stands for. Raises ModelLoadError."""
    found = Settings(content, SIDE_FILE).child("quantization")
    if found is None:
        raise ModelLoadError(f"{SIDE_FILE} has no entry quantization\n  download or copy it again")
    return {"quant_method": "modelopt", **found.values}


def read_rules(settings: Settings) -> PackedRules:
    """Return what ModelOpt's entries say. Raises ModelLoadError."""
    settings.demand("group_size", (_GROUP_SIZE, None, 0))
    _check_kv_cache(settings)
    entry = "exclude_modules" if "exclude_modules" in settings else "ignore"
    is_left_out = _matcher(settings.texts(entry))
    format_of = _chooser(settings)
    label = f"{settings.get('quant_algo')} of ModelOpt"
    return PackedRules(
        label, _SUFFIXES, _MARKS, lambda prefix: None if is_left_out(prefix) else format_of(prefix), entry
    )


def _check_kv_cache(settings: Settings) -> None:
    """Raise ModelLoadError unless the constants for keys and values are FP8's.

    hf_quant_config.json names an algorithm. config.json has a scheme instead: an algorithm's name, or an object.
    """
    settings.demand("kv_cache_quant_algo", ("FP8",))
    if isinstance(settings.get("kv_cache_scheme"), str):
        settings.demand("kv_cache_scheme", ("FP8",))
    elif (scheme := settings.child("kv_cache_scheme")) is not None:
        scheme.demand("num_bits", (8,))


def _chooser(settings: Settings) -> Callable[[str], PackedFormat | None]:
    algorithm = settings.choice("quant_algo", (*_FORMATS, _MIXED))
    if algorithm != _MIXED:
        return lambda prefix: _FORMATS[algorithm]
    layers = {
        name: _FORMATS[layer.choice("quant_algo", tuple(_FORMATS))]
        for name, layer in settings.children("quantized_layers")
    }
    return layers.get


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return whether a pattern such as "lm_head" or "model.layers.0.self_attn*" fits a weight's prefix."""
    is_named = named([pattern for pattern in patterns if "*" not in pattern])
    globs = [pattern for pattern in patterns if "*" in pattern]
    return lambda prefix: is_named(prefix) or any(fnmatchcase(prefix, pattern) for pattern in globs)
