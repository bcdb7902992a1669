"""Mistral Small 4. DeepSeek-V3's latent attention and experts, except:

- Queries are scaled by their position, as in Ministral 3.
- Experts are chosen by softmax, without a learned bias; without first_k_dense_replace, all layers have some.
"""

from __future__ import annotations

from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import first_layers_dense, latent_model, read_experts
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_alone

# Defaults of entries that files leave out.
_USUAL: Final[dict[str, Any]] = {
    "first_k_dense_replace": 0,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "max_position_embeddings": 1048576,
}
_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_mistral4(entries: Entries) -> ModelConfig:
    return read_alone(entries, read_mistral4_text)


def read_softmax_routing(entries: Entries, num_experts: int) -> dict[str, Any]:
    """Read the arguments of Routing. The weights of the chosen experts are normalised."""
    entries.demand("scoring_func", "softmax", "softmax")
    entries.demand("sliding_window", None, None)
    return {
        "top_k": entries.size("num_experts_per_tok", 4, most=num_experts),
        "renormalize": True,
        "num_groups": entries.size("n_group"),
        "top_k_groups": entries.size("topk_group"),
        "group_score": "sum_of_two",
        "scaling": entries.positive("routed_scaling_factor", 1.0),
    }


def read_mistral4_text(entries: Entries) -> ModelConfig:
    """Read the model itself, which may be the part of another that reads text."""
    if "rope_scaling" not in entries:
        entries = entries.without_null(("rope_parameters",)).filled({"rope_parameters": _ROPE})
    entries = entries.filled(_USUAL)
    num_experts = entries.size("n_routed_experts", 128)
    routing = {**read_softmax_routing(entries, num_experts), "renormalize": entries.flag("norm_topk_prob", False)}
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    num_dense = min(reading.read_num_layers(entries), entries.count("first_k_dense_replace"))
    return latent_model(
        entries,
        first_layers_dense(entries, moe, num_dense),
        is_interleaved=entries.flag("rope_interleave", False),
        has_query_scaling=True,
    )
