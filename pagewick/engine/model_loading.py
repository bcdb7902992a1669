"""Loads a model from a directory to a device, for the served model and for the draft model alike."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from pagewick import kernels, openmp
from pagewick.attention.backend import AttentionBackend
from pagewick.attention.native import choose_backend
from pagewick.attention.packages import choose_named, usual_block_size
from pagewick.config import EngineConfig
from pagewick.devices import num_cores
from pagewick.engine.adapters import read_room
from pagewick.engine.cache.kv_cache import CacheGroup, cache_groups
from pagewick.engine.image_settings import image_settings
from pagewick.engine.preflight import plan_at_load
from pagewick.engine.whole_parts import check_encoder_options, for_encoder, max_image_tokens
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.settings import ImageSettings
from pagewick.layers.context import LayerContext, LoraRoom
from pagewick.log import get_logger
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder
from pagewick.models.end_tokens import eos_token_ids
from pagewick.models.mtp_offers import with_mtp
from pagewick.models.registry import build_model, read_config
from pagewick.models.tensors import model_tensors
from pagewick.option_checks import flag_of
from pagewick.parallel.collectives import Collectives
from pagewick.quantization import method_chooser
from pagewick.weights.end_tokens import tokenizer_end_ids
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from pagewick.weights.progress import Progress, default_progress
from pagewick.weights.quantized_cache import QuantizedCache
from pagewick.weights.quantized_source import quantized_once
from pagewick.weights.same_tensors import check_tied_heads
from pagewick.weights.source import TensorSource
from pagewick.weights.upload import Upload

logger = get_logger(__name__)

# Quantizing fewer bytes than this takes less than a second or two.
_SHOWN_BYTES: Final = 2**28


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's share of a model. config: the resolved one. groups: the layers with a cache, by cache group.

    weights: the formats of its matrices, in words. timeline: the duration of each stage of loading, in seconds.
    num_parameters: those of the whole model.
    """

    model: Decoder
    model_config: ModelConfig
    config: EngineConfig
    eos_token_ids: list[int]
    groups: list[CacheGroup]
    weights: str
    timeline: list[tuple[str, float]]
    num_parameters: int


@runtime_checkable
class HoldsWeights(Protocol):
    """A module that knows its number of parameters, including those of its submodules."""

    num_parameters: int


def read_model_config(directory: Path) -> ModelConfig:
    """Read the config of the checkpoint in a directory, without its weights. Raises ModelLoadError."""
    with open_source(directory) as source:
        return read_config(source.config())


def load_model(config: EngineConfig, collectives: Collectives, device: torch.device) -> LoadedModel:
    """Load the model in the directory `config.model`, and set the number of threads of this process from its config.

    Raises ConfigError and ModelLoadError.
    """
    started = time.monotonic()
    with ExitStack() as cleanup:
        source = cleanup.enter_context(open_source(Path(config.model), mix=config.quantization, mmproj=config.mmproj))
        if source.note and collectives.rank == 0:
            logger.info("%s", source.note)
        model_config = read_config(
            source.config(),
            rope_scaling=config.rope_scaling,
            rope_theta=config.rope_theta,
            language_model_only=config.language_model_only,
        ).fitted(source.names())
        if config.speculative_method == "mtp":
            model_config = with_mtp(model_config, list(source.names()))
        check_encoder_options(config, model_config)
        config, model_config, images = _with_images(config, model_config, collectives)
        eos = _end_token_ids(config, model_config, source)
        config = config.resolve(
            max_position_embeddings=model_config.max_position_embeddings,
            longest_context=model_config.longest_context,
            checkpoint_dtype=model_config.dtype,
            device=str(device),
            block_size=usual_block_size(config.attention_backend, device),
            num_cores=max(1, num_cores() // collectives.local_world_size),
        )
        config = for_encoder(_with_room(config), model_config, is_first=collectives.rank == 0)
        assert config.block_size is not None and config.num_threads is not None, "resolve() sets both"
        torch.set_num_threads(config.num_threads)
        kernels.set_num_threads(config.num_threads)
        if config.batch_invariant:
            _require_batch_invariance(device, collectives)
        if config.fp8_activations:
            kernels.require_fp8_activations(device, getattr(torch, config.dtype))
        model_config.check_ranks(collectives.tp_size)
        model_config.check_expert_offload(config.num_experts_offload_per_rank, collectives.tp_size)
        if collectives.rank == 0:
            check_tied_heads(source, model_config.tied_heads(source.names()))
        upload = Upload.to_gpu(device)
        opened = _quantized(config, model_config, source, collectives, upload)
        source = opened.source
        stored_types = {name: source.stored_type(name) for name in source.names()}
        if config.fp8_activations and not any(str(kind).startswith("fp8_") for kind in stored_types.values()):
            raise ConfigError("--fp8-activations: no weight of this model is in FP8; leave the flag out")
        context = LayerContext(
            dtype=getattr(torch, config.dtype),
            device=device,
            collectives=collectives,
            backend=_attention_backend(config, device, config.block_size),
            choose_method=method_chooser(stored_types, opened.at_load),
            max_model_len=config.max_model_len or model_config.max_position_embeddings,
            num_experts_offload_per_rank=config.num_experts_offload_per_rank,
            lora=LoraRoom(config.num_adapters, config.max_lora_rank or 0) if config.enable_lora else None,
        )
        model = _build(context, model_config, source.names())
        if model.visual is not None and images is not None:
            model.visual.use_pixels(images)
        progress = _progress(source, opened.at_load, collectives)
        timeline = [*opened.timeline, *load_weights(model, source, progress=progress, upload=upload)]
        types = {**stored_types, **source.labels, **opened.at_load}
        weights = _describe_weights(model_config, types, config.dtype) + opened.note
    logger.info("loaded %s in %.1f s", model_config.architecture, time.monotonic() - started)
    total = sum(tensor.num_elements for tensor in model_tensors(model_config, list(types)))
    stages = model.layers_of_stages() if collectives.stages.size > 1 else ()
    groups = cache_groups(model, stages, collectives.stages.index)
    return LoadedModel(model, model_config, config, eos, groups, weights, timeline, total)


def warn_of_options(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> None:
    """Log options that change nothing, or slow the model down. config: the user's; loaded: the served model."""
    if device.type == "cpu" and loaded.config.num_threads is not None:
        openmp.warn_if_too_late(loaded.config.num_threads)
    for name in ("max_loras", "max_lora_rank"):
        if getattr(config, name) is not None and not config.enable_lora:
            logger.warning(
                "%s changes nothing without --lora, --lora-modules or --enable-lora: no adapter can be used",
                flag_of(name),
            )
    if config.max_image_pixels is not None and loaded.model_config.vision is None:
        logger.warning("--max-image-pixels changes nothing: no images are read")


def _with_images(
    config: EngineConfig, model: ModelConfig, collectives: Collectives
) -> tuple[EngineConfig, ModelConfig, ImageSettings | None]:
    """Return how the model wants its images; the config then has the pixels of the largest one.

    Without the file that says it, the part of the model that sees is left out. Raises ConfigError and ModelLoadError.
    """
    if model.vision is None:
        return config, model, None
    if (settings := image_settings(config)) is None:
        if collectives.rank == 0:
            logger.warning("images are refused: %s has no preprocessor_config.json; download it too", config.model)
        return config, model.without_vision(), None
    config = replace(config, max_image_pixels=settings.largest_picture)
    max_image_tokens(config, model)
    return config, model, settings


def _with_room(config: EngineConfig) -> EngineConfig:
    """Choose for how many adapters there is room, and of which rank. Raises ModelLoadError for an unusable adapter."""
    if not config.enable_lora:
        return config
    number, rank = read_room(config.max_loras, config.max_lora_rank, config.adapter_paths)
    return replace(config, max_loras=number, max_lora_rank=rank)


def _end_token_ids(config: EngineConfig, model: ModelConfig, source: TensorSource) -> list[int]:
    """Return the tokens that end a sequence: the checkpoint's, and the one that its tokenizer names."""
    if model.end_token_ids:
        return list(model.end_token_ids)
    found = eos_token_ids(source.config(), source.generation_config())
    named = tokenizer_end_ids(Path(config.tokenizer or config.model))
    return [*dict.fromkeys([*found, *(token_id for token_id in named if token_id < model.vocab_size)])]


def _require_batch_invariance(device: torch.device, collectives: Collectives) -> None:
    kernels.require_batch_invariance(device)
    collectives.sum_in_rank_order()
    if device.type == "cpu" and collectives.rank == 0:
        logger.info("--batch-invariant changes nothing: on a CPU, a response never depends on the batch")


def _attention_backend(config: EngineConfig, device: torch.device, block_size: int) -> AttentionBackend:
    """Return the backend that the resolved config names. Raises ConfigError if it cannot be used."""
    if (name := config.attention_backend) == "auto":
        return choose_backend(device, config.kv_cache_dtype, block_size)
    return choose_named(name, device, getattr(torch, config.dtype), config.kv_cache_dtype, block_size)


class _Opened(NamedTuple):
    """A checkpoint that is ready to load. at_load: block formats of weights that each rank still quantizes.

    note: what a user should know about its formats. timeline: as in LoadedModel.
    """

    source: TensorSource
    at_load: Mapping[str, str]
    note: str = ""
    timeline: Sequence[tuple[str, float]] = ()


def _quantized(
    config: EngineConfig, model: ModelConfig, source: TensorSource, collectives: Collectives, upload: Upload | None
) -> _Opened:
    """Quantize the checkpoint's weights if the config wants it, or find those that an earlier start has kept.

    upload: brings weights to the GPU that quantizes them; None: the CPU does.
    """
    if config.quantization is None:
        return _Opened(source, {})
    in_blocks = {name: kind for name in source.names() if isinstance(kind := source.stored_type(name), str)}
    plan = plan_at_load(config.quantization, model, source.names(), in_blocks)
    note = f" ({narrow})" if (narrow := plan.describe_narrow()) else ""
    if not plan.formats or not config.quantized_cache or config.quantized_cache_size == 0:
        return _Opened(source, plan.formats, note)
    started, cache = time.monotonic(), QuantizedCache.of(os.environ, config.quantized_cache_size)
    assert config.num_threads is not None, "resolve() sets it"
    # The ranks of this machine wait for the first one, which may use the processors of all.
    kernels.set_num_threads(min(num_cores(), config.num_threads * collectives.local_world_size))
    progress = _progress(source, plan.formats)
    found = quantized_once(Path(config.model), source, plan, cache, progress, upload, mmproj=config.mmproj)
    kernels.set_num_threads(config.num_threads)
    if found is None:
        return _Opened(source, plan.formats, note)
    return _Opened(found, {}, note, [("quantized weights", time.monotonic() - started)])


def _progress(source: TensorSource, names: Iterable[str], collectives: Collectives | None = None) -> Progress:
    """Return a visible Progress if quantizing these tensors takes long; with ranks, only the first one shows it."""
    num_bytes = sum(math.prod(source.shape(name)) * source.dtype(name).itemsize for name in names)
    is_shown = num_bytes >= _SHOWN_BYTES and (collectives is None or collectives.rank == 0)
    return default_progress() if is_shown else Progress()


def _describe_weights(model: ModelConfig, types: Mapping[str, torch.dtype | str], dtype: str) -> str:
    """Return the formats of the model's matrices, that of most weights first; `dtype` stands for unquantized ones."""
    sizes: Counter[str] = Counter()
    for tensor in model_tensors(model, list(types)):
        if len(tensor.shape) > 1 and tensor.role not in ("router", "table"):
            kind = types[tensor.name]
            sizes[kind if isinstance(kind, str) else dtype] += tensor.num_elements
    *others, last = (name for name, _ in sizes.most_common())
    return f"{', '.join(others)} and {last}" if others else last


def _build(context: LayerContext, config: ModelConfig, tensor_names: Sequence[str]) -> Decoder:
    """Call build_model. If memory runs out, config.json is wrong, because the stored weights were found to fit."""
    try:
        return build_model(context, config, tensor_names)
    except torch.OutOfMemoryError:
        # That of a GPU, which other programs may have taken since.
        raise
    except (MemoryError, OSError, RuntimeError) as error:
        # PyTorch has no separate exception for a lack of memory on a CPU.
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise ModelLoadError(
            f"there is no memory for a model of the sizes in config.json ({str(error)[:100]})\n"
            "  do config.json and the weights belong together? download or copy both again"
        ) from error


def num_parameters(module: nn.Module) -> int:
    """Count the parameters of this rank as the model defines them. A weight format may store more numbers, or fewer."""
    if isinstance(module, HoldsWeights):
        return module.num_parameters
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return own + sum(num_parameters(child) for child in module.children())
