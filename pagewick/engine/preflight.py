"""What can be known of a model before torch is imported, which takes seconds: mistakes are told at once.

Nothing is decided here that is decided elsewhere: those who load the model are asked, as far as that needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.errors import ConfigError, ModelNotFoundError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.parallel.sharding import check_tensor_parallel
from pagewick.quantization import check_supported
from pagewick.weights.files import CONFIG_NAME, read_json_object
from pagewick.weights.tensor_headers import TensorInfo, directory_tensors, with_stored_dtype

_FLOAT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS: Final = ("F64", "F32", "BF16", "F16")
_LINEAR: Final = "_proj"
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")


def check_models(config: EngineConfig) -> None:
    """Look at the description and the headers of the models in the directories that `config` names.

    Raises ConfigError and ModelLoadError.
    """
    model = _check_model(Path(config.model), rope_scaling=config.rope_scaling, rope_theta=config.rope_theta)
    check_tensor_parallel(model.num_heads, config.tensor_parallel_size)
    model.check_expert_offload(config.num_experts_offload_per_rank, config.tensor_parallel_size)
    config.check_max_model_len(model.longest_context)
    if config.speculative_model is not None:
        check_vocabulary(_check_model(Path(config.speculative_model)), model)
        check_same_tokens(Path(config.speculative_model), Path(config.model))


def check_memory(config: EngineConfig, device: str, num_local_ranks: int) -> None:
    """Whether the weights of the models fit into the memory that `device` has free, cut into shares by the ranks.

    num_local_ranks: those of this machine, which have a GPU each or share its memory. Experts that are to be in host
    memory are counted there. Raises ConfigError with both numbers.
    """
    has_gpus, num_ranks = device.startswith("cuda"), config.tensor_parallel_size
    needed = models_bytes(config)
    if has_gpus and (num_offloaded := config.num_experts_offload_per_rank * num_ranks):
        per_expert = expert_bytes(*_loaded_tensors(config, Path(config.model)))
        needed -= num_offloaded * per_expert
        # One more is room for an expert on its way.
        in_host_memory = (num_offloaded + 1) * per_expert * num_local_ranks // num_ranks
        if in_host_memory > (free := available_memory("cpu")):
            raise ConfigError(
                f"not enough memory: the experts in host memory take {_gib(in_host_memory)}, and {_gib(free)} are free "
                "there\n  lower --num-experts-offload-per-rank"
            )
    per_memory = needed * (1 if has_gpus else num_local_ranks) // num_ranks
    free = available_memory(device)
    if per_memory > free:
        raise ConfigError(
            f"not enough memory: the weights take {_gib(per_memory)}, and {_gib(free)} are free on {device}\n"
            f"  close other programs, or use a smaller model; pagewick doctor {config.model} says what it needs"
        )


def models_bytes(config: EngineConfig) -> int:
    """What the weights of all ranks take together, a draft model's among them. Raises ModelLoadError."""
    return sum(
        weight_bytes(*_loaded_tensors(config, Path(name)))
        for name in (config.model, config.speculative_model)
        if name is not None
    )


def expert_bytes(tensors: Collection[TensorInfo], dtype: str) -> int:
    """What one expert takes in all layers together, as floating-point numbers of `dtype`; 0 if there are none."""
    found = [(tensor, match) for tensor in tensors if (match := _EXPERT.search(tensor.name))]
    num_experts = 1 + max((int(match[1]) for _, match in found), default=0)
    return weight_bytes([tensor for tensor, _ in found], dtype) // num_experts


def weight_bytes(tensors: Collection[TensorInfo], dtype: str) -> int:
    """What the tensors take as floating-point numbers of `dtype`; those that are none stay as they are stored."""
    return sum(
        tensor.num_elements * _FLOAT_BYTES[dtype] if tensor.dtype in _FLOATS else tensor.num_bytes for tensor in tensors
    )


def _check_model(directory: Path, *, rope_scaling: str | None = None, rope_theta: float | None = None) -> ModelConfig:
    config = _config_of(directory)
    model = read_config(config, rope_scaling=rope_scaling, rope_theta=rope_theta)
    names = frozenset(tensor.name for tensor in directory_tensors(directory))
    layers = {name.rpartition(".")[0] for name in names if _LINEAR in name}
    for prefix in sorted(layers) or [""]:
        check_supported(config, prefix, names)
    return model


def _config_of(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG_NAME).exists():
        raise ModelNotFoundError(_explain_no_config(directory))
    config = read_json_object(directory / CONFIG_NAME)
    return with_stored_dtype(config, _stored_dtypes(directory))


def _stored_dtypes(directory: Path) -> Iterator[str]:
    yield from (tensor.dtype for tensor in directory_tensors(directory))


def _explain_no_config(directory: Path) -> str:
    """With the model that may have been meant: a directory below, as in a hub's cache."""
    inner = [*directory.glob(f"*/{CONFIG_NAME}"), *directory.glob(f"snapshots/*/{CONFIG_NAME}")]
    hint = (
        f"did you mean {inner[0].parent}?"
        if inner
        else "give a directory with config.json, tokenizer.json and *.safetensors, as Hugging Face has them"
    )
    return f"{directory} is no model: it has no {CONFIG_NAME}\n  {hint}"


def _loaded_tensors(config: EngineConfig, directory: Path) -> tuple[list[TensorInfo], str]:
    """The tensors of a model but those that it ignores, such as a vision tower's, and the dtype that they get."""
    model = read_config(_config_of(directory))
    ignored = [re.compile(pattern) for pattern in model.ignored]
    tensors = [tensor for tensor in directory_tensors(directory) if not any(p.fullmatch(tensor.name) for p in ignored)]
    return tensors, model.dtype if config.dtype == "auto" else config.dtype


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
