"""Falcon-H1. Llama, except:

- Each layer has Mamba-2 beside its attention. Both read the same, and their outputs are added.
- Inputs, outputs and products in between are multiplied by numbers of config.json.
"""

from __future__ import annotations

import math
from typing import Final

from pagewick.layers.state_config import MambaConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mamba_entries import read_mamba
from pagewick.models.name_map import NameMap
from pagewick.models.parts import BesideConfig, LayerConfig, NormConfig

_NAMES: Final = NameMap(
    parts=(
        ("mlp", "feed_forward"),
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
    )
)
_DEFAULTS: Final = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def read_falcon_h1(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    for name in ("attention_bias", "mlp_bias"):
        # Factors of inputs are factors of outputs only without them.
        entries.demand(name, False, False)
    eps, scale = entries.positive("rms_norm_eps"), _factor(entries, "attention_in_multiplier")
    attention = reading.read_attention(entries)
    # Queries and keys have the factor of their inputs, and so have values, and the sums of these.
    of_scores = attention.softmax_scale * scale * scale * _factor(entries, "key_multiplier")
    if not 0 < of_scores < math.inf:
        raise entries.wrong("attention_in_multiplier", "a number that is not too large or too small")
    attention = reading.read_attention(entries, softmax_scale=of_scores)
    of_gate, of_output = _factors(entries, "mlp_multipliers", 2)
    mlp = reading.read_mlp(entries, in_scale=of_gate, out_scale=of_output / of_gate)
    beside = BesideConfig(
        mamba=_read_mamba(entries, eps),
        scale=_factor(entries, "ssm_out_multiplier"),
        attention_scale=scale * _factor(entries, "attention_out_multiplier"),
    )
    rope = reading.read_rope_of(entries, attention)
    layer = LayerConfig(attention=attention, mlp=mlp, rope=rope, beside=beside)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=(layer,) * reading.read_num_layers(entries),
        embedding_scale=_factor(entries, "embedding_multiplier"),
        logit_scale=_factor(entries, "lm_head_multiplier"),
        names=(_NAMES,),
    )


def _read_mamba(entries: Entries, eps: float) -> MambaConfig:
    first = _factor(entries, "ssm_in_multiplier")
    gates, values, keys, queries, steps = (first * factor for factor in _factors(entries, "ssm_multipliers", 5))
    # The input projection has biases by another entry than the output projection, and its factors are its biases', too.
    entries.demand("mamba_proj_bias", False, False)
    entries.demand("projectors_bias", False, False)
    num_values = entries.size("mamba_expand", 2) * entries.size("hidden_size")
    if "mamba_d_ssm" not in entries.values or entries.get("mamba_d_ssm") is not None:
        num_values = entries.size("mamba_d_ssm", 1024)
    return read_mamba(
        entries,
        norm_eps=eps,
        num_values=num_values,
        has_norm=entries.flag("mamba_rms_norm", False),
        is_norm_first=entries.flag("mamba_norm_before_gate", True),
        scales=(gates, values, keys, queries, steps),
    )


def _factor(entries: Entries, name: str) -> float:
    return entries.positive(name, 1.0)


def _factors(entries: Entries, name: str, count: int) -> tuple[float, ...]:
    factors = entries.numbers(name)
    if factors is None:
        return (1.0,) * count
    if len(factors) != count or min(factors) <= 0:
        raise entries.wrong(name, f"a list of {count} numbers above 0")
    return factors
