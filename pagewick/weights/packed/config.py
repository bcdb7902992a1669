"""Reads from a config.json the rules by which its checkpoint packs weights. Imports no torch.

Some programs write the rules to a file of their own beside config.json (SIDE_FILES).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.weights.files import CONFIG_NAME, read_json_object
from pagewick.weights.packed import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    deepseek_v4,
    fp4,
    fp8,
    gptq,
    hqq,
    marlin,
    modelopt,
    quark,
    torchao,
)
from pagewick.weights.packed.layout import PackedRules
from pagewick.weights.packed.settings import Settings

_KEYS: Final = ("quantization_config", "compression_config")
_TEXT_CONFIG: Final = "text_config"
_DEEPSEEK_V4, _EXPERT_DTYPE = "deepseek_v4", "expert_dtype"
# quant_method -> the reader of its quantization_config.
_READERS: Final[Mapping[str, Callable[[Settings], PackedRules]]] = {
    "gptq": gptq.read_rules,
    "awq": awq.read_rules,
    "auto-round": auto_round.read_rules,
    "marlin": marlin.read_rules,
    "fp8": fp8.read_rules,
    "fbgemm-fp8": fp8.read_fbgemm_rules,
    "modelopt": modelopt.read_rules,
    "modelopt-fp4": modelopt.read_rules,
    "compressed-tensors": compressed_tensors.read_rules,
    "mxfp4": fp4.read_mxfp4_rules,
    "bitsandbytes": bitsandbytes.read_rules,
    "hqq": hqq.read_rules,
    "quark": quark.read_rules,
    "torchao": torchao.read_rules,
}
# MLX's entry, beside which newer versions write the same as a quantization_config; it names no method.
_MLX: Final = "quantization"
_OLD_NAMES: Final = {"intel/auto-round": "auto-round"}
# File that a program writes -> the function that turns its content into a quantization_config.
SIDE_FILES: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    modelopt.SIDE_FILE: modelopt.from_side_file,
    "quantize_config.json": lambda found: {"quant_method": "gptq", **found},
    "quant_config.json": lambda found: {"quant_method": "awq", **found},
}


def packed_rules(config: Mapping[str, Any]) -> PackedRules | None:
    """Return the rules of a checkpoint with this config.json; None if its weights are not packed.

    Raises ConfigError for a format that is not supported, ModelLoadError for wrong entries.
    """
    config = _holder(config)
    key = _key(config)
    if key is None:
        return None
    values, method = config[key], quant_method(config)
    reader = _READERS.get(method)
    if reader is None:
        bits = values.get("bits")
        named = f"{method}{f' ({bits} bits)' if bits else ''}"
        raise ConfigError(
            f"this checkpoint is quantized with {named}, which is not supported\n"
            f"  supported: {', '.join(_READERS)}, GGUF files, and unquantized checkpoints\n"
            "  use another checkpoint of this model"
        )
    if method == "fp8" and config.get("model_type") == _DEEPSEEK_V4:
        # Published files have this entry beside the others.
        dtype = {name: config[name] for name in (_EXPERT_DTYPE,) if config.get(name) is not None}
        return deepseek_v4.read_rules(Settings({**dtype, **values}, key))
    return reader(Settings(values, key))


def quant_method(config: Mapping[str, Any]) -> str:
    """Return the name of the method by which a config.json says that weights are quantized; empty if it says nothing.

    Raises ModelLoadError.
    """
    config = _holder(config)
    key = _key(config)
    if key is None:
        return ""
    if not isinstance(config[key], Mapping):
        raise ModelLoadError(f"{key} in config.json is no object\n  download or copy config.json again")
    method = config[key].get("quant_method")
    if method is None and any(config[key].get(name) is True for name in ("load_in_8bit", "load_in_4bit")):
        # Older versions of transformers wrote no name for it.
        return "bitsandbytes"
    if method is None and _is_of_mlx(config):
        return "mlx"
    if method is None and isinstance(config[key].get("quant_algo"), str):
        # Nor did older versions of ModelOpt.
        return "modelopt"
    if not isinstance(method, str) or not method:
        return "an unnamed method"
    name = method.lower().replace("_", "-")
    return _OLD_NAMES.get(name, name)


def packing_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config.json from which packed_rules reads."""
    config = _holder(config)
    return {key: config[key] for key in _KEYS if config.get(key) is not None}


def with_rules(config: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with these rules instead of its own."""
    kept = {name: value for name, value in config.items() if name not in _KEYS}
    if (holder := _holder(config)) is not config:
        kept[_TEXT_CONFIG] = {name: value for name, value in holder.items() if name not in _KEYS}
    return kept | {"quantization_config": dict(entries)}


def _holder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that says how weights are packed: config.json, or its text_config, as in files of Kimi K2.5."""
    text = config.get(_TEXT_CONFIG)
    if _key(config) is None and isinstance(text, Mapping) and _key(text) is not None:
        return text
    return config


def _key(config: Mapping[str, Any]) -> str | None:
    """Return the name of the entry that says how weights are packed; None if there is none."""
    key = next((key for key in _KEYS if config.get(key) is not None), _MLX if _is_of_mlx(config) else None)
    return None if key is None or _is_of_cache(config[key]) else key


def _is_of_mlx(config: Mapping[str, Any]) -> bool:
    entries = config.get(_MLX)
    return isinstance(entries, Mapping) and {"bits", "group_size"} <= entries.keys()


def _is_of_cache(entries: Any) -> bool:
    """Return whether a quantization_config has constants for an FP8 cache, and leaves all weights as they are."""
    if not isinstance(entries, Mapping):
        return False
    cache = entries.get("kv_cache_quant_algo") or entries.get("kv_cache_scheme")
    if cache != "FP8" and not (isinstance(cache, Mapping) and cache.get("num_bits") == 8):
        return False
    if entries.get("quant_method") == "modelopt":
        return entries.get("quant_algo") is None
    groups = entries.get("config_groups") or {}
    return (
        entries.get("quant_method") == "compressed-tensors"
        and isinstance(groups, Mapping)
        and all(isinstance(group, Mapping) and not group.get("weights") for group in groups.values())
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json in a directory; it gets the rules of a file beside it. Raises ModelLoadError."""
    names = [name for name in SIDE_FILES if (directory / name).exists()]
    return with_side_file(
        read_json_object(directory / CONFIG_NAME), names, lambda name: read_json_object(directory / name)
    )


def with_side_file(
    config: dict[str, Any], names: Collection[str], read: Callable[[str], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return config.json with the quantization_config that a file beside it holds, if it has none itself.

    names: of the files beside it. read: returns the content of one of them.
    """
    if _key(_holder(config)) is not None:
        return config
    found = next((name for name in SIDE_FILES if name in names), None)
    return config if found is None else {**config, "quantization_config": SIDE_FILES[found](read(found))}
