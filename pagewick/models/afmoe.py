"""Trinity (Afmoe). Llama, except:

- Norms after attention and MLP too. Queries and keys are normalised per head.
- Three of four layers have a window, and only these are rotated.
- Every number of attention's output is multiplied by the sigmoid of a gate of its own.
- All layers but the first have experts, chosen by sigmoid and a learned bias, and a shared one. Weights are normalised.
- With mup_enabled embeddings are scaled by the square root of their size.
"""

from __future__ import annotations

import math
from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, MlpConfig, NormConfig

_NAMES: Final = NameMap(
    parts=(
        ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
        ("self_attn.g_proj", "self_attn.gate_proj"),
        ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
        ("mlp.gate", "mlp.router.gate"),
        ("shared_expert", "shared_experts"),
    )
)
_DEFAULTS: Final = {"head_dim": 128, "max_position_embeddings": 16384}
# Entries of published files of which only one value is implemented.
_ONLY: Final = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def read_afmoe(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    eps, has_bias = entries.positive("rms_norm_eps", 1e-5), entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=HeadNormConfig(eps=eps), has_number_gates=True
    )
    num_experts, size = entries.size("num_experts", 64), entries.size("moe_intermediate_size")
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 6, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": True,
            "scaling": entries.positive("route_scale", 1.0),
        },
        num_experts=num_experts,
        intermediate_size=size,
        activation=reading.read_activation(entries),
        has_router_bias=True,
        shared_intermediate_size=size * entries.size("num_shared_experts", 2),
    )
    num_layers = reading.read_num_layers(entries)
    num_dense = min(num_layers, entries.count("num_dense_layers", 1))
    mlps: list[MlpConfig | MoeConfig] = [reading.read_mlp(entries)] * num_dense if num_dense else []
    mlps += [moe] * (num_layers - num_dense)
    interval = entries.size("global_attn_every_n_layers", 4)
    entries = entries.filled({"sliding_window": 1024})
    windows = reading.read_windows(entries, [(layer_idx + 1) % interval != 0 for layer_idx in range(num_layers)])
    rope = reading.read_rope_of(entries, attention)
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=None if window is None else rope, window=window)
        for mlp, window in zip(mlps, windows, strict=True)
    ]
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        block="sandwich",
        layers=tuple(layers),
        embedding_scale=math.sqrt(entries.size("hidden_size")) if entries.flag("mup_enabled", False) else 1.0,
        names=(_NAMES,),
    )
