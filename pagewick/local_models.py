"""Turns the models that a config names into directories and files on this disk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_description
from pagewick.log import get_logger
from pagewick.number_formats import MARLIN
from pagewick.weights.description import GGUF, Description, describe, weights_kind
from pagewick.weights.hub import resolve_model, resolve_tokenizer
from pagewick.weights.packed.config import quant_method

logger = get_logger(__name__)


def with_local_models(config: EngineConfig, hf_token: str | bool | None = None) -> EngineConfig:
    """Replace the models that a config names by local directories; downloads those that are not on this disk.

    hf_token: in place of HF_TOKEN, if it is a text. Raises ModelLoadError, ConfigError.
    """
    token = hf_token if isinstance(hf_token, str) else None
    find = partial(resolve_model, hub=config.hub, token=token, check=check_description)

    def check(description: Description) -> None:
        # A GGUF file is described by its tensors, safetensors by config.json alone.
        kind = GGUF if description.tensors else quant_method(description.config)
        check_description(description, config.for_weights(kind).quantization)

    model = find(config.model, weight_file=config.weight_file, revision=config.revision, check=check)
    kind = "" if config.quantization is None else weights_kind(model)
    stored = {tensor.dtype for tensor in describe(model).tensors} if config.quantization == MARLIN else ()
    found = replace(config.for_weights(kind, stored), model=str(model), weight_file=None)
    if config.quantization == MARLIN:
        result = "the weights are quantized to it" if found.quantization else "the weights keep their levels"
        logger.info("Marlin's layout is for CUDA kernels; --quantization marlin is int4 here, and %s", result)
    if config.tokenizer is not None:
        found = replace(found, tokenizer=str(resolve_tokenizer(config.tokenizer, hub=config.hub, token=token)))
    if config.speculative_model is not None:
        found = replace(found, speculative_model=str(find(config.speculative_model)))
    return found
