"""Description: everything about a checkpoint but its weights, whatever its format. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagewick.errors import ModelNotFoundError
from pagewick.weights.dense_tensors import checkpoint_tensors
from pagewick.weights.files import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    GGUF_SUFFIX,
    read_json_object,
)
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.config import generation_config
from pagewick.weights.module_files import ModuleFiles
from pagewick.weights.packed.config import quant_method, read_config
from pagewick.weights.packed.headers import logical_tensors
from pagewick.weights.sentence_transformers import with_modules
from pagewick.weights.tensor_headers import TensorInfo, gguf_tensors, with_stored_dtype

GGUF: Final = "gguf"


@dataclass(frozen=True, slots=True)
class Description:
    """config: config.json, with the dtype of the weights. generation_config: empty if the authors recommend nothing.

    tensors: under Hugging Face's names, with logical shapes and the words of their format for how they are stored. A
    weight that is stored in several tensors is one.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def describe(path: Path, mmproj: str | None = None) -> Description:
    """Describe the checkpoint in a directory, or in a GGUF file, from its headers.

    mmproj: the GGUF file with the part that sees, for a GGUF file.
    Raises ModelNotFoundError if it is no checkpoint, ModelLoadError if its files cannot be used, ConfigError if its
    weights are quantized in a way that is not supported.
    """
    if is_gguf(path):
        checkpoint = open_gguf(path, mmproj)
        return Description(checkpoint.config, generation_config(checkpoint.values), tuple(gguf_tensors(checkpoint)))
    config, advice = read_configs(path)
    tensors = checkpoint_tensors(path, config)
    config = with_stored_dtype(config, tensors)
    return Description(config, advice, logical_tensors(config, tensors).tensors)


def read_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json of a checkpoint, or what a GGUF file has in their place.

    Raises as `describe` does.
    """
    if is_gguf(path):
        checkpoint = open_gguf(path)
        return checkpoint.config, generation_config(checkpoint.values)
    advice = path / GENERATION_CONFIG_NAME
    return directory_config(path), read_json_object(advice) if advice.exists() else {}


def directory_config(directory: Path) -> dict[str, Any]:
    """Return config.json of a directory, with what files beside it say about packed weights and about embeddings.

    Raises ModelNotFoundError if there is none, ModelLoadError if it is unusable.
    """
    check_is_model(directory)
    return with_modules(read_config(directory), ModuleFiles.of_directory(directory))


def check_is_model(directory: Path) -> None:
    """Raise ModelNotFoundError, which says what it is instead, for a directory without a config.json."""
    if not (directory / CONFIG_NAME).exists():
        raise ModelNotFoundError(_explain_no_config(directory))


def weights_kind(path: Path) -> str:
    """Return "gguf" for a GGUF file, or the quant_method in config.json; empty if the weights are not quantized.

    Raises as `read_configs` does.
    """
    return GGUF if is_gguf(path) else quant_method(read_configs(path)[0])


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file rather than a directory."""
    return path.suffix == GGUF_SUFFIX and path.is_file()


def _explain_no_config(directory: Path) -> str:
    """The message for a directory without config.json; it proposes a model in a directory below, if there is one."""
    if (directory / ADAPTER_CONFIG_NAME).is_file():
        return (
            f"{directory} holds a LoRA adapter, not a model\n"
            f"  give its model; pagewick serve, chat, complete and bench take the adapter with --lora {directory}"
        )
    inner = [*directory.glob(f"*/{CONFIG_NAME}"), *directory.glob(f"snapshots/*/{CONFIG_NAME}")]
    hint = (
        f"did you mean {inner[0].parent}?"
        if inner
        else "give a directory with config.json, tokenizer.json and *.safetensors, or a GGUF file"
    )
    return f"{directory} is not a model directory: it has no {CONFIG_NAME}\n  {hint}"
