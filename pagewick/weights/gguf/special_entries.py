"""Entries of config.json that follow from several keys of a GGUF file, by its architecture. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pagewick.weights.gguf.metadata import Metadata

# Numbers of layers of the largest Gemma 2 and 3, which scale scores by hidden_size / num_heads, others by head_dim.
_WIDE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
_SLIDING_PATTERN: Final = "attention.sliding_window_pattern"
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def special_entries(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the tables of architectures cannot say. found: those that they do.

    Raises ModelLoadError for a key that is missing or malformed.
    """
    special = _SPECIAL.get(metadata.kind)
    return {} if special is None else special(metadata, found)


def _gemma(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    is_wide = found["num_hidden_layers"] == _WIDE_GEMMAS[metadata.kind]
    width = found["hidden_size"] // found["num_attention_heads"] if is_wide else found["head_dim"]
    cases: dict[str, Any] = {"query_pre_attn_scalar": width}
    pattern = metadata.values.get(f"{metadata.kind}.{_SLIDING_PATTERN}")
    if isinstance(pattern, list):
        cases["layer_types"] = [_SLIDING if slides else _FULL for slides in pattern]
    elif isinstance(pattern, int):
        cases["sliding_window_pattern"] = pattern
    return cases


def _gemma2(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    # The caps are null where a file has none.
    caps = {name: found.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return _gemma(metadata, found) | caps


def _gpt_oss(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": {**found["rope_scaling"], "truncate": False}} if "rope_scaling" in found else {}


def _phi3(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    return {} if found.get("sliding_window") else {"sliding_window": None}


def _linear_attention(metadata: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    inner_size, num_heads = metadata.get("ssm.inner_size"), found["linear_num_value_heads"]
    cases: dict[str, Any] = {"linear_value_head_dim": inner_size // max(1, num_heads)}
    kinds = metadata.of_layers("attention.recurrent_layers", found["num_hidden_layers"])
    if kinds is not None:
        cases["layer_types"] = [_LINEAR if is_linear else _FULL for is_linear in kinds]
    return cases


_SPECIAL: Final[Mapping[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma,
    "gpt-oss": _gpt_oss,
    "phi3": _phi3,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _linear_attention),
}
