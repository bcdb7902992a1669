"""Checks of a model before torch is imported, which takes seconds: mistakes are reported at once.

They decide nothing themselves: they ask the code that loads the model, as far as that works without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple, Self

from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.adapters import DEFAULT_MAX_RANK, num_adapters_of
from pagewick.engine.image_settings import with_largest_picture
from pagewick.engine.speculation.draft_vocabulary import check_same_tokens, check_vocabulary
from pagewick.engine.step_memory import StepLimits, gpu_step_bytes
from pagewick.errors import ConfigError, ModelLoadError, NotEnoughMemoryError
from pagewick.log import get_logger
from pagewick.models.adapter_memory import adapter_bytes
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_offers import with_mtp
from pagewick.models.registry import read_config
from pagewick.models.stages import Stage, stages_of
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.models.tensors import model_tensors
from pagewick.parallel.layout import layout_of
from pagewick.parallel.topology import topology_of
from pagewick.quantization.at_load_memory import most_quantizing_bytes
from pagewick.quantization.plan import QuantizationPlan, choose_mix, plan_quantization
from pagewick.weights.description import Description, describe, is_gguf
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.packed.config import packed_rules
from pagewick.weights.tensor_check import check_headers, cut_inside_block
from pagewick.weights.tensor_headers import TensorInfo, in_formats, kept_blocks

logger = get_logger(__name__)

# Architectures of Qwen3-Reranker: as published, and with a head of labels in place of the rows for "yes" and "no".
QWEN3_RERANKERS = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model as its files describe it. names: its tensors. blocks: those of them that are in block formats.

    at_load: the block formats of tensors that are quantized at load. dtypes: their dtypes in the files.
    """

    config: ModelConfig
    names: Sequence[str]
    blocks: Mapping[str, TensorInfo]
    at_load: Mapping[str, str]
    dtypes: Mapping[str, str]

    @classmethod
    def of(cls, found: Description, quantization: str | None = None, *, has_mtp: bool = False, **changes: Any) -> Self:
        """Read a description. quantization: the mix to which the weights will be quantized. Raises ConfigError.

        has_mtp: as in ModelConfig. changes: options of read_config.
        """
        model, names = read_config(found.config, **changes), [tensor.name for tensor in found.tensors]
        model = with_mtp(model, names) if has_mtp else model
        tensors: Sequence[TensorInfo] = found.tensors
        at_load: Mapping[str, str] = {}
        if quantization not in (None, "auto"):
            at_load = plan_at_load(quantization, model, names, kept_blocks(tensors, quantization)).formats
            tensors = in_formats(tensors, at_load)
        blocks = {tensor.name: tensor for tensor in tensors if tensor.is_in_blocks}
        dtypes = {tensor.name: tensor.dtype for tensor in found.tensors if tensor.name in at_load}
        return cls(model, names, blocks, at_load, dtypes)

    def kept_bytes(self, dtype: str, num_ranks: int, stage: Stage | None = None) -> Iterator[tuple[ModelTensor, int]]:
        """Yield the tensors with the memory for one rank's share of each. stage: those of one; None: all."""
        for tensor in model_tensors(self.config, self.names, num_ranks=num_ranks):
            if stage is not None and not stage.holds(tensor.path):
                continue
            stored = self.blocks.get(tensor.name)
            share = 0 if stored is None else stored.kept_bytes * tensor.num_kept // tensor.num_elements
            yield tensor, share or tensor.kept_bytes(dtype)

    def quantizing_bytes(self, num_ranks: int) -> int:
        """Return the memory that a rank needs beside its weights while it quantizes them on a GPU."""
        kept = model_tensors(self.config, self.names, num_ranks=num_ranks) if self.at_load else ()
        return most_quantizing_bytes(kept, self.at_load, self.dtypes)

    def unshared(self, num_ranks: int) -> str:
        """Return what `num_ranks` ranks cannot share, a tensor cut inside a block included; empty if they can."""
        if num_ranks > 1 and self.config.unshared:
            return self.config.unshared
        kept = model_tensors(self.config, self.names, num_ranks=num_ranks) if self.blocks else ()
        return cut_inside_block(self.blocks.values(), {tensor.name: tensor.kept[-1] for tensor in kept})


def plan_at_load(mix: str, model: ModelConfig, names: Sequence[str], in_blocks: Mapping[str, str]) -> QuantizationPlan:
    """Call plan_quantization for a model. names: the file's tensors."""
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(replace(model, has_mtp=False), names)}
    beside = {tensor.name: tensor.shape for tensor in model_tensors(model, names) if tensor.name not in shapes}
    return plan_quantization(mix, shapes, in_blocks, model, beside)


class FreeMemory(NamedTuple):
    """The bytes that are free for one rank: on its device, and of its machine's main memory."""

    device: int
    host: int

    @classmethod
    def of_rank(cls, device: str, num_sharing: int) -> Self:
        """Ask the device of a rank. num_sharing: the ranks that share its machine's main memory."""
        host = available_memory("cpu") // num_sharing
        return cls(available_memory(device) if device.startswith("cuda") else host, host)


def choose_quantization(config: EngineConfig, free: FreeMemory) -> EngineConfig:
    """Replace --quantization auto by the best format with which a rank's weights fit into its device's memory.

    free: what every rank has, so that the choice suits all. Raises ConfigError and ModelLoadError.
    """
    if config.quantization != "auto":
        return config
    description, num_ranks = describe(Path(config.model), config.mmproj), config.tensor_parallel_size
    changes = _models(config)[0].changes

    def bytes_in(mix: str | None) -> int | None:
        found = FoundModel.of(description, mix, **changes)
        if num_ranks > 1 and found.unshared(num_ranks):
            return None
        return WeightBytes.of(config, num_ranks, [found]).all

    mix, arithmetic = choose_mix(bytes_in, free.device, config.dtype.replace("auto", "unquantized"))
    of_rank = f" (the rank that has least, of {config.num_ranks})" if config.num_ranks > 1 else ""
    logger.info("--quantization auto%s: %s; the choice is %s", of_rank, arithmetic, mix or "not to quantize")
    return replace(config, quantization=mix)


def check_models(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> list[FoundModel]:
    """Check the configuration and the tensors' headers of the models that `config` names; return what was found.

    environ: has the number of ranks, if a launcher has set it. Raises ConfigError and ModelLoadError.
    """
    num_ranks = num_tensor_ranks(config, environ)
    found = [_check_model(model) for model in _models(config)]
    _check_ranks(found, num_ranks)
    model = found[0].config
    stages_of(model, config.pipeline_parallel_size)
    model.check_expert_offload(config.num_experts_offload_per_rank, num_ranks)
    config.check_max_model_len(model.longest_context)
    if config.rerank and model.architecture not in QWEN3_RERANKERS:
        raise ConfigError(
            f"--rerank is for Qwen3-Reranker, and {model.architecture} is none; leave it out: other rerankers, whose "
            "architecture ends in ForSequenceClassification, need no flag"
        )
    if config.rerank and model.labels is not None and not model.labels.activation:
        raise ConfigError(
            f"--rerank is for models that score pairs of texts; this one sorts them into {model.labels.num_labels} "
            "classes; leave it out, and use /v1/classify or classify"
        )
    if config.speculative_model is not None:
        check_vocabulary(found[1].config, model)
        check_same_tokens(Path(config.speculative_model), Path(config.model))
    return found


def _check_ranks(models: Sequence[FoundModel], num_ranks: int) -> None:
    """Raise ConfigError, naming the sizes that work, if these ranks cannot share the model, or the draft model."""
    for model, owner in zip(models, ("model", "draft model"), strict=False):
        model.config.check_ranks(num_ranks, owner)
        if (vision := model.config.fitted(model.names).vision) is not None:
            vision.check_ranks(num_ranks)
        if num_ranks > 1 and (cut := model.unshared(num_ranks)):
            num_heads = gcd(*(count for each in models for count in each.config.divided.values()))
            # A model without heads can be divided by any number of ranks.
            sizes = [size for size in range(1, (num_heads or num_ranks) + 1) if num_heads % size == 0]
            working = ", ".join(str(size) for size in sizes if not any(each.unshared(size) for each in models))
            raise ConfigError(
                f"--tensor-parallel-size {num_ranks} does not fit the {owner}'s {cut}\n  sizes that work: {working}"
            )


def check_description(description: Description, quantization: str | None = None) -> None:
    """Check a model whose weights are not on this disk; without tensors, config.json alone.

    quantization: the mix to which the weights will be quantized. Raises ConfigError and ModelLoadError.
    """
    if description.tensors:
        _check_described(description, quantization)
        return
    read_config(description.config)
    packed_rules(description.config)


def num_tensor_ranks(config: EngineConfig, environ: Mapping[str, str]) -> int:
    """Return the number of ranks that share each layer."""
    return layout_of(topology_of(config, environ).world_size, config.pipeline_parallel_size).tensor_size


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Memory for the weights of one rank.

    all: those of a draft model and room for LoRA adapters included. expert: this rank's share of one expert of every
    layer; 0 without experts. step: memory that the largest step needs beside them on a GPU. quantizing: memory that
    quantizing them at load needs there, before there are steps; 0 if nothing is quantized.
    """

    all: int
    expert: int
    step: int
    quantizing: int = 0

    @classmethod
    def of(cls, config: EngineConfig, num_ranks: int, models: Sequence[FoundModel] | None = None) -> Self:
        """Add up the tensors of one of `num_ranks` ranks.

        models: what check_models has returned; None reads the files, and raises as check_models does.
        """
        if models is None:
            models = [FoundModel.of(describe(one.path, one.mmproj), one.mix, **one.changes) for one in _models(config)]
        num_bytes, num_expert_bytes = _of_fullest_stage(models[0], config, num_ranks)
        num_bytes += _adapter_bytes(config, num_ranks, models[0])
        for model in models[1:]:
            num_bytes += sum(kept for _, kept in model.kept_bytes(_dtype_of(model, config), num_ranks))
        mixtures = models[0].config.mixtures
        if models[0].config.fitted(models[0].names).vision is not None:
            config = with_largest_picture(config)
        step = max(gpu_step_bytes(found.config, StepLimits.of(config, found.config), num_ranks) for found in models)
        quantizing = max(found.quantizing_bytes(num_ranks) for found in models)
        return cls(num_bytes, num_expert_bytes // mixtures[0].num_experts if mixtures else 0, step, quantizing)


def _of_fullest_stage(model: FoundModel, config: EngineConfig, num_ranks: int) -> tuple[int, int]:
    """Return the memory for the weights of a rank, and for the experts among them; of the stage that has most."""
    dtype, found = _dtype_of(model, config), []
    for stage in stages_of(model.config, config.pipeline_parallel_size):
        kept = [(tensor.role, size) for tensor, size in model.kept_bytes(dtype, num_ranks, stage)]
        found.append((sum(size for _, size in kept), sum(size for role, size in kept if role == "expert")))
    return max(found)


def _dtype_of(model: FoundModel, config: EngineConfig) -> str:
    return model.config.dtype if config.dtype == "auto" else config.dtype


def _adapter_bytes(config: EngineConfig, num_ranks: int, model: FoundModel) -> int:
    """Return the bytes of a rank's room for adapters; for the default rank if it follows from adapters not read yet."""
    if not config.enable_lora:
        return 0
    number = num_adapters_of(config.max_loras, config.adapter_paths)
    tensors = model_tensors(model.config, model.names, num_ranks=num_ranks)
    return adapter_bytes(tensors, number, config.max_lora_rank or DEFAULT_MAX_RANK, _dtype_of(model, config))


def check_memory(config: EngineConfig, device: str, free: FreeMemory, weights: WeightBytes | None = None) -> None:
    """Raise NotEnoughMemoryError, with both numbers, unless the models' weights fit into the memory that is free.

    device: the kind of all ranks' devices. free: what a rank has, or what every rank has. weights: those of a rank;
    None checks the models' files, too. Experts that will be in host memory are counted there.
    """
    has_gpus, num_ranks = device.startswith("cuda"), config.tensor_parallel_size
    if weights is None:
        weights = WeightBytes.of(config, num_ranks, [_check_model(model) for model in _models(config)])
    needed, per_rank, least = (
        weights.all,
        *((" per rank", " (the rank that has least)") if config.num_ranks > 1 else ("", "")),
    )
    if has_gpus and (num_offloaded := config.num_experts_offload_per_rank * num_ranks):
        needed -= num_offloaded * weights.expert
        # One expert more than is offloaded: the one that is being copied.
        in_host_memory = (num_offloaded + 1) * weights.expert
        if in_host_memory > free.host:
            raise NotEnoughMemoryError(
                f"not enough memory: the experts in host memory take {_gib(in_host_memory)}{per_rank}, and "
                f"{_gib(free.host)} are free there{least}\n  lower --num-experts-offload-per-rank"
            )
    # A step comes after loading, and PyTorch gives memory that is free back before it fails.
    step, quantizing = (weights.step, weights.quantizing) if has_gpus else (0, 0)
    if needed + max(step, quantizing) > free.device:
        named = f" and quantizing them {_gib(quantizing)}" if quantizing > step else f" and a step {_gib(step)}"
        beside = named if has_gpus else ""
        raise NotEnoughMemoryError(
            f"not enough memory: the weights take {_gib(needed)}{per_rank}{beside}, and {_gib(free.device)} are free "
            f"on {device}{least}\n"
            "  close other programs, use a smaller model, or quantize it with --quantization auto; "
            f"pagewick doctor {config.model} says what it needs"
        )


class _Model(NamedTuple):
    """A model that a config names. mix: to which it is quantized at load. changes: options of FoundModel.of.

    mmproj: the GGUF file with the part that sees.
    """

    path: Path
    mix: str | None
    changes: Mapping[str, Any]
    mmproj: str | None = None


def _models(config: EngineConfig) -> list[_Model]:
    """Return the served model and the draft model, if any, which is not quantized and sees no images."""
    changes = {
        "rope_scaling": config.rope_scaling,
        "rope_theta": config.rope_theta,
        "language_model_only": config.language_model_only,
        "has_mtp": config.speculative_method == "mtp",
    }
    models = [_Model(Path(config.model), config.quantization, changes, config.mmproj)]
    if config.speculative_model is not None:
        models.append(_Model(Path(config.speculative_model), None, {"language_model_only": True}))
    return models


def _check_model(model: _Model) -> FoundModel:
    path, description = model.path, describe(model.path, model.mmproj)
    try:
        return _check_described(description, model.mix, **model.changes)
    except ModelLoadError as error:
        # A GGUF file has its configuration in its metadata.
        raise ModelLoadError(open_gguf(path, model.mmproj).reworded(str(error))) if is_gguf(path) else error from None


def _check_described(description: Description, quantization: str | None, **changes: Any) -> FoundModel:
    found = FoundModel.of(description, quantization, **changes)
    table = list(model_tensors(found.config, found.names))
    shapes = {tensor.name: tensor.shape for tensor in table}
    tables = [tensor.name for tensor in table if tensor.role == "table"]
    check_headers(shapes, description.tensors, found.config.ignored_tensors, tables)
    return found


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
