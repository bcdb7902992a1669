"""EngineConfig: all engine options, and the table of other names for them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pagewick.errors import ConfigError

BUILTIN_MODEL = "pagewick-demo"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
}
DEVICES = ("auto", "cpu", "cuda", "mps")
HUBS = ("huggingface", "modelscope")
SPECULATIVE_METHODS = ("none", "ngram", "draft")
# Fields in bytes.
SIZES = ("kv_cache_memory", "swap_space", "kv_cache_disk_size")
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# On a CPU a step of 2,048 tokens takes seconds, during which running streams wait.
DEFAULT_MAX_NUM_PREFILL_TOKENS = {"cpu": 512, "cuda": 2048, "mps": 1024}
# On a CPU, scheduling would compete with the running step for cores. A GPU would wait for the host between two steps.
DEFAULT_STEPS_IN_FLIGHT = {"cpu": 1, "cuda": 2, "mps": 1}
DEFAULT_SWAP_SPACE = {"cpu": 0, "cuda": 4 * 2**30, "mps": 0}

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str | int) -> int:
    """Parse a size such as `4GiB`, `512M` or a number of bytes; units are powers of 1024. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write bytes or a unit, for example 4GiB or 512M")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _option(default: Any, description: str) -> Any:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Immutable options of an engine, with vLLM's names. Raises ConfigError if a value is out of range.

    For `None` and "auto", `resolve` chooses a value at start-up from the model and the machine.
    """

    model: str = _option(BUILTIN_MODEL, "Model directory, Hugging Face id, or the built-in model.")
    revision: str | None = _option(None, "Branch, tag or commit of a model on a hub.")
    hub: str = _option("huggingface", "Hub to download models from: huggingface or modelscope.")
    dtype: str = _option("auto", "Data type of the weights: auto (the checkpoint's), float32, bfloat16 or float16.")
    device: str = _option("auto", "Device to run on: auto (a GPU if there is one), cpu, cuda or mps.")
    num_experts_offload_per_rank: int = _option(0, "Experts of each layer to keep in host memory, times the ranks.")
    max_model_len: int | None = _option(None, "Longest sequence, prompt and output together, in tokens.")
    rope_scaling: str | None = _option(None, "Replace the model's rope scaling; JSON, as in config.json.")
    rope_theta: float | None = _option(None, "Replace the model's base of the rotary frequencies.")
    max_num_seqs: int = _option(32, "Largest number of sequences that run at the same time.")
    max_num_batched_tokens: int = _option(DEFAULT_MAX_NUM_BATCHED_TOKENS, "Largest number of tokens in one step.")
    max_num_prefill_tokens: int | None = _option(
        None, "Prompt tokens in a step beside running sequences (512 on a CPU)."
    )
    max_steps_in_flight: int | None = _option(
        None, "Steps scheduled or computed at the same time (2 on a GPU, else 1)."
    )
    block_size: int | None = _option(None, "Tokens in a block of the KV cache.")
    kv_cache_memory: int | None = _option(None, "Memory for the KV cache, for example 4GiB.")
    num_kv_blocks: int | None = _option(None, "Number of KV cache blocks (instead of --kv-cache-memory).")
    kv_cache_dtype: str = _option(
        "auto", "Data type of the KV cache: auto (the model's), float32, bfloat16 or float16."
    )
    enable_prefix_caching: bool = _option(True, "Reuse the KV cache of prompt prefixes that requests have in common.")
    swap_space: int | None = _option(None, "Host memory for KV blocks that do not fit (4GiB on a GPU, else 0).")
    kv_cache_disk: str | None = _option(None, "Directory that keeps KV blocks of prefixes, also over restarts.")
    kv_cache_disk_size: int = _option(16 * 2**30, "Largest size of --kv-cache-disk.")
    session_ttl: float = _option(600.0, "Seconds to keep a session's KV blocks after its last request.")
    max_waiting_requests: int | None = _option(None, "Requests that may wait (1024 in a server, else no limit).")
    max_waiting_tokens: int | None = _option(None, "Prompt tokens of the requests that may wait.")
    request_timeout: float | None = _option(None, "Seconds after which a request that sets no timeout is ended.")
    speculative_method: str = _option("none", "Source of draft tokens: none, ngram (the text) or draft (a model).")
    speculative_model: str | None = _option(None, "Directory or id of the draft model, for --speculative-method draft.")
    num_speculative_tokens: int = _option(4, "Draft tokens of a sequence in each step.")
    ngram_prompt_lookup_min: int = _option(2, "Shortest run of tokens that ngram looks up.")
    ngram_prompt_lookup_max: int = _option(4, "Longest run of tokens that ngram looks up.")
    speculative_max_batch: int = _option(8, "Steps with more sequences than this use no draft tokens.")
    tensor_parallel_size: int = _option(1, "Processes that share each layer; must divide the attention heads.")
    num_threads: int | None = _option(None, "Number of CPU threads (default: the machine's cores).")
    seed: int | None = _option(None, "Draw the seeds of requests that set none from this seed.")

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", json.dumps(self.rope_scaling))
        for name in SIZES:
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, parse_bytes(getattr(self, name)))
        for name in ("dtype", "kv_cache_dtype"):
            object.__setattr__(self, name, DTYPE_ALIASES.get(getattr(self, name), getattr(self, name)))
        check_choice("hub", self.hub, HUBS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, DTYPES)
        if self.device.partition(":")[0] not in DEVICES:
            check_choice("device", self.device, DEVICES)
        for name in (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory",
            "num_kv_blocks", "tensor_parallel_size", "num_threads", "kv_cache_disk_size", "max_waiting_requests",
            "max_waiting_tokens", "num_speculative_tokens", "ngram_prompt_lookup_min", "ngram_prompt_lookup_max",
            "speculative_max_batch", "max_num_prefill_tokens", "max_steps_in_flight",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and _default_of(name) is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{flag_of(name)} must be a whole number above 0; got {value!r}")
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ConfigError("give --kv-cache-memory or --num-kv-blocks, not both")
        _not_negative("num_experts_offload_per_rank", self.num_experts_offload_per_rank, int)
        self._check_cache_tiers()
        self._check_speculation()

    def _check_cache_tiers(self) -> None:
        if self.swap_space and self.swap_space < 2**20:
            raise ConfigError(f"--swap-space {self.swap_space} is less than 1 MiB; write a unit, for example 4GiB")
        if self.swap_space is not None:
            _not_negative("swap_space", self.swap_space)
        _not_negative("session_ttl", self.session_ttl)
        if self.request_timeout is not None:
            _not_negative("request_timeout", self.request_timeout)
        if self.kv_cache_disk is not None and not self.enable_prefix_caching:
            raise ConfigError("--kv-cache-disk keeps prefixes, which --no-enable-prefix-caching switches off")

    def _check_speculation(self) -> None:
        check_choice("speculative_method", self.speculative_method, SPECULATIVE_METHODS)
        if self.speculative_model is not None and self.speculative_method == "none":
            object.__setattr__(self, "speculative_method", "draft")
        if self.speculative_model is not None and self.speculative_method != "draft":
            raise ConfigError("--speculative-model is for --speculative-method draft")
        if self.speculative_model is None and self.speculative_method == "draft":
            raise ConfigError("--speculative-method draft needs a --speculative-model")
        if self.ngram_prompt_lookup_min > self.ngram_prompt_lookup_max:
            raise ConfigError(
                f"--ngram-prompt-lookup-min {self.ngram_prompt_lookup_min} is above --ngram-prompt-lookup-max "
                f"{self.ngram_prompt_lookup_max}"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Make a config from keyword options, under any of the names in ALIASES.

        Raises ConfigError for an unknown option, naming the nearest known one, and for an option given twice.
        """
        values: dict[str, Any] = {}
        for name, value in options.items():
            target, convert = _lookup(name)
            if target in values:
                raise ConfigError(f"{flag_of(target)} is given twice (once as {flag_of(name)})")
            values[target] = convert(value) if convert is not None and value is not None else value
        return cls(**values)

    def check_max_model_len(self, longest_context: int) -> None:
        """Raises ConfigError if max_model_len exceeds the model's context."""
        if self.max_model_len is not None and self.max_model_len > longest_context:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is longer than the model's context of {longest_context} "
                f"tokens; use at most {longest_context}"
            )

    def resolve(
        self,
        *,
        max_position_embeddings: int,
        checkpoint_dtype: str,
        device: str,
        block_size: int,
        num_cores: int,
        longest_context: int | None = None,
    ) -> EngineConfig:
        """Choose a value for every field that is None or "auto", except those for the size of the KV cache.

        max_position_embeddings, checkpoint_dtype: from the model; device, block_size, num_cores: from the machine.
        longest_context: the longest context that the model supports, if more than max_position_embeddings.
        """
        self.check_max_model_len(longest_context or max_position_embeddings)
        max_model_len = self.max_model_len or max_position_embeddings
        dtype = checkpoint_dtype if self.dtype == "auto" else self.dtype
        kind = device.partition(":")[0]
        return replace(
            self,
            max_num_prefill_tokens=self.max_num_prefill_tokens or DEFAULT_MAX_NUM_PREFILL_TOKENS[kind],
            max_steps_in_flight=self.max_steps_in_flight or DEFAULT_STEPS_IN_FLIGHT[kind],
            swap_space=DEFAULT_SWAP_SPACE[kind] if self.swap_space is None else self.swap_space,
            device=device,
            dtype=dtype,
            kv_cache_dtype=dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            max_model_len=max_model_len,
            block_size=self.block_size or block_size,
            num_threads=self.num_threads or num_cores,
        )


def _mebibytes(value: int) -> int:
    return parse_bytes(f"{value}M")


def _gibibytes(value: float) -> int:
    return parse_bytes(f"{value}G")


def _cpu(value: bool) -> str:
    return "cpu" if value else "auto"


def opposite(value: bool) -> bool:
    return not value


def _num_devices(value: str) -> int:
    """Count the devices in a list such as 0,1. CUDA_VISIBLE_DEVICES decides which devices these are."""
    ids = [part.strip() for part in str(value).split(",")]
    if ids != [str(number) for number in range(len(ids))]:
        raise ConfigError(
            f"devices {value!r} are not the first ones, 0,1,...; set CUDA_VISIBLE_DEVICES={value} and give "
            f"--tensor-parallel-size {len(ids)}"
        )
    return len(ids)


def _hub_id(value: str) -> str:
    model, _, quantization = value.partition(":")
    if quantization:
        raise ConfigError(
            f"{value!r} asks for the quantization {quantization}, which is not supported yet; give the id of a model "
            "with unquantized safetensors"
        )
    return model


def _unless_0(value: int) -> int | None:
    """In llama.cpp, 0 means the model's own value."""
    return value or None


def unless_negative(value: int) -> int | None:
    """In llama.cpp, -1 means automatic."""
    return None if value < 0 else value


# Sections of the help, each with its first field; the following fields belong to the same section.
SECTIONS = {
    "Model": "model",
    "Sequences": "max_model_len",
    "KV cache": "block_size",
    "Queue": "max_waiting_requests",
    "Speculative decoding": "speculative_method",
    "Processes": "tensor_parallel_size",
}

# Other names for EngineConfig's fields, from vLLM, llama.cpp, candle-vllm and vllm.rs: name -> (field, conversion). The
# conversion's annotation gives the type of its input. cli/foreign_flags.py lists names without a field;
# docs/coming-from.md lists both.
ALIASES: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "m": ("model", None),
    "w": ("model", None),
    "model_id": ("model", None),
    "model_path": ("model", None),
    "weight_path": ("model", None),
    "max_seq_len": ("max_model_len", None),
    "ctx_size": ("max_model_len", _unless_0),
    "rope_freq_base": ("rope_theta", None),
    "hf_repo": ("model", _hub_id),
    "cpu": ("device", _cpu),
    "batch_size": ("max_num_batched_tokens", None),
    "prefill_chunk_size": ("max_num_batched_tokens", None),
    "d": ("tensor_parallel_size", _num_devices),
    "device_ids": ("tensor_parallel_size", _num_devices),
    "parallel": ("max_num_seqs", None),
    "tp": ("tensor_parallel_size", None),
    "num_shards": ("tensor_parallel_size", None),
    "num_gpu_blocks_override": ("num_kv_blocks", None),
    "num_blocks": ("num_kv_blocks", None),
    "kv_cache_memory_bytes": ("kv_cache_memory", None),
    "kvcache_mem_gpu": ("kv_cache_memory", _mebibytes),
    "mem": ("kv_cache_memory", _mebibytes),
    "kvmem": ("kv_cache_memory", _mebibytes),
    "kvcache_dtype": ("kv_cache_dtype", None),
    "prefix_cache": ("enable_prefix_caching", None),
    "context_cache": ("enable_prefix_caching", None),
    "cache_prompt": ("enable_prefix_caching", None),
    "disable_prefix_cache": ("enable_prefix_caching", opposite),
    "kv_offloading_size": ("swap_space", _gibibytes),
    "max_num_queued_reqs": ("max_waiting_requests", None),
    "max_num_queued_tokens": ("max_waiting_tokens", None),
    "kvcache_mem_cpu": ("swap_space", _mebibytes),
    "model_draft": ("speculative_model", None),
    "spec_draft_model": ("speculative_model", None),
    "draft": ("num_speculative_tokens", None),
    "draft_n": ("num_speculative_tokens", None),
    "draft_max": ("num_speculative_tokens", None),
    "threads": ("num_threads", unless_negative),
}
# Short flags for fields and aliases.
SHORT_FLAGS: dict[str, tuple[str, ...]] = {
    "model": ("-m",),
    "ctx_size": ("-c",),
    "hf_repo": ("-hf", "-hfr"),
    "batch_size": ("-b",),
    "parallel": ("-np",),
    "tp": ("-tp",),
    "model_draft": ("-md",),
    "threads": ("-t",),
}


def _lookup(name: str) -> tuple[str, Callable[[Any], Any] | None]:
    known = [option.name for option in fields(EngineConfig)]
    if name in known:
        return name, None
    if name in ALIASES:
        return ALIASES[name]
    near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
    raise ConfigError(f"unknown option {name}{hint}")


def _default_of(name: str) -> Any:
    return next(option.default for option in fields(EngineConfig) if option.name == name)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _not_negative(name: str, value: Any, kind: Any = int | float) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigError(f"{flag_of(name)} must be a {'whole ' * (kind is int)}number, 0 or more; got {value!r}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag_of(name)} must be one of {', '.join(allowed)}; got {value!r}")
