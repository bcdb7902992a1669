"""The models with a layer that predicts further tokens, whose files `files/mtp/` has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from tests.models.predicting import EXAONE, NEMOTRON, Predicting, nextn
from tests.weights.gguf.models import MODELS as OTHERS
from tests.weights.gguf.models_2026 import SIZES

_KINDS: Final = ["linear_attention", "linear_attention", "full_attention"]
# Entries that differ from the variant: those of files without this layer, and the number of layers.
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm-4.5": {"num_hidden_layers": 2},
    "k-exaone": {
        "layout": EXAONE,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    # The converter knows no copies of the embedding and the head here.
    "ling-3-flash": {
        "layout": replace(nextn("final_layernorm"), has_copies=False),
        "num_hidden_layers": 3,
        "layer_types": _KINDS,
    },
    "nemotron-3-latents": {"layout": NEMOTRON},
    "qwen3-next": {"is_like_qwen": True, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


def original(name: str) -> Predicting:
    """The model that the file was converted from."""
    made = Predicting(name, **{**SIZES, **OTHERS[name], **MODELS[name]})
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_((weight * 16).round() / 16)
    return made
