"""Whether a checkpoint's tensors are those of its model, by their headers alone. Nothing is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pagewick.attention.native import NativeBackend
from pagewick.layers.context import LayerContext
from pagewick.models.registry import build_model, read_config
from pagewick.parallel.collectives import Collectives
from pagewick.quantization import method_chooser
from pagewick.weights.loader import check_weights
from pagewick.weights.safetensors import described_tensors
from pagewick.weights.tensor_headers import TensorInfo

# It computes nothing; any will do.
_BLOCK_SIZE = 32


def check_tensors(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> None:
    """Build the model of a config.json without memory and give it these tensors.

    Raises ModelLoadError for a tensor that is missing, unknown, or of another shape or kind than config.json asks for,
    and what reading the config raises.
    """
    model_config, found = read_config(config), described_tensors(tensors)
    context = LayerContext(
        dtype=torch.float32,
        device=torch.device("meta"),
        collectives=Collectives.single(),
        backend=NativeBackend(_BLOCK_SIZE, "float32"),
        choose_method=method_chooser(config, {name: tensor.dtype for name, tensor in found.items()}),
        max_model_len=model_config.max_position_embeddings,
    )
    check_weights(build_model(context, model_config, list(found)), found)
