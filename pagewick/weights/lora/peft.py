"""Reads adapters of PEFT: adapter_config.json and adapter_model.safetensors in a directory.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. The scale is alpha / r, or alpha / sqrt(r) with
use_rslora (https://arxiv.org/abs/2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.weights.files import name_some, read_json_object
from pagewick.weights.lora.adapter import Adapter, digest_of, paired
from pagewick.weights.lora.finding import CONFIG_NAME, WEIGHTS_NAME
from pagewick.weights.name_patterns import Matches, PatternError, Place, matcher_of

_PICKLE_NAME: Final = "adapter_model.bin"

# base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight; a state dict has the adapter's name before `.weight`.
_FACTOR: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.\w+)?\.weight")
# Entries that change what an adapter computes, with the only values that are supported; None, false and empty ones are.
_UNSUPPORTED: Final = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "trainable_token_indices",
    "target_parameters", "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip
# PEFT sets this entry by itself if the base model's weights lie transposed. It does not change how the factors lie.
_TRANSPOSED: Final = "fan_in_fan_out"
# Published ones are below 10,000, and products with larger ones leave the range of numbers in 16 bits.
_MAX_ALPHA: Final = 2**24
# These ways of making the first factors change the base model, too, unless the adapter is converted when it is saved.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


def read_peft(directory: Path, *, is_transposed: bool = False) -> Adapter:
    """Read the adapter in a directory. Raises ModelLoadError, which names what is missing or not supported.

    is_transposed: whether the base model's checkpoints have transposed weights.
    """
    config = _read_config(directory, is_transposed=is_transposed)
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    with _open(directory) as file:
        for name, match in _factors(file, directory):
            (a if match["factor"] == "A" else b)[match["module"]] = file.get_tensor(name)
    alphas = _alphas(config, directory)
    scales = {name: _scale(name, factor, config, alphas, directory) for name, factor in a.items()}
    digest = digest_of((directory / CONFIG_NAME, directory / WEIGHTS_NAME))
    return Adapter(paired(str(directory), a, b, scales), digest)


def peft_rank(directory: Path) -> int:
    """Return the largest rank of the adapter in a directory. Raises ModelLoadError."""
    # The base model is not known yet. `read_peft` refuses an adapter that does not suit it.
    _read_config(directory, is_transposed=True)
    with _open(directory) as file:
        names = [name for name, match in _factors(file, directory) if match["factor"] == "A"]
        return max((shape[0] for name in names if (shape := file.get_slice(name).get_shape())), default=1)


def _factors(file: Any, directory: Path) -> list[tuple[str, re.Match[str]]]:
    """Return the names of the factors in a file, taken apart. Raises ModelLoadError if there is anything else."""
    found = {name: _FACTOR.fullmatch(name) for name in file.keys()}  # noqa: SIM118
    if other := sorted(name for name, match in found.items() if match is None):
        raise ModelLoadError(
            f"{directory} has tensors beside the factors lora_A and lora_B: {name_some(other)}\n"
            "  only adapters of linear layers are supported; merge this one into its model"
        )
    return [(name, match) for name, match in found.items() if match is not None]


def _read_config(directory: Path, *, is_transposed: bool) -> Mapping[str, Any]:
    if not (directory / CONFIG_NAME).is_file():
        raise ModelLoadError(
            f"{directory} holds no LoRA adapter: it has no {CONFIG_NAME}\n"
            "  give the directory that PEFT's save_pretrained wrote, a GGUF file, or an id on a hub"
        )
    config = read_json_object(directory / CONFIG_NAME)
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelLoadError(f"{directory} holds an adapter of the type {kind}; only LORA is supported")
    wrong = [name for name in _UNSUPPORTED if config.get(name)]
    wrong += [_TRANSPOSED] * bool(config.get(_TRANSPOSED) and not is_transposed)
    wrong += ["bias"] * (config.get("bias", "none") != "none")
    if wrong:
        raise ModelLoadError(
            f"{directory} is an adapter with {name_some(wrong)} ({CONFIG_NAME}), which is not supported\n"
            "  merge it into its model with PEFT's merge_and_unload"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise ModelLoadError(
            f"{directory} was trained with init_lora_weights={start!r}, which changes the base model, too\n"
            "  save it with path_initial_model_for_weight_conversion, or merge it into its model"
        )
    return config


def _alphas(config: Mapping[str, Any], directory: Path) -> list[tuple[str, Matches, Any]]:
    """Return alpha_pattern: names, or ends of names, as regular expressions, how each matches, and the alphas."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ModelLoadError(f"alpha_pattern in {directory / CONFIG_NAME} is {patterns!r}; it must be an object")
    found = []
    for pattern, alpha in patterns.items():
        with _naming(pattern, directory):
            found.append((pattern, matcher_of(pattern, Place.END), alpha))
    return found


@contextmanager
def _naming(pattern: str, directory: Path) -> Iterator[None]:
    """Name the expression of alpha_pattern in errors about it."""
    try:
        yield
    except PatternError as error:
        raise ModelLoadError(
            f"{directory}: {pattern[:200]!r} in alpha_pattern {error}\n  give the names of the modules there"
        ) from error


def _scale(
    name: str,
    a: Tensor,
    config: Mapping[str, Any],
    alphas: Sequence[tuple[str, Matches, Any]],
    directory: Path,
) -> float:
    """Return the factor of B A for a weight. The first expression that matches its name says the alpha."""
    entry, alpha = "lora_alpha", config.get("lora_alpha")
    for pattern, matches, value in alphas:
        with _naming(pattern, directory):
            if matches(name):
                entry, alpha = f"alpha_pattern[{pattern[:200]!r}]", value
                break
    # nan fails the comparison, too.
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
        raise ModelLoadError(
            f"{entry} in {directory / CONFIG_NAME} is {f'{alpha!r}'[:80]}; it must be a number of at most {_MAX_ALPHA}"
        )
    rank = max(1, a.shape[0] if a.ndim else 1)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


@contextmanager
def _open(directory: Path) -> Iterator[Any]:
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise ModelLoadError(_explain_no_weights(directory))
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged ({error})\n  download or copy it again") from error


def _explain_no_weights(directory: Path) -> str:
    if (directory / _PICKLE_NAME).exists():
        return (
            f"{directory} has its factors in {_PICKLE_NAME}, a pickle; reading it would run code out of it\n"
            "  save one that you trust again with PEFT's save_pretrained"
        )
    return f"{directory} has no {WEIGHTS_NAME}\n  download or copy the adapter again"
