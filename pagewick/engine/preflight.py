"""What can be known of a model before torch is imported, which takes seconds: mistakes are told at once.

Nothing is decided here that is decided elsewhere: those who load the model are asked, as far as that needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.errors import ConfigError, ModelNotFoundError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.parallel.sharding import check_tensor_parallel
from pagewick.quantization import check_supported
from pagewick.weights.files import CONFIG_NAME, read_json_object
from pagewick.weights.tensor_headers import TensorInfo, directory_tensors

_FLOAT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS: Final = ("F64", "F32", "BF16", "F16")
_LINEAR: Final = "_proj"


def check_models(config: EngineConfig) -> None:
    """Look at the description and the headers of the models in the directories that `config` names.

    Raises ConfigError and ModelLoadError.
    """
    model = _check_model(Path(config.model))
    check_tensor_parallel(model.num_heads, config.tensor_parallel_size)
    config.check_max_model_len(model.max_position_embeddings)
    if config.speculative_model is not None:
        check_vocabulary(_check_model(Path(config.speculative_model)), model)
        check_same_tokens(Path(config.speculative_model), Path(config.model))


def check_memory(config: EngineConfig, device: str, num_sharers: int) -> None:
    """Whether the weights of the models fit into the memory that `device` has free, cut into shares by some ranks.

    num_sharers: ranks that share one memory. Raises ConfigError with both numbers.
    """
    needed = sum(
        weight_bytes(directory_tensors(Path(name)), _dtype_of(config, Path(name)))
        for name in (config.model, config.speculative_model)
        if name is not None
    )
    per_memory = needed * num_sharers // config.tensor_parallel_size
    free = available_memory(device)
    if per_memory > free:
        raise ConfigError(
            f"not enough memory: the weights take {_gib(per_memory)}, and {_gib(free)} are free on {device}\n"
            f"  close other programs, or use a smaller model; pagewick doctor {config.model} says what it needs"
        )


def weight_bytes(tensors: Collection[TensorInfo], dtype: str) -> int:
    """What the tensors take as floating-point numbers of `dtype`; those that are none stay as they are stored."""
    return sum(
        tensor.num_elements * _FLOAT_BYTES[dtype] if tensor.dtype in _FLOATS else tensor.num_bytes for tensor in tensors
    )


def _check_model(directory: Path) -> ModelConfig:
    config_file = directory / CONFIG_NAME
    if not config_file.exists():
        raise ModelNotFoundError(_explain_no_config(directory))
    config = read_json_object(config_file)
    model = read_config(config)
    names = frozenset(tensor.name for tensor in directory_tensors(directory))
    layers = {name.rpartition(".")[0] for name in names if _LINEAR in name}
    for prefix in sorted(layers) or [""]:
        check_supported(config, prefix, names)
    return model


def _explain_no_config(directory: Path) -> str:
    """With the model that may have been meant: a directory below, as in a hub's cache."""
    inner = [*directory.glob(f"*/{CONFIG_NAME}"), *directory.glob(f"snapshots/*/{CONFIG_NAME}")]
    hint = (
        f"did you mean {inner[0].parent}?"
        if inner
        else "give a directory with config.json, tokenizer.json and *.safetensors, as Hugging Face has them"
    )
    return f"{directory} is no model: it has no {CONFIG_NAME}\n  {hint}"


def _dtype_of(config: EngineConfig, directory: Path) -> str:
    if config.dtype != "auto":
        return config.dtype
    return read_config(read_json_object(directory / CONFIG_NAME)).dtype


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
