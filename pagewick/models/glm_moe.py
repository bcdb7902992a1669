"""GLM-4.5, 4.6 and 4.7 (Glm4Moe), GLM-4.5V and 4.6V, which read images, GLM-4.7-Flash (Glm4MoeLite). Llama, except:

- All layers but the first have experts and a shared expert; they are chosen as in DeepSeek-V3. The first of a file's
  further layers, which predict later tokens, serves --speculative-method mtp.
- Glm4Moe: half of each head is rotated; queries, keys and values may have biases; queries and keys may be normalised
  per head.
- GLM-4.5V and 4.6V: as Glm4Moe, with three positions of a token, which are equal within a text.
- Glm4MoeLite: latent attention, as in DeepSeek.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import (
    SHARED_EXPERTS,
    first_layers_dense,
    latent_model,
    later_layers,
    layers_by_kind,
    offer_later_layer,
    read_experts,
    sigmoid_routing,
)
from pagewick.models.entries import Entries
from pagewick.models.glm import tied_as_in_text, with_images
from pagewick.models.parts import HeadNormConfig, NormConfig

# Defaults of entries that files leave out.
_GLM4_MOE: Final = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
_GLM4V_MOE: Final = {**_GLM4_MOE, "max_position_embeddings": 65536, "attention_bias": True}
_LITE: Final = {
    **_GLM4_MOE,
    "num_key_value_heads": 20,
    "max_position_embeddings": 202752,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "rope_interleave": True,
}


def read_glm4_moe(entries: Entries) -> ModelConfig:
    return _read_glm4_moe(entries.renamed({"num_nextn_predict_layers": "num_mtp_layers"}).filled(_GLM4_MOE))


def read_glm4v_moe(entries: Entries) -> ModelConfig:
    return with_images(tied_as_in_text(entries), _read_glm4v_moe_text, "glm4v_moe_text", image_token_id=151363)


def _read_glm4v_moe_text(entries: Entries) -> ModelConfig:
    entries.demand("use_qk_norm", False, False, "models of this family that read images have no such norms")
    return _read_glm4_moe(entries.filled(_GLM4V_MOE), is_mrope=True)


def _read_glm4_moe(entries: Entries, *, is_mrope: bool = False) -> ModelConfig:
    """is_mrope: see reading.read_rope_of."""
    eps = entries.positive("rms_norm_eps", 1e-5)
    head_norm = HeadNormConfig(eps=eps) if entries.flag("use_qk_norm", False) else None
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, head_norm=head_norm)
    num_experts = entries.size("n_routed_experts", 128)
    routing = sigmoid_routing(entries, num_experts, default_scaling=1.0)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    num_layers = reading.read_num_layers(entries)
    mlps = first_layers_dense(entries, moe, min(num_layers, entries.count("first_k_dense_replace", 1)))
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.5, is_mrope=is_mrope)
    config = reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=reading.same_layers(num_layers, attention, mlps, rope),
        names=(SHARED_EXPERTS,),
        ignored=later_layers(entries),
    )
    return offer_later_layer(entries, config)


def read_glm4_moe_lite(entries: Entries) -> ModelConfig:
    entries = entries.filled(_LITE)
    for at in (entries, entries.child("rope_parameters")):
        if at is not None:
            at.demand("partial_rotary_factor", 1, 1, "qk_rope_head_dim says what is rotated")
    num_experts = entries.size("n_routed_experts", 64)
    routing = sigmoid_routing(entries, num_experts, default_scaling=1.8, default_top_k=4)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    mlps = layers_by_kind(entries, moe, default_dense=1)
    config = latent_model(entries, mlps, is_interleaved=entries.flag("rope_interleave"), default_eps=1e-5)
    return offer_later_layer(entries, config)
