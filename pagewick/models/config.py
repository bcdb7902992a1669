"""ModelConfig: the numbers of a checkpoint's config.json, normalised and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewick.errors import ModelLoadError
from pagewick.layers.rope_config import RopeConfig

# Far above any model there is; a larger number is a corrupt file, not a model.
_MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Names are Hugging Face's, only `num_layers`, `num_heads` and `num_kv_heads` shortened; dtype is the weights'.

    extra: the whole config.json, for what only one family has.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    extra: Mapping[str, Any]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config. Raises ModelLoadError naming the entry that is missing or impossible."""
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise _wrong("hidden_act", config["hidden_act"], "silu: other activations are not supported yet")
        if config.get("partial_rotary_factor", 1.0) != 1.0:
            raise _wrong("partial_rotary_factor", config["partial_rotary_factor"], "1: it is not supported yet")
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        num_kv_heads = _size(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise _wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise _wrong("num_attention_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
        return cls(
            architecture=architecture_of(config),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_size(config, "head_dim", default=hidden_size // num_heads),
            vocab_size=_size(config, "vocab_size"),
            max_position_embeddings=_size(config, "max_position_embeddings", default=2048),
            rms_norm_eps=_positive(config, "rms_norm_eps", default=1e-6),
            rope=_rope(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=_dtype(config),
            extra=config,
        )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The checkpoint's architecture name, the key of models.registry. Raises ModelLoadError."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelLoadError(
            'config.json names no architecture; it needs for example "architectures": ["LlamaForCausalLM"]'
        )
    return architectures[0]


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> list[int]:
    """Tokens that end a sequence: generation_config.json's, else config.json's. Raises ModelLoadError."""
    value = generation_config.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in token_ids):
        raise _wrong("eos_token_id", value, "a token id or a list of them")
    return token_ids


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise _wrong("dtype", name, "float32, bfloat16 or float16")
    return name


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise _wrong("rope_scaling", scaling, "an object")
    theta = _positive(scaling if "rope_theta" in scaling else config, "rope_theta", default=10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _positive(scaling, "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=_positive(scaling, "low_freq_factor"),
            high_freq_factor=_positive(scaling, "high_freq_factor"),
            original_max_position_embeddings=_size(scaling, "original_max_position_embeddings"),
        )
    raise ModelLoadError(f"rope scaling {kind!r} is not supported yet; supported are default, linear and llama3")


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
        raise _wrong(name, value, f"a whole number from 1 to {_MAX_SIZE}")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise _wrong(name, value, "a number above 0")
    return float(value)


def _wrong(name: str, value: object, expected: str) -> ModelLoadError:
    shown = "missing" if value is None else f"{value!r}"[:80]
    return ModelLoadError(f"config.json: {name} is {shown}, and must be {expected}")
