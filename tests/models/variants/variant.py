"""Variant: one line of the tables in this folder, an architecture and the config.json entries that are not usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

COMMON: dict[str, Any] = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
# For architectures whose heads always share out hidden_size: 6 heads of 16.
NO_HEAD_DIM: dict[str, Any] = {"hidden_size": 96, "head_dim": None}
# Logits may differ by this from transformers' in float32; by the second where experts or latent keys are summed.
TOLERANCE, LOOSE_TOLERANCE = 1e-4, 2e-4


@dataclass(frozen=True)
class Variant:
    """config: a class of transformers, without "Config". entries: entries of config.json over COMMON; None: left out.

    nulls: entries that are null. engine: options of the engine that the variant needs. one_by_one: transformers' logits
    depend on the number of tokens that it gets at once, and ours are those that it computes for one token after the
    other. foreign: the first operation of a step that the native library lacks, so that no step is recorded.
    """

    config: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    nulls: tuple[str, ...] = field(default=(), kw_only=True)
    engine: Mapping[str, Any] = field(default_factory=dict)
    is_loose: bool = False
    foreign: str | None = None
    one_by_one: bool = False
    patch: Callable[[nn.Module], None] = lambda model: None

    @property
    def tolerance(self) -> float:
        return LOOSE_TOLERANCE if self.is_loose else TOLERANCE

    def all_entries(self) -> dict[str, Any]:
        """The arguments of transformers' config."""
        given = {name: value for name, value in {**COMMON, **self.entries}.items() if value is not None}
        return given | dict.fromkeys(self.nulls)


def rope(kind: str = "default", theta: float = 10000.0, **entries: Any) -> dict[str, Any]:
    """The entry rope_parameters."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **entries}}
