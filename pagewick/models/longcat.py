"""LongCat-Flash. DeepSeek-V3's latent attention, and these differences.

- A layer of the file is two layers here, each with attention and an MLP. The first of them also has experts, which read
  what its MLP reads; their output is added behind the second one.
- Some experts have no weights and return their input. Experts are chosen by softmax and a learned bias.
- Queries are multiplied by sqrt(hidden_size / q_lora_rank), latents by sqrt(hidden_size / kv_lora_rank).
- A further layer of a file (model.mtp), which predicts later tokens, serves --speculative-method mtp. It has attention
  and an MLP, and no experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import latent_model
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.mtp_config import MtpConfig
from pagewick.models.mtp_offers import offer
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, MlpConfig

_ALIASES: Final = {
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}
_DEFAULTS: Final[dict[str, Any]] = {
    "num_layers": 28,
    "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048,
    "moe_topk": 12,
    "q_lora_rank": 1536,
    "max_position_embeddings": 131072,
    "rope_theta": 1e7,
}
# Entries of published files of which only one value is implemented.
_ONLY: Final[dict[str, Any]] = {
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_method": "MLA",
    "router_bias": False,
    "norm_topk_prob": False,
}

_MTP_NAMES: Final = (
    ("mtp.fc", "mtp.layers.0.eh_proj"), ("mtp.embedding_norm", "mtp.layers.0.enorm.m"),
    ("mtp.hidden_norm", "mtp.layers.0.hnorm.m"), ("mtp.layer.mlp", "mtp.layers.0.transformer_layer.mlp"),
    ("mtp.layer", "mtp.layers.0"),
)  # fmt: skip

# Each of their names is a part of an expression.
_MAX_IDENTITIES: Final = 4096


def read_longcat_flash(entries: Entries) -> ModelConfig:
    entries = entries.renamed(_ALIASES).filled(_DEFAULTS)
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    num_pairs = entries.size("num_layers", most=MAX_LAYERS // 2)
    entries = entries.replaced({"num_hidden_layers": 2 * num_pairs})
    hidden_size, rank = entries.size("hidden_size"), entries.size("q_lora_rank")
    mlps: list[MlpConfig | MoeConfig] = [reading.read_mlp(entries)] * (2 * num_pairs)
    config = latent_model(entries, mlps, is_interleaved=True, default_eps=1e-5)
    first = config.layers[0]
    assert isinstance(first.attention, MlaConfig), "all layers have latent attention"
    entries.demand("qk_head_dim", first.attention.qk_head_dim, first.attention.qk_head_dim)
    attention = replace(
        first.attention,
        softmax_scale=first.attention.softmax_scale * math.sqrt(hidden_size / rank),
        latent_scale=math.sqrt(hidden_size / first.attention.kv_lora_rank),
    )
    pair = [replace(first, attention=attention, experts=experts) for experts in (_read_experts(entries), None)]
    layers: tuple[LayerConfig, ...] = (*pair,) * num_pairs
    config = replace(
        config,
        block="shortcut",
        layers=layers,
        names=(NameMap(parts=tuple(_names(2 * num_pairs))),),
        ignored=(r"model\.mtp\..*", *_spare_experts(layers[0].experts)),
    )
    return offer(config, MtpConfig(own=replace(pair[1], block="sequential"), names=_MTP_NAMES))


def _read_experts(entries: Entries) -> MoeConfig:
    num_experts, num_identities = (
        entries.size("n_routed_experts", 512),
        entries.count("zero_expert_num", 256, most=_MAX_IDENTITIES),
    )
    return reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", most=num_experts + num_identities),
            "scaling": entries.positive("routed_scaling_factor", 6.0),
        },
        num_experts=num_experts,
        num_identities=num_identities,
        intermediate_size=entries.size("moe_intermediate_size"),
        activation=reading.read_activation(entries),
        has_router_bias=True,
    )


def _names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield the parts of names in which two layers are one layer of the file, in an order in which none fits twice."""
    for layer_idx in range(num_layers):
        ours, theirs, half = f"layers.{layer_idx}", f"layers.{layer_idx // 2}", layer_idx % 2
        for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            yield f"{ours}.{name}", f"{theirs}.{name}.{half}"
        yield f"{ours}.mlp", f"{theirs}.mlps.{half}"
        bias = "e_score_correction_bias"
        yield f"{ours}.mixture.gate.{bias}", f"{theirs}.mlp.router.{bias}"
        yield f"{ours}.mixture.gate", f"{theirs}.mlp.router.classifier"
        yield f"{ours}.mixture", f"{theirs}.mlp"


def _spare_experts(config: MoeConfig | None) -> tuple[str, ...]:
    """Weights of experts that return their input: transformers writes some, which nothing uses."""
    if config is None or not config.num_identities:
        return ()
    spare = "|".join(str(config.num_experts + number) for number in range(config.num_identities))
    return (rf"model\.layers\.\d+\.mlp\.experts\.({spare})\..*",)
