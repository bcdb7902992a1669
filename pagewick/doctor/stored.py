"""The tensors that a checkpoint should hold, from its config.json alone: unquantized, or packed. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.models.tensors import model_tensors
from pagewick.weights.packed.config import packed_rules
from pagewick.weights.packed.layout import PackedRules
from pagewick.weights.tensor_headers import TensorInfo

_STORED: Final = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def described_tensors(model: ModelConfig, config: Mapping[str, Any]) -> list[TensorInfo]:
    """All tensors of a checkpoint of `model` with this config.json, as its headers would describe them.

    Raises ConfigError and ModelLoadError for a quantization that is not supported, or that cannot pack these weights.
    """
    rules = packed_rules(config)
    return [_described(tensor, rules, model.dtype) for tensor in model_tensors(model)]


def _described(tensor: ModelTensor, rules: PackedRules | None, dtype: str) -> TensorInfo:
    form = None
    if rules is not None and (tensor.is_linear or (tensor.role == "head" and len(tensor.shape) == 2)):
        form = rules.format_of(tensor.name.removesuffix(".weight"))
    if form is not None:
        return form.planned(tensor.name, *tensor.shape)
    name, num_bytes = _STORED[dtype]
    return TensorInfo(tensor.name, name, tensor.shape, math.prod(tensor.shape) * num_bytes)
