"""NVIDIA's ModelOpt: FP8, MXFP8 and NVFP4, described by hf_quant_config.json or a quantization_config.

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
    "FP8_PB_WO": Fp8Format((128, 128)),
    "fp8_pb_wo": Fp8Format((128, 128)),
    "MXFP8": Fp8Format((1, 32), has_byte_scales=True),
    "NVFP4": MODELOPT_NVFP4,
    # Other engines round no activations with it; we never do.
    "W4A16_NVFP4": MODELOPT_NVFP4,
}
# Columns that share a scale, or of a block of rows and columns.
_GROUP_SIZES: Final = {"FP8_PB_WO": 128, "fp8_pb_wo": 128, "MXFP8": 32, "NVFP4": 16, "W4A16_NVFP4": 16}
_MIXED: Final = "MIXED_PRECISION"
_MARKS: Final = (".weight_scale", ".weight_scale_inv")
_SUFFIXES: Final = (".weight", *_MARKS, ".weight_scale_2", *INPUT_SCALES)


def from_side_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that hf_quant_config.json stands for. Raises ModelLoadError."""
    found = Settings(content, SIDE_FILE).child("quantization")
    if found is None:
        raise ModelLoadError(f"{SIDE_FILE} has no entry quantization\n  download or copy it again")
    return {"quant_method": "modelopt", **found.values}


def read_rules(settings: Settings) -> PackedRules:
    """Return what ModelOpt's entries say. Raises ModelLoadError."""
    # Some files have the whole content of hf_quant_config.json here.
    settings = settings.child("quantization") or settings
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
    if settings.get("quant_algo") != _MIXED:
        whole = _format(settings, (*_FORMATS, _MIXED))
        return lambda prefix: whole
    layers = {name: _format(layer, tuple(_FORMATS)) for name, layer in settings.children("quantized_layers")}

    def format_of(prefix: str) -> PackedFormat | None:
        # A module stands for all that it has, such as all experts of a layer.
        while prefix and prefix not in layers:
            prefix = prefix.rpartition(".")[0]
        return layers.get(prefix)

    return format_of


def _format(settings: Settings, known: Sequence[str]) -> PackedFormat:
    """Return the format of a layer, or of all. Raises ModelLoadError."""
    algorithm = settings.choice("quant_algo", known)
    settings.demand("group_size", (_GROUP_SIZES.get(algorithm), None, 0))
    return _FORMATS[algorithm]


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return whether a pattern such as "lm_head" or "model.layers.0.self_attn*" fits a weight's prefix."""
    is_named = named([pattern for pattern in patterns if "*" not in pattern])
    globs = [pattern for pattern in patterns if "*" in pattern]
    return lambda prefix: is_named(prefix) or any(fnmatchcase(prefix, pattern) for pattern in globs)
