"""A.X K2: DeepSeek-V3.2, except:

- The norms before attention, and before experts, multiply their outputs by a gate of low rank.
- Attention's outputs have gates. q_b_proj makes a head's query and then its gates, from the query's latent before its
  norm as well as behind it.
- Experts may have no groups. Where they have, A.X K2's own code gives those of other groups a score of 0, so that one
  of them may be chosen before an expert whose score and bias add up to less. Here none is, as in DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, latent_model, layers_by_kind, read_experts, sigmoid_routing
from pagewick.models.deepseek_v32 import read_indexers
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import GATED_NORMS, LayerConfig

_DEFAULTS: Final = {
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": 131072,
    "norm_topk_prob": True,
    "index_n_heads": 16,
}
_NAMES: Final = (
    NameMap(parts=(*SHARED_EXPERTS.parts, ("gate_down", "W_down"), ("gate_up", "W_up"))),
    # These are in files that transformers writes as it computes.
    NameMap(
        parts=(
            *SHARED_EXPERTS.parts,
            ("gate_down", "mlp.fc1"),
            ("gate_up", "mlp.fc2"),
            ("q_b_proj", "q_gate_proj"),
        )
    ),
)


def read_axk2(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    entries.demand("rope_interleave", True, True)
    entries.demand("indexer_rope_interleave", False, False)
    if "n_group" not in entries and "topk_group" not in entries:
        entries = entries.replaced({"n_group": 1, "topk_group": 1})
    num_experts = entries.size("n_routed_experts", 128)
    routing = sigmoid_routing(entries, num_experts, default_scaling=2.5)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    mlps = layers_by_kind(entries, moe, default_dense=1)
    indexers = read_indexers(entries, is_interleaved=False)
    config = latent_model(entries, mlps, is_interleaved=True, indexers=indexers)
    return replace(
        config,
        layers=tuple(_with_gates(layer) for layer in config.layers),
        norm=replace(config.norm, gate_rank=entries.size("gated_norm_rank", 16)),
        names=_NAMES,
    )


def _with_gates(layer: LayerConfig) -> LayerConfig:
    assert isinstance(layer.attention, MlaConfig), "all layers have latent attention"
    gated = GATED_NORMS if isinstance(layer.mlp, MoeConfig) else GATED_NORMS[:1]
    return replace(layer, attention=replace(layer.attention, has_gates=True), gated_norms=gated)
