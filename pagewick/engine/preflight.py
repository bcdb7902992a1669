"""Checks of a model before torch is imported, which takes seconds: mistakes are reported at once.

They decide nothing themselves: they ask the code that loads the model, as far as that works without torch.
"""

from __future__ import annotations

from pathlib import Path

from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.errors import ConfigError, ModelNotFoundError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.parallel.sharding import check_tensor_parallel
from pagewick.weights.files import CONFIG_NAME, explain_no_weights, read_json_object
from pagewick.weights.tensor_check import check_headers
from pagewick.weights.tensor_headers import directory_tensors, with_stored_dtype


def check_models(config: EngineConfig) -> None:
    """Check config.json and the tensors' headers in the model directories that `config` names.

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
    """Raise ConfigError, with both numbers, unless the models' weights fit into the memory that `device` has free.

    num_local_ranks: the ranks of this machine, each of which has a GPU of its own or shares the machine's memory.
    Experts that will be in host memory are counted there.
    """
    has_gpus, num_ranks = device.startswith("cuda"), config.tensor_parallel_size
    needed = rank_bytes(config, num_ranks)
    if has_gpus and (num_offloaded := config.num_experts_offload_per_rank * num_ranks):
        per_expert = _expert_bytes(config, num_ranks)
        needed -= num_offloaded * per_expert
        # There is room for one more expert, which is on its way.
        in_host_memory = (num_offloaded + 1) * per_expert * num_local_ranks
        if in_host_memory > (free := available_memory("cpu")):
            raise ConfigError(
                f"not enough memory: the experts in host memory take {_gib(in_host_memory)}, and {_gib(free)} are free "
                "there\n  lower --num-experts-offload-per-rank"
            )
    per_memory = needed if has_gpus else needed * num_local_ranks
    free = available_memory(device)
    if per_memory > free:
        raise ConfigError(
            f"not enough memory: the weights take {_gib(per_memory)}, and {_gib(free)} are free on {device}\n"
            f"  close other programs, or use a smaller model; pagewick doctor {config.model} says what it needs"
        )


def rank_bytes(config: EngineConfig, num_ranks: int) -> int:
    """Memory for the weights of one of `num_ranks` ranks, those of a draft model included.

    Raises what check_models raises of the models' files.
    """
    directories = [Path(name) for name in (config.model, config.speculative_model) if name is not None]
    return sum(
        tensor.kept_bytes(dtype)
        for model, dtype in (_model_and_dtype(config, directory) for directory in directories)
        for tensor in model_tensors(model, num_ranks=num_ranks)
    )


def _expert_bytes(config: EngineConfig, num_ranks: int) -> int:
    """Memory for one rank's share of one expert of every layer; 0 if the model has no experts."""
    model, dtype = _model_and_dtype(config, Path(config.model))
    if not model.mixtures:
        return 0
    tensors = model_tensors(model, num_ranks=num_ranks)
    return sum(t.kept_bytes(dtype) for t in tensors if t.role == "expert") // model.mixtures[0].num_experts


def _model_and_dtype(config: EngineConfig, directory: Path) -> tuple[ModelConfig, str]:
    """The model that config.json describes, and the dtype that its weights are kept in."""
    model = _check_model(directory)
    return model, model.dtype if config.dtype == "auto" else config.dtype


def _check_model(directory: Path, *, rope_scaling: str | None = None, rope_theta: float | None = None) -> ModelConfig:
    if not (directory / CONFIG_NAME).exists():
        raise ModelNotFoundError(_explain_no_config(directory))
    tensors = directory_tensors(directory)
    config = with_stored_dtype(read_json_object(directory / CONFIG_NAME), (tensor.dtype for tensor in tensors))
    model = read_config(config, rope_scaling=rope_scaling, rope_theta=rope_theta)
    table = model_tensors(model, [tensor.name for tensor in tensors])
    check_headers(config, {tensor.name: tensor.shape for tensor in table}, tensors, model.ignored_tensors)
    return model


def _explain_no_config(directory: Path) -> str:
    """The message for a directory without config.json; it proposes a model in a directory below, if there is one."""
    if gguf := sorted(file.name for file in directory.glob("*.gguf")):
        return explain_no_weights(gguf, str(directory))
    inner = [*directory.glob(f"*/{CONFIG_NAME}"), *directory.glob(f"snapshots/*/{CONFIG_NAME}")]
    hint = (
        f"did you mean {inner[0].parent}?"
        if inner
        else "give a directory with config.json, tokenizer.json and *.safetensors, as Hugging Face has them"
    )
    return f"{directory} is not a model directory: it has no {CONFIG_NAME}\n  {hint}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
