"""One table: architecture name in config.json -> the class that runs it, imported when asked for, torch with it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from pagewick.errors import ModelLoadError

if TYPE_CHECKING:
    from pagewick.layers.context import LayerContext
    from pagewick.models.config import ModelConfig
    from pagewick.models.decoder import Decoder

ARCHITECTURES = {
    "LlamaForCausalLM": "pagewick.models.llama:Llama",
    "Qwen3ForCausalLM": "pagewick.models.qwen:Qwen3",
}


def check_architecture(architecture: str) -> None:
    """Raises ModelLoadError, naming what is supported, for an architecture that is not in the table."""
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(f"architecture {architecture} is not supported yet; supported: {', '.join(ARCHITECTURES)}")


def model_class(architecture: str) -> type[Decoder]:
    """Raises ModelLoadError for an architecture that is not in the table."""
    check_architecture(architecture)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return cast("type[Decoder]", getattr(importlib.import_module(module), name))


def build_model(context: LayerContext, config: ModelConfig) -> Decoder:
    """The model with uninitialised weights, this rank's share of it. Raises ModelLoadError."""
    return model_class(config.architecture)(context, config)
