"""MiniMax-M2. Llama, except:

- Experts in all layers, chosen by sigmoid and a learned bias, with normalised weights. Tensors have Mixtral's names.
- Queries and keys are normalised, each over all heads together. A part of each head is rotated.
- Further layers that predict later tokens are announced in config.json and are not in the files.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, NormConfig

_DEFAULTS: Final = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 196608}
_NAMES: Final = NameMap(
    parts=(
        ("mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
        ("mlp", "block_sparse_moe"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
    )
)
# These are in files that transformers writes as it computes.
_NEW_NAMES: Final = NameMap(parts=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),))
# Entries of the published file that nobody else has a second value of.
_ONLY: Final = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


def read_minimax_m2(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"num_local_experts": "num_experts"}).filled(_DEFAULTS)
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    if set(entries.sizes("attn_type_list", least=0) or ()) - {1}:
        raise entries.wrong("attn_type_list", "a list of 1: linear attention is not supported")
    eps = entries.positive("rms_norm_eps", 1e-6)
    attention = reading.read_attention(entries, head_norm=HeadNormConfig(eps=eps, is_joint=True))
    num_experts = entries.size("num_local_experts", 256)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 8, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": True,
        },
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
        has_router_bias=True,
    )
    rotated = entries.size("rotary_dim", attention.head_dim, most=attention.head_dim) / attention.head_dim
    rope = reading.read_rope_of(entries, attention, default_theta=5e6, default_partial_rotary_factor=rotated)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, moe, rope),
        names=(_NAMES, _NEW_NAMES),
    )
