"""DeepSeek-V3.2, and GLM-5 (GlmMoeDsa): DeepSeek-V3 with sparse attention (arXiv:2512.02556), and these differences.

- An indexer in each layer scores all earlier tokens, and the layer's attention sees the index_topk best of them. A
  token with fewer before it sees all of them.
- In V3.2, the indexer rotates halves, although attention rotates interleaved pairs.
- GLM-5: mlp_layer_types may say which layers have experts. GLM-5.2: some layers have no indexer (indexer_types) and see
  what the nearest before them has selected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.layers.config import IndexerConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import latent_model, layers_by_kind, offer_later_layer, read_experts, sigmoid_routing
from pagewick.models.entries import Entries

# Defaults of entries that files leave out. In both, q_lora_rank cannot be null: the indexer reads what it makes.
_V32: Final = {
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "index_n_heads": 64,
}
_GLM_5: Final = {
    "first_k_dense_replace": 3,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "index_n_heads": 32,
}


def read_deepseek_v32(entries: Entries) -> ModelConfig:
    entries.demand("indexer_rope_interleave", False, False)
    return _read(entries.filled(_V32), is_interleaved=False, default_eps=1e-6)


def read_glm_moe_dsa(entries: Entries) -> ModelConfig:
    entries.demand("indexer_rope_interleave", True, True)
    return _read(entries.filled(_GLM_5), is_interleaved=True, default_eps=1e-5)


def _read(entries: Entries, *, is_interleaved: bool, default_eps: float) -> ModelConfig:
    """is_interleaved: the indexer rotates interleaved pairs, as attention does."""
    entries.demand("rope_interleave", True, True)
    num_experts = entries.size("n_routed_experts", 256)
    routing = sigmoid_routing(entries, num_experts, default_scaling=2.5)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    mlps = layers_by_kind(entries, moe, default_dense=3)
    indexers = read_indexers(entries, is_interleaved=is_interleaved)
    config = latent_model(entries, mlps, is_interleaved=True, default_eps=default_eps, indexers=indexers)
    return offer_later_layer(entries, config)


def read_indexers(entries: Entries, *, is_interleaved: bool, reads_hidden_states: bool = False) -> list[IndexerConfig]:
    """Read the indexer of each layer. is_interleaved: it rotates interleaved pairs.

    reads_hidden_states: as in IndexerConfig; the queries of such an indexer are also scaled by their position.
    """
    own = IndexerConfig(
        num_heads=entries.size("index_n_heads"),
        head_dim=entries.size("index_head_dim", 128),
        top_k=entries.size("index_topk", 2048),
        is_interleaved=is_interleaved,
        reads_hidden_states=reads_hidden_states,
        has_log_scales=reads_hidden_states,
    )
    if own.head_dim < (rope_dim := entries.size("qk_rope_head_dim", 64)):
        raise entries.wrong("index_head_dim", f"at least qk_rope_head_dim ({rope_dim})")
    if not reads_hidden_states:
        entries.size("q_lora_rank")
    return [replace(own, is_shared=is_shared) for is_shared in _shared_layers(entries)]


def _shared_layers(entries: Entries) -> list[bool]:
    """Whether each layer sees what an earlier one has selected."""
    num_layers = reading.read_num_layers(entries)
    kinds = entries.texts("indexer_types") or _kinds_by_frequency(entries, num_layers)
    if len(kinds) != num_layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise entries.wrong(
            "indexer_types", f"a list of num_hidden_layers ({num_layers}) times full or shared, which begins with full"
        )
    return [kind == "shared" for kind in kinds]


def _kinds_by_frequency(entries: Entries, num_layers: int) -> tuple[str, ...]:
    """Return indexer_types of files that do not have it: every index_topk_freq-th layer has an indexer."""
    entries.demand("index_topk_pattern", None, None, "give indexer_types instead")
    frequency = entries.size("index_topk_freq", 1)
    offset = entries.count("index_skip_topk_offset", 2)
    return tuple("full" if max(layer - offset + 1, 0) % frequency == 0 else "shared" for layer in range(num_layers))
