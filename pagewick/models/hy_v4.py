"""Hy4 (HYV4): DeepSeek-V3.2, except:

- Hyper-connections, as in DeepSeek V4, but streams are not mixed: each keeps what it has, and gets a layer's output.
- Attention rotates halves. The softmax has sinks, and outputs have gates, which are made from hidden states.
- The last elements of the indexer's queries and keys rotate. Some layers have no indexer, as in GLM-5.2.
- Both factors of the gated products of experts are bounded, but not those of the expert for every token.
- Experts have no groups in published files. Further layers of a file, which predict later tokens, are not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.layers.config import HyperConfig, MlaConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, latent_model, layers_by_kind, read_experts, sigmoid_routing
from pagewick.models.deepseek_v32 import read_indexers
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig

# Defaults of entries that files leave out.
_DEFAULTS: Final = {
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 262144,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "index_n_heads": 16,
    "hc_mult": 4,
}
# Entries of which only one value is implemented, that of the published file.
_ONLY: Final = {
    "enable_ihc": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True, "swiglu_limit": 10.0,
}  # fmt: skip
_LAYER_TYPES: Final = frozenset({"indexed_attention", "deepseek_sparse_attention", "sparse_attention"})
_LEAVES: Final = ("fn", "base", "scale")
_PARTS: Final = (
    *SHARED_EXPERTS.parts,
    ("sinks.weight", "learnable_sink_param"),
    *((f"model.hc_head.{leaf}", f"model.hc_head.hc_head_{leaf}") for leaf in _LEAVES),
)
_NAMES: Final = (
    NameMap(
        parts=(
            *_PARTS,
            ("self_attn.g_proj", "self_attn.linear_gate"),
            *((f"attn_hc.{leaf}", f"hc_attn_layer.hc_pre.hc_{leaf}") for leaf in _LEAVES),
            *((f"ffn_hc.{leaf}", f"hc_mlp_layer.hc_pre.hc_{leaf}") for leaf in _LEAVES),
        )
    ),
    # As transformers writes them.
    NameMap(
        parts=(
            *_PARTS,
            ("self_attn.g_proj", "self_attn.linear_gate"),
            ("gate_proj", "linear_gate"),
            ("model.hc_head", "model.hc_pre.hc_head"),
            *((f"attn_hc.{leaf}", f"hc_pre.hc_attn_layer.hc_{leaf}") for leaf in _LEAVES),
            *((f"ffn_hc.{leaf}", f"hc_pre.hc_mlp_layer.hc_{leaf}") for leaf in _LEAVES),
        )
    ),
    # As it computes with them.
    NameMap(
        parts=(
            *SHARED_EXPERTS.parts,
            ("sinks.weight", "sinks"),
            ("self_attn.g_proj", "self_attn.gate_proj"),
            *((f"model.hc_head.{leaf}", f"model.hc_head.hc_{leaf}") for leaf in _LEAVES),
        )
    ),
)


def read_hy_v4(entries: Entries) -> ModelConfig:
    entries = _with_indexer_types(entries.filled(_DEFAULTS))
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    kinds = entries.texts("layer_types")
    if kinds is not None and set(kinds) - _LAYER_TYPES:
        raise entries.wrong("layer_types", f"a list of {', '.join(sorted(_LAYER_TYPES))}")
    entries = entries.replaced({"layer_types": None})
    num_experts = entries.size("n_routed_experts", 256)
    routing = sigmoid_routing(entries, num_experts, default_scaling=2.827)
    experts = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    if experts.activation != "silu":
        raise entries.wrong("hidden_act", "silu")
    bounded = replace(experts, activation="clamped_silu10", shared_activation="silu")
    mlps = layers_by_kind(entries, bounded, default_dense=1)
    rope_dim, eps = entries.size("qk_rope_head_dim", 64), entries.positive("rms_norm_eps", 1e-5)
    indexers = [
        replace(indexer, num_last=rope_dim, norm_eps=eps) for indexer in read_indexers(entries, is_interleaved=False)
    ]
    config = latent_model(entries, mlps, is_interleaved=False, default_eps=eps, indexers=indexers)
    hyper = HyperConfig(
        num_streams=entries.size("hc_mult"),
        num_iterations=0,
        eps=entries.positive("hc_eps", 1e-6),
        norm_eps=eps,
        magnitude=entries.positive("hc_magnitude", 2.0),
    )
    return replace(
        config,
        block="hyper",
        hyper=hyper,
        layers=tuple(map(_with_gates, config.layers)),
        names=_NAMES,
        ignored=(*config.ignored, r"model\.mtp_layers\..*"),
    )


def _with_indexer_types(entries: Entries) -> Entries:
    """Return the entries with indexer_types, by default an indexer in the first two layers and each fourth then."""
    if "indexer_types" in entries:
        return entries
    num_layers = reading.read_num_layers(entries)
    kinds = ["full" if idx == 0 or idx % 4 == 1 else "shared" for idx in range(num_layers)]
    return entries.replaced({"indexer_types": kinds})


def _with_gates(layer: LayerConfig) -> LayerConfig:
    assert isinstance(layer.attention, MlaConfig), "all layers have latent attention"
    return replace(layer, attention=replace(layer.attention, has_number_gates=True, has_sinks=True))
