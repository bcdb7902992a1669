"""Arcee, Nemotron, Jais 2, NanoChat and Apertus, whose MLPs have no gate."""

from __future__ import annotations

import torch
from torch import nn

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}


def bend(model: nn.Module) -> None:
    """Give the activation of each layer numbers of its own."""
    for name, number in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("alpha_p", "alpha_n")):
            torch.nn.init.uniform_(number, -1.5, 0.5)
        elif name.endswith("act_fn.beta"):
            number.fill_(0.3)


VARIANTS = {
    "arcee": Variant("Arcee", {**rope(theta=5e4), "rms_norm_eps": 1e-4}),
    "arcee-bias-tied": Variant(
        "Arcee",
        {
            **rope("yarn", 1e3, factor=4.0, original_max_position_embeddings=40), "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "silu",
        },
    ),
    "nemotron": Variant("Nemotron", {**rope(theta=5e4, partial_rotary_factor=0.5), "norm_eps": 1e-3}),
    "nemotron-bias": Variant(
        "Nemotron",
        {
            **NO_HEAD_DIM, **rope(partial_rotary_factor=0.25), "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "jais-2": Variant("Jais2", {**rope(theta=5e4), "layer_norm_eps": 1e-3, "tie_word_embeddings": True}),
    "nanochat": Variant(
        "NanoChat", {**rope(theta=5e3), "rms_norm_eps": 1e-3, "final_logit_softcapping": 4.0, "attention_bias": True}
    ),
    "apertus": Variant(
        "Apertus", {**NO_HEAD_DIM, **rope("llama3", 1e6, **LLAMA3), "rms_norm_eps": 1e-4}, patch=bend
    ),
    "apertus-bias-relu2": Variant(
        "Apertus",
        {
            **NO_HEAD_DIM, **rope("llama3", 5e4, **LLAMA3), "attention_bias": True, "tie_word_embeddings": True,
            "hidden_act": "relu2",
        },
    ),
}  # fmt: skip
