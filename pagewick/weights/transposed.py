"""Weights that lie transposed in a checkpoint, [in, out], where all others are [out, in]. Imports no torch.

The rest of the program sees all of them as [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from pagewick.errors import ConfigError
from pagewick.weights.files import name_some
from pagewick.weights.tensor_headers import TensorInfo

# Architecture in config.json -> its weights that lie like this. Packed ones, whose numbers are integers, do not.
_TRANSPOSED: Final[Mapping[str, re.Pattern[str]]] = {
    name: re.compile(r"(.*\.)?h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
    # ModelConfig calls the first by the name of the second.
    for name in ("GPT2LMHeadModel", "GPT2ForCausalLM", "GPT2Model", "GPT2ForSequenceClassification")
}
_FLOATS: Final = ("F64", "F32", "F16", "BF16")


def has_transposed(architecture: str) -> bool:
    """Return whether checkpoints of an architecture have weights that lie transposed."""
    return architecture in _TRANSPOSED


def transposed_names(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> frozenset[str]:
    """Return the names of the weights that lie transposed in the file. tensors: of the file."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    pattern = _TRANSPOSED.get(name) if isinstance(name, str) else None
    if pattern is None:
        return frozenset()
    lying = (one for one in tensors if one.dtype in _FLOATS and len(one.shape) == 2)
    return frozenset(one.name for one in lying if pattern.fullmatch(one.name))


def upright(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return the tensors of a file with the shapes in which the program sees them."""
    stored = list(tensors)
    lying = transposed_names(config, stored)
    return [replace(one, shape=one.shape[::-1]) if one.name in lying else one for one in stored]


def check_none_lies(config: Mapping[str, Any], tensors: Iterable[TensorInfo], kept: Iterable[str]) -> None:
    """Raise ConfigError if one of these names, which are to be written as they are, lies transposed."""
    lying = transposed_names(config, tensors).intersection(kept)
    if lying:
        raise ConfigError(
            f"{name_some(sorted(lying))}: the format cannot hold them, and they lie transposed in this checkpoint; "
            "such a mixture is not written\n  choose another format: --to"
        )
