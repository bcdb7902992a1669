"""Apertus. Llama, except:

- An MLP without a gate; its activation is xIELU, whose numbers are tensors of each layer.
- Queries and keys are normalised per head.
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import XIELU, HeadNormConfig, NormConfig

_NAMES: Final = NameMap(
    parts=(("input_layernorm", "attention_layernorm"), ("post_attention_layernorm", "feedforward_layernorm"))
)
_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_apertus(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 65536})
    entries.demand("mlp_bias", False, False)
    entries.demand("post_norm", False, False)
    entries.demand("qk_norm", True, True)
    eps, has_bias = entries.positive("rms_norm_eps", 1e-5), entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=HeadNormConfig(eps=eps))
    is_xielu = entries.get("hidden_act") in (None, XIELU)
    activation = XIELU if is_xielu else reading.read_activation(entries)
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False)
    if "rope_parameters" not in entries and "rope_scaling" not in entries and "rope_theta" not in entries:
        entries = entries.replaced({"rope_parameters": _ROPE})
    rope = reading.read_rope_of(entries, attention, default_theta=12000000.0)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        names=(_NAMES,),
    )
