"""Other names for EngineConfig's fields, from vLLM, llama.cpp, candle-vllm and vllm.rs; foreign_names.py has the rest.

docs/coming-from.md explains all of them to users; a test compares it with these tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagewick.errors import ConfigError


def in_bytes(value: str) -> int | str:
    """In vLLM, a number without a unit is in bytes."""
    return int(value) if str(value).isdecimal() else value


def _mebibytes(value: int) -> str:
    return f"{value}M"


def _gibibytes(value: float) -> str:
    return f"{value}G"


def _cpu(value: bool) -> str:
    return "cpu" if value else "auto"


def _fp8(value: bool) -> str:
    return "fp8_e4m3" if value else "auto"


def opposite(value: bool) -> bool:
    return not value


def _devices(value: str) -> Any:
    """Count the devices in a list such as 0,1. A single one other than 0 is the field `device` instead."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    ids = [str(part).strip() for part in parts]
    if len(ids) == 1 and ids[0].isdecimal() and ids[0] != "0":
        return {"device": f"cuda:{ids[0]}"}
    if ids != [str(number) for number in range(len(ids))]:
        text = ",".join(ids)
        raise ConfigError(
            f"devices {text!r} are not the first ones, 0,1,...; set CUDA_VISIBLE_DEVICES={text} and give "
            f"--tensor-parallel-size {len(ids)}"
        )
    return len(ids)


def _layers_on_gpu(value: str) -> Any:
    """In llama.cpp, 0 keeps the model on the CPU; 99 and the like put all of it on a GPU, if there is one."""
    if str(value) == "0":
        return "cpu"
    if str(value) in ("99", "999", "-1", "all", "auto"):
        return {}
    raise ConfigError(
        f"{value} layers on a GPU: a model is not split between a GPU and a CPU; give 0, or 99 or all, or --device"
    )


_SPECULATION = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "ngram_prompt_lookup_min",
    "prompt_lookup_max": "ngram_prompt_lookup_max",
    "disable_by_batch_size": "speculative_max_batch",
}


def _object(value: Any, what: str, example: str) -> Mapping[str, Any]:
    """Return an object, or what its JSON says. what: the value's name for errors. Raises ConfigError."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{what} must be an object such as {example}; got {value!r}")
    return found


def _method(value: str) -> str:
    """vLLM also has names such as deepseek_mtp, one for each family, and llama.cpp several ways to look up n-grams."""
    if str(value).endswith(("_mtp", "-mtp")):
        return "mtp"
    if str(value).startswith("ngram-"):
        return "ngram"
    return {"draft_model": "draft", "draft-simple": "draft"}.get(value, value)


def _speculation(value: str) -> Any:
    """vLLM's settings of speculative decoding, as an object or its JSON."""
    settings = _object(value, "settings of speculation", '{"method": "mtp"}')
    if unknown := settings.keys() - _SPECULATION.keys():
        raise ConfigError(
            f"unknown setting of speculation {sorted(unknown)[0]!r}; the settings are {', '.join(_SPECULATION)}"
        )
    found = {_SPECULATION[name]: setting for name, setting in settings.items() if setting is not None}
    if isinstance(method := found.get("speculative_method"), str):
        found["speculative_method"] = _method(method)
    return found


def _unless_0(value: int) -> int | None:
    """In llama.cpp, 0 means the model's own value."""
    return value or None


def unless_negative(value: int) -> int | None:
    """In llama.cpp, -1 means automatic."""
    return None if value < 0 else value


def _without_images(value: str) -> Any:
    """vLLM's limits of media by kind, as an object or its JSON. A limit of 0 images leaves the vision part out."""
    limits = _object(value, "limits of media", '{"image": 0}')
    if any(limit != 0 for limit in limits.values()):
        raise ConfigError('the only limit of media is 0: {"image": 0} leaves out the part that reads images')
    return "image" in limits


def _reranker(value: str) -> Any:
    """vLLM's entries in place of config.json's, as an object or its JSON: those that make a model a Qwen3-Reranker."""
    try:
        entries = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        entries = value
    if entries == {}:
        return {}
    if entries == _QWEN3_RERANKER or entries == {**_QWEN3_RERANKER, "classifier_from_token": ("no", "yes")}:
        return True
    raise ConfigError(
        "the only overrides of config.json are those for Qwen3-Reranker; copy the model's directory and change it "
        "there, or give --rope-scaling and --rope-theta if the override is for these"
    )


_QWEN3_RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
# Name -> (field, conversion). The conversion's annotation gives the type of its input.
ALIASES: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "m": ("model", None),
    "w": ("model", None),
    "model_id": ("model", None),
    "model_path": ("model", None),
    "weight_path": ("model", None),
    "max_seq_len": ("max_model_len", None),
    "ctx_size": ("max_model_len", _unless_0),
    "rope_freq_base": ("rope_theta", None),
    "hf_repo": ("model", None),
    "f": ("weight_file", None),
    "hf_file": ("weight_file", None),
    "gguf_file": ("weight_file", None),
    "isq": ("quantization", None),
    "limit_mm_per_prompt": ("language_model_only", _without_images),
    "no_mmproj": ("language_model_only", None),
    "mmproj_auto": ("language_model_only", opposite),
    "reranking": ("rerank", None),
    "hf_overrides": ("rerank", _reranker),
    "quant": ("quantization", None),
    "cpu": ("device", _cpu),
    "n_gpu_layers": ("device", _layers_on_gpu),
    "gpu_layers": ("device", _layers_on_gpu),
    "batch_size": ("max_num_batched_tokens", None),
    "prefill_chunk_size": ("max_num_batched_tokens", None),
    "d": ("tensor_parallel_size", _devices),
    "device_ids": ("tensor_parallel_size", _devices),
    "parallel": ("max_num_seqs", None),
    "tp": ("tensor_parallel_size", None),
    "num_shards": ("tensor_parallel_size", None),
    "pp": ("pipeline_parallel_size", None),
    "num_gpu_blocks_override": ("num_kv_blocks", None),
    "num_blocks": ("num_kv_blocks", None),
    "mem_fraction_static": ("gpu_memory_utilization", None),
    "kv_cache_memory_bytes": ("kv_cache_memory", in_bytes),
    "kvcache_mem_gpu": ("kv_cache_memory", _mebibytes),
    "mem": ("kv_cache_memory", _mebibytes),
    "kvmem": ("kv_cache_memory", _mebibytes),
    "kvcache_dtype": ("kv_cache_dtype", None),
    "fp8_kvcache": ("kv_cache_dtype", _fp8),
    "prefix_cache": ("enable_prefix_caching", None),
    "context_cache": ("enable_prefix_caching", None),
    "cache_prompt": ("enable_prefix_caching", None),
    "disable_prefix_cache": ("enable_prefix_caching", opposite),
    "kv_offloading_size": ("swap_space", _gibibytes),
    "max_num_queued_reqs": ("max_waiting_requests", None),
    "max_num_queued_tokens": ("max_waiting_tokens", None),
    "kvcache_mem_cpu": ("swap_space", _mebibytes),
    "model_draft": ("speculative_model", None),
    "hf_repo_draft": ("speculative_model", None),
    "spec_draft_model": ("speculative_model", None),
    "spec_model": ("speculative_model", None),
    "spec_method": ("speculative_method", _method),
    "spec_type": ("speculative_method", _method),
    "spec_draft_n_max": ("num_speculative_tokens", None),
    "speculative_config": ("speculative_method", _speculation),
    "spec_tokens": ("num_speculative_tokens", None),
    "draft": ("num_speculative_tokens", None),
    "draft_n": ("num_speculative_tokens", None),
    "draft_max": ("num_speculative_tokens", None),
    "threads": ("num_threads", unless_negative),
    "disable_cuda_graph": ("enforce_eager", None),
}
# Names of `model` for an id and for a path, which candle-vllm and vllm.rs take together if a GGUF file is named, too.
_IDS, _PATHS = {"m", "model_id"}, {"w", "weight_path", "model_path"}
NO_ID_NEEDED = "the GGUF file has the tokenizer and the configuration"
# Short flags for fields and aliases.
SHORT_FLAGS: dict[str, tuple[str, ...]] = {
    "model": ("-m",),
    "quantization": ("-q",),
    "ctx_size": ("-c",),
    "hf_repo": ("-hf", "-hfr"),
    "hf_file": ("-hff",),
    "mmproj": ("-mm",),
    "n_gpu_layers": ("-ngl",),
    "batch_size": ("-b",),
    "parallel": ("-np",),
    "tp": ("-tp",),
    "pp": ("-pp",),
    "model_draft": ("-md",),
    "hf_repo_draft": ("-hfd", "-hfrd"),
    "threads": ("-t",),
}


def spare_id(names: Iterable[str]) -> str | None:
    """Return the name among those of options that gives an id beside a GGUF file with its directory; None if none."""
    given = set(names)
    has_file = any(ALIASES.get(name, (name,))[0] == "weight_file" for name in given)
    return next(iter(given & _IDS), None) if has_file and given & _PATHS else None
