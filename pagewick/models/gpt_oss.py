"""gpt-oss. Llama, except:

- Every other layer has a window. Queries, keys, values and outputs have biases; a head's softmax has a sink.
- All layers are mixtures of experts with biases and a clamped activation. The router has a bias, and the weights of a
  token's experts are the softmax of their logits alone.
- YaRN, whose ramp begins and ends between pairs.
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig

_DEFAULTS: Final = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# The numbers of the activation that the kernels know as clamped_swish.
_ALPHA, _LIMIT = 1.702, 7.0


def read_gpt_oss(entries: Entries) -> ModelConfig:
    if "rope_scaling" not in entries and "rope_parameters" not in entries:
        theta = entries.positive("rope_theta", _YARN["rope_theta"])
        entries = entries.filled({"rope_parameters": {**_YARN, "rope_theta": theta}})
    entries = entries.filled(_DEFAULTS)
    entries.demand("hidden_act", "silu", "silu", "the experts' activation is part of the architecture")
    entries.demand("swiglu_alpha", _ALPHA, _ALPHA, "another factor within the experts' activation is not supported")
    entries.demand("swiglu_limit", _LIMIT, _LIMIT, "another bound of the experts' activation is not supported")
    has_bias = entries.flag("attention_bias", True)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, has_sinks=True)
    mixture = reading.make_moe(
        {"top_k": entries.size("num_experts_per_tok"), "renormalize": True},
        num_experts=entries.size("num_local_experts"),
        intermediate_size=entries.size("intermediate_size"),
        activation="clamped_swish",
        has_logit_bias=True,
        has_expert_biases=True,
    )
    num_layers = reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [layer_idx % 2 == 0 for layer_idx in range(num_layers)])
    rope = reading.read_rope_of(entries, attention, default_theta=_YARN["rope_theta"])
    return reading.model_config(
        entries,
        layers=tuple(LayerConfig(attention=attention, mlp=mixture, rope=rope, window=window) for window in windows),
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)),
        names=(NameMap(parts=(("mlp.gate", "mlp.router"), ("sinks.weight", "sinks"))),),
    )
