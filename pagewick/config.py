"""EngineConfig: every choice a user can make about the engine, and the one table of other names for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
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
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes from `4GiB`, `512M` or a plain number; units are powers of 1024. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write bytes or a unit, for example 4GiB or 512M")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _option(default: Any, description: str) -> Any:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One immutable description of an engine; names are vLLM's. Raises ConfigError if a value is out of range.

    `None` and "auto" mean: decided at start-up from the model and the machine, by `resolve`.
    """

    model: str = _option(BUILTIN_MODEL, "model directory, Hugging Face id, or the built-in model")
    revision: str | None = _option(None, "branch, tag or commit of a Hugging Face model")
    dtype: str = _option("auto", "auto (the checkpoint's), float32, bfloat16 or float16")
    device: str = _option("auto", "auto (a GPU if there is one), cpu, cuda or mps")
    max_model_len: int | None = _option(None, "longest sequence, prompt and output, in tokens")
    max_num_seqs: int = _option(32, "sequences that run at the same time")
    max_num_batched_tokens: int = _option(DEFAULT_MAX_NUM_BATCHED_TOKENS, "token budget of one step")
    block_size: int | None = _option(None, "tokens per KV cache block")
    kv_cache_memory: int | None = _option(None, "memory for the KV cache, for example 4GiB")
    num_kv_blocks: int | None = _option(None, "number of KV cache blocks (instead of --kv-cache-memory)")
    kv_cache_dtype: str = _option("auto", "auto (the model's dtype) or float32, bfloat16, float16")
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of common prompt prefixes")
    tensor_parallel_size: int = _option(1, "processes that share each layer; must divide the attention heads")
    num_threads: int | None = _option(None, "CPU threads (the machine's cores)")
    seed: int | None = _option(None, "draw the seeds of requests that bring none of their own from this one")

    def __post_init__(self) -> None:
        if isinstance(self.kv_cache_memory, str):
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        for name in ("dtype", "kv_cache_dtype"):
            object.__setattr__(self, name, DTYPE_ALIASES.get(getattr(self, name), getattr(self, name)))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, DTYPES)
        if self.device.partition(":")[0] not in DEVICES:
            _one_of("device", self.device, DEVICES)
        for name in (
            "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory",
            "num_kv_blocks", "tensor_parallel_size", "num_threads",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and _default_of(name) is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{_flag(name)} must be a whole number above 0; got {value!r}")
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ConfigError("give --kv-cache-memory or --num-kv-blocks, not both")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """A config from keyword options under any of the names in ALIASES.

        Raises ConfigError for an unknown option (naming the nearest known one) or one given twice.
        """
        values: dict[str, Any] = {}
        for name, value in options.items():
            target, convert = _lookup(name)
            if target in values:
                raise ConfigError(f"{_flag(target)} is given twice (once as {_flag(name)})")
            values[target] = convert(value) if convert is not None and value is not None else value
        return cls(**values)

    def resolve(
        self, *, max_position_embeddings: int, checkpoint_dtype: str, device: str, block_size: int, num_cores: int
    ) -> EngineConfig:
        """The config with every choice made: no field is None or "auto" but those that size the KV cache.

        max_position_embeddings and checkpoint_dtype are the model's, the others the machine's.
        """
        max_model_len = self.max_model_len or max_position_embeddings
        if max_model_len > max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {max_model_len} is longer than the model's context of {max_position_embeddings} "
                f"tokens; use at most {max_position_embeddings}"
            )
        dtype = checkpoint_dtype if self.dtype == "auto" else self.dtype
        return replace(
            self,
            device=device,
            dtype=dtype,
            kv_cache_dtype=dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            max_model_len=max_model_len,
            block_size=self.block_size or block_size,
            num_threads=self.num_threads or num_cores,
        )


def _mebibytes(value: Any) -> int:
    return parse_bytes(f"{value}M")


# Other names for EngineConfig's fields: vLLM's where ours differs, llama.cpp's, candle-vllm's and vllm.rs's.
ALIASES: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "m": ("model", None),
    "w": ("model", None),
    "model_id": ("model", None),
    "model_path": ("model", None),
    "weight_path": ("model", None),
    "max_seq_len": ("max_model_len", None),
    "ctx_size": ("max_model_len", None),
    "parallel": ("max_num_seqs", None),
    "tp": ("tensor_parallel_size", None),
    "num_shards": ("tensor_parallel_size", None),
    "num_gpu_blocks_override": ("num_kv_blocks", None),
    "num_blocks": ("num_kv_blocks", None),
    "kv_cache_memory_bytes": ("kv_cache_memory", None),
    "kvcache_mem_gpu": ("kv_cache_memory", _mebibytes),
    "mem": ("kv_cache_memory", _mebibytes),
    "prefix_cache": ("enable_prefix_caching", None),
    "threads": ("num_threads", None),
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{_flag(name)} must be one of {', '.join(allowed)}; got {value!r}")
