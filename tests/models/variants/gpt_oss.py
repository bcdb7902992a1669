"""gpt-oss: sinks, windows in every other layer, experts with biases and a clamped activation, YaRN without rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.variant import Variant, rope

YARN = {"factor": 6.0, "original_max_position_embeddings": 40, "beta_fast": 16.0, "beta_slow": 1.0, "truncate": False}
EXPERTS: dict[str, Any] = {"num_local_experts": 7, "num_experts_per_tok": 4, "intermediate_size": 32}


@torch.no_grad()
def _revealed(model: nn.Module) -> None:
    """Make the sinks as large as scores, and the inputs of the activation reach its bounds."""
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.uniform_(-1, 4)
        elif name.endswith("gate_up_proj"):
            weight.mul_(2.0)


VARIANTS = {
    "gpt-oss": Variant(
        "GptOss",
        {**EXPERTS, **rope("yarn", 1e3, **YARN), "sliding_window": 20, "rms_norm_eps": 1e-3},
        patch=_revealed,
        is_loose=True,
    ),
    "gpt-oss-no-bias": Variant(
        "GptOss",
        {
            **EXPERTS, **rope("yarn", 1e4, **{**YARN, "factor": 3.0, "truncate": True}), "sliding_window": 33,
            "attention_bias": False, "num_key_value_heads": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True,
        },
        patch=_revealed,
        is_loose=True,
    ),
}  # fmt: skip
