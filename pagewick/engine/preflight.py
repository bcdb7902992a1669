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
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.models.tensors import ModelTensor, model_tensors
from pagewick.parallel.layout import layout_of
from pagewick.parallel.sharding import check_tensor_parallel
from pagewick.parallel.topology import Topology, detect_topology
from pagewick.quantization import check_supported
from pagewick.weights.description import Description, describe, is_gguf
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.tensor_check import check_headers, cut_inside_block
from pagewick.weights.tensor_headers import TensorInfo


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model as its files describe it. names: its tensors. blocks: those of them that are in block formats."""

    config: ModelConfig
    names: Sequence[str]
    blocks: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, found: Description, **rope: Any) -> Self:
        blocks = {tensor.name: tensor for tensor in found.tensors if tensor.is_in_blocks}
        return cls(read_config(found.config, **rope), [tensor.name for tensor in found.tensors], blocks)

    def kept_bytes(self, dtype: str, num_ranks: int) -> Iterator[tuple[ModelTensor, int]]:
        """Yield the tensors with the memory for one rank's share of each."""
        for tensor in model_tensors(self.config, self.names, num_ranks=num_ranks):
            stored = self.blocks.get(tensor.name)
            share = 0 if stored is None else stored.kept_bytes * tensor.num_kept // tensor.num_elements
            yield tensor, share or tensor.kept_bytes(dtype)

    def cut_inside_block(self, num_ranks: int) -> str:
        """Return which tensor `num_ranks` ranks would cut inside a block, and where; empty if they cut none."""
        kept = model_tensors(self.config, self.names, num_ranks=num_ranks) if self.blocks else ()
        return cut_inside_block(self.blocks.values(), {tensor.name: tensor.kept[-1] for tensor in kept})


def check_models(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> list[FoundModel]:
    """Check the configuration and the tensors' headers of the models that `config` names; return what was found.

    environ: what a launcher says of the number of ranks. Raises ConfigError and ModelLoadError.
    """
    num_ranks = num_tensor_ranks(detect_topology(environ, tensor_parallel_size=config.tensor_parallel_size))
    found = _check_model(Path(config.model), rope_scaling=config.rope_scaling, rope_theta=config.rope_theta)
    model = found.config
    check_tensor_parallel(model.num_heads, num_ranks)
    if num_ranks > 1 and (cut := found.cut_inside_block(num_ranks)):
        sizes = [size for size in range(1, model.num_heads + 1) if model.num_heads % size == 0]
        working = ", ".join(str(size) for size in sizes if not found.cut_inside_block(size))
        raise ConfigError(f"--tensor-parallel-size {num_ranks} does not fit {cut}\n  sizes that work: {working}")
    model.check_expert_offload(config.num_experts_offload_per_rank, num_ranks)
    config.check_max_model_len(model.longest_context)
    if config.speculative_model is None:
        return [found]
    draft = _check_model(Path(config.speculative_model))
    check_vocabulary(draft.config, model)
    check_same_tokens(Path(config.speculative_model), Path(config.model))
    return [found, draft]


def check_description(description: Description) -> None:
    """Check a model whose weights are not on this disk; without tensors, config.json alone.

    Raises ConfigError and ModelLoadError.
    """
    if description.tensors:
        _check_described(description)
        return
    for tensor in model_tensors(read_config(description.config), ()):
        check_supported(description.config, tensor.name.removesuffix(".weight"), ())


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
    def of(cls, config: EngineConfig, num_ranks: int, models: Sequence[FoundModel] | None = None) -> Self:
        """Add up the tensors of one of `num_ranks` ranks.

        models: what check_models has returned; None reads the files. Raises what check_models raises of them.
        """
        if models is None:
            models = [FoundModel.of(describe(path)) for path in _paths(config)]
        num_bytes, num_expert_bytes = 0, 0
        for model in models:
            dtype = model.config.dtype if config.dtype == "auto" else config.dtype
            for tensor, kept in model.kept_bytes(dtype, num_ranks):
                num_bytes += kept
                num_expert_bytes += kept if tensor.role == "expert" and model is models[0] else 0
        mixtures = models[0].config.mixtures
        return cls(num_bytes, num_expert_bytes // mixtures[0].num_experts if mixtures else 0)


def check_memory(config: EngineConfig, device: str, num_local_ranks: int, weights: WeightBytes | None = None) -> None:
    """Raise ConfigError, with both numbers, unless the models' weights fit into the memory that `device` has free.

    num_local_ranks: the ranks of this machine, each of which has a GPU of its own or shares the machine's memory.
    weights: those of a rank; None checks the models' files, too. Experts that will be in host memory are counted there.
    """
    has_gpus, num_ranks = device.startswith("cuda"), config.tensor_parallel_size
    if weights is None:
        weights = WeightBytes.of(config, num_ranks, [_check_model(path) for path in _paths(config)])
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


def _paths(config: EngineConfig) -> list[Path]:
    return [Path(name) for name in (config.model, config.speculative_model) if name is not None]


def _check_model(path: Path, **rope: Any) -> FoundModel:
    description = describe(path)
    try:
        return _check_described(description, **rope)
    except ModelLoadError as error:
        # A GGUF file has its configuration in its metadata.
        raise ModelLoadError(open_gguf(path).reworded(str(error))) if is_gguf(path) else error from None


def _check_described(description: Description, **rope: Any) -> FoundModel:
    found = FoundModel.of(description, **rope)
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(found.config, found.names)}
    check_headers(description.config, shapes, description.tensors, found.config.ignored_tensors)
    return found


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
