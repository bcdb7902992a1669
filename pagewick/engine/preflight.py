"""Checks of a model before torch is imported, which takes seconds: mistakes are reported at once.

They decide nothing themselves: they ask the code that loads the model, as far as that works without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.errors import ConfigError, ModelNotFoundError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.parallel.layout import layout_of
from pagewick.parallel.sharding import check_tensor_parallel
from pagewick.parallel.topology import Topology, detect_topology
from pagewick.weights.files import CONFIG_NAME, explain_no_weights, read_json_object
from pagewick.weights.tensor_check import check_headers
from pagewick.weights.tensor_headers import directory_tensors, with_stored_dtype


def check_models(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> list[ModelConfig]:
    """Check config.json and the tensors' headers in the model directories that `config` names; return their configs.

    environ: what a launcher says of the number of ranks. Raises ConfigError and ModelLoadError.
    """
    num_ranks = num_tensor_ranks(detect_topology(environ, tensor_parallel_size=config.tensor_parallel_size))
    model = _check_model(Path(config.model), rope_scaling=config.rope_scaling, rope_theta=config.rope_theta)
    check_tensor_parallel(model.num_heads, num_ranks)
    model.check_expert_offload(config.num_experts_offload_per_rank, num_ranks)
    config.check_max_model_len(model.longest_context)
    if config.speculative_model is None:
        return [model]
    draft_model = _check_model(Path(config.speculative_model))
    check_vocabulary(draft_model, model)
    check_same_tokens(Path(config.speculative_model), Path(config.model))
    return [model, draft_model]


def num_tensor_ranks(topology: Topology) -> int:
    """Return the number of ranks that share a model."""
    return layout_of(topology.world_size).tensor_size


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Memory for the weights of one rank.

    all: those of a draft model included. expert: this rank's share of one expert of every layer; 0 without experts.
    """

    all: int
    expert: int

    @classmethod
    def of(cls, config: EngineConfig, num_ranks: int, models: Sequence[ModelConfig] | None = None) -> Self:
        """Add up the tensors of one of `num_ranks` ranks.

        models: what check_models has returned; None reads config.json. Raises what check_models raises of that file.
        """
        if models is None:
            models = [_read_model(directory) for directory in _directories(config)]
        num_bytes, num_expert_bytes = 0, 0
        for model in models:
            dtype = model.dtype if config.dtype == "auto" else config.dtype
            for tensor in model_tensors(model, num_ranks=num_ranks):
                num_bytes += tensor.kept_bytes(dtype)
                num_expert_bytes += tensor.kept_bytes(dtype) if tensor.role == "expert" and model is models[0] else 0
        mixtures = models[0].mixtures
        return cls(num_bytes, num_expert_bytes // mixtures[0].num_experts if mixtures else 0)


def check_memory(config: EngineConfig, device: str, num_local_ranks: int, weights: WeightBytes | None = None) -> None:
    """Raise ConfigError, with both numbers, unless the models' weights fit into the memory that `device` has free.

    num_local_ranks: the ranks of this machine, each of which has a GPU of its own or shares the machine's memory.
    weights: those of a rank; None checks the models' files, too. Experts that will be in host memory are counted there.
    """
    has_gpus, num_ranks = device.startswith("cuda"), config.tensor_parallel_size
    if weights is None:
        weights = WeightBytes.of(config, num_ranks, [_check_model(directory) for directory in _directories(config)])
    needed = weights.all
    if has_gpus and (num_offloaded := config.num_experts_offload_per_rank * num_ranks):
        needed -= num_offloaded * weights.expert
        # There is room for one more expert, which is on its way.
        in_host_memory = (num_offloaded + 1) * weights.expert * num_local_ranks
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


def _directories(config: EngineConfig) -> list[Path]:
    return [Path(name) for name in (config.model, config.speculative_model) if name is not None]


def _check_model(directory: Path, **rope: Any) -> ModelConfig:
    _check_directory(directory)
    tensors = directory_tensors(directory)
    config = with_stored_dtype(read_json_object(directory / CONFIG_NAME), (tensor.dtype for tensor in tensors))
    model = read_config(config, **rope)
    table = model_tensors(model, [tensor.name for tensor in tensors])
    check_headers(config, {tensor.name: tensor.shape for tensor in table}, tensors, model.ignored_tensors)
    return model


def _read_model(directory: Path) -> ModelConfig:
    """Return what config.json says; the tensors' headers are read only if it does not name the dtype."""
    _check_directory(directory)

    def stored() -> Iterator[str]:
        yield from (tensor.dtype for tensor in directory_tensors(directory))

    return read_config(with_stored_dtype(read_json_object(directory / CONFIG_NAME), stored()))


def _check_directory(directory: Path) -> None:
    """Raise ModelNotFoundError for a directory without config.json; it proposes one in a directory below, if any."""
    if (directory / CONFIG_NAME).exists():
        return
    if gguf := sorted(file.name for file in directory.glob("*.gguf")):
        raise ModelNotFoundError(explain_no_weights(gguf, str(directory)))
    inner = [*directory.glob(f"*/{CONFIG_NAME}"), *directory.glob(f"snapshots/*/{CONFIG_NAME}")]
    hint = (
        f"did you mean {inner[0].parent}?"
        if inner
        else "give a directory with config.json, tokenizer.json and *.safetensors, as Hugging Face has them"
    )
    raise ModelNotFoundError(f"{directory} is not a model directory: it has no {CONFIG_NAME}\n  {hint}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
