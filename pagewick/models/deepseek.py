"""DeepSeek-V2 (also Lite), DeepSeek-V3 with R1, Kimi K2, A.X K1, and Youtu-LLM. Llama, except:

- Latent attention: keys and values of all heads come from one small vector per token, which is all that is kept of it.
- YaRN: where the file has mscale_all_dim, scores are also scaled by its square.
- All layers but the first have experts, and a shared expert, as large as n_shared_experts of them, for every token.
- V2 chooses by softmax, from all experts (greedy) or from those of the best groups (group_limited_greedy). V3 chooses
  by sigmoid plus a learned bias, from the groups whose best two experts score highest, and normalises their weights.
- A.X K1 is V3 with a norm after the experts of a layer; its routers may lack the bias.
- Youtu-LLM has an MLP in each layer, and no experts.
- V3's files may hold further layers that predict later tokens; --speculative-method mtp uses the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.layers.config import IndexerConfig, MlaConfig, MoeConfig, RopeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.mtp_offers import nextn, offer
from pagewick.models.multimodal import read_text_part
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, MlpConfig, NormConfig
from pagewick.models.rope_entries import read_rope, yarn_mscale
from pagewick.models.vision.moon_entries import with_moon_vision

# The eps of the norms within attention; rms_norm_eps is that of the others.
_LATENT_NORM_EPS = 1e-6
# Defaults of entries that files leave out; null is none of them. If q_lora_rank is null, one matrix makes queries from
# hidden states. A flag that is null is false, and groups cannot be null.
_V3: Final = {
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
_AXK1: Final = {**_V3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": 32768}
_YOUTU: Final = {
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SHARED_EXPERTS: Final = NameMap(parts=(("shared_expert", "shared_experts"),))
_AXK1_NAMES: Final = NameMap(parts=(*SHARED_EXPERTS.parts, ("post_feedforward_layernorm", "post_mlp_layernorm")))


def read_deepseek_v2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"first_k_dense_replace": 0, "q_lora_rank": 1536, "max_position_embeddings": 2048})
    entries.demand("scoring_func", "softmax", "softmax")
    entries.demand("norm_topk_prob", False, False)
    entries.demand("mlp_bias", False, False)
    is_grouped = entries.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "group_limited_greedy"
    num_experts = entries.size("n_routed_experts", 64)
    routing = {
        "top_k": entries.size("num_experts_per_tok", most=num_experts),
        "num_groups": entries.size("n_group") if is_grouped else 1,
        "top_k_groups": entries.size("topk_group") if is_grouped else 1,
        "scaling": entries.positive("routed_scaling_factor", 1.0),
    }
    return _read(entries, routing, num_experts=num_experts, default_shared=2, is_interleaved=True)


def read_kimi_multimodal(entries: Entries) -> ModelConfig:
    """Kimi K2.5 and 2.6: DeepSeek-V3 with an encoder of images."""
    return with_moon_vision(read_text_part(entries, read_deepseek_v3), entries)


def read_deepseek_v3(entries: Entries) -> ModelConfig:
    entries = entries.filled(_V3)
    num_experts = entries.size("n_routed_experts", 256)
    routing = sigmoid_routing(entries, num_experts, default_scaling=2.5)
    is_interleaved = entries.flag("rope_interleave", False)
    config = _read(entries, routing, num_experts=num_experts, default_shared=1, is_interleaved=is_interleaved)
    return offer_later_layer(entries, config)


def read_axk1(entries: Entries) -> ModelConfig:
    entries = entries.filled(_AXK1)
    num_experts = entries.size("n_routed_experts", 192)
    routing = sigmoid_routing(entries, num_experts, default_scaling=2.5)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    mlps = layers_by_kind(entries, moe, default_dense=1)
    config = latent_model(entries, mlps, is_interleaved=entries.flag("rope_interleave", False))
    return replace(
        config,
        block="post_mlp",
        layers=tuple(replace(layer, has_output_norm=isinstance(layer.mlp, MoeConfig)) for layer in config.layers),
        is_router_bias_optional=True,
        names=(_AXK1_NAMES,),
        # Published files have norms of dense layers, too, which nothing uses.
        ignored=(*config.ignored, *_norms_of_dense_layers(mlps)),
    )


def read_youtu(entries: Entries) -> ModelConfig:
    entries = entries.filled(_YOUTU)
    entries.demand("n_routed_experts", None, None, "layers with experts are not supported")
    entries.demand("mlp_bias", False, False)
    mlps: list[MlpConfig | MoeConfig] = [reading.read_mlp(entries)] * reading.read_num_layers(entries)
    return latent_model(entries, mlps, is_interleaved=entries.flag("rope_interleave", False))


def _norms_of_dense_layers(mlps: Sequence[MlpConfig | MoeConfig]) -> tuple[str, ...]:
    dense = "|".join(str(layer_idx) for layer_idx, mlp in enumerate(mlps) if isinstance(mlp, MlpConfig))
    return (rf"model\.layers\.({dense})\.post_mlp_layernorm\.weight",) if dense else ()


def sigmoid_routing(
    entries: Entries, num_experts: int, *, default_scaling: float, default_top_k: int = 8
) -> dict[str, Any]:
    """V3's way to choose experts: the arguments of Routing."""
    entries.demand("scoring_func", "sigmoid", "sigmoid")
    entries.demand("topk_method", "noaux_tc", "noaux_tc")
    return {
        "top_k": entries.size("num_experts_per_tok", default_top_k, most=num_experts),
        "scoring": "sigmoid",
        "renormalize": entries.flag("norm_topk_prob", False),
        "num_groups": entries.size("n_group"),
        "top_k_groups": entries.size("topk_group"),
        "group_score": "sum_of_two",
        "scaling": entries.positive("routed_scaling_factor", default_scaling),
    }


def _read(
    entries: Entries, routing: Mapping[str, Any], *, num_experts: int, default_shared: int, is_interleaved: bool
) -> ModelConfig:
    num_dense = min(reading.read_num_layers(entries), entries.count("first_k_dense_replace"))
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=default_shared)
    return latent_model(entries, first_layers_dense(entries, moe, num_dense), is_interleaved=is_interleaved)


def read_experts(
    entries: Entries, routing: Mapping[str, Any], *, num_experts: int, default_shared: int | None
) -> MoeConfig:
    """Read the experts of a layer that has some, and the one that they share."""
    entries.demand("moe_layer_freq", 1, 1)
    expert_size = entries.size("moe_intermediate_size")
    return reading.make_moe(
        routing,
        num_experts=num_experts,
        intermediate_size=expert_size,
        activation=reading.read_activation(entries),
        has_router_bias=routing.get("scoring") == "sigmoid",
        shared_intermediate_size=expert_size * entries.size("n_shared_experts", default_shared),
    )


def first_layers_dense(entries: Entries, moe: MoeConfig, num_dense: int) -> list[MlpConfig | MoeConfig]:
    """Return an MLP for each of the first `num_dense` layers, and experts for each of the others."""
    dense = [reading.read_mlp(entries)] * num_dense if num_dense else []
    return [*dense, *[moe] * (reading.read_num_layers(entries) - num_dense)]


def layers_by_kind(entries: Entries, moe: MoeConfig, *, default_dense: int) -> list[MlpConfig | MoeConfig]:
    """Return an MLP or experts for each layer, as mlp_layer_types says, or first_k_dense_replace without it."""
    num_layers = reading.read_num_layers(entries)
    if (kinds := entries.texts("mlp_layer_types")) is None:
        num_dense = min(num_layers, entries.count("first_k_dense_replace", default_dense))
        return first_layers_dense(entries, moe, num_dense)
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise entries.wrong("mlp_layer_types", f"a list of num_hidden_layers ({num_layers}) times dense or sparse")
    dense = reading.read_mlp(entries) if "dense" in kinds else None
    return [moe if dense is None or kind == "sparse" else dense for kind in kinds]


def later_layers(entries: Entries, default: int = 0) -> tuple[str, ...]:
    """Return regular expressions of the tensors in layers that predict later tokens, which stand behind the others."""
    num_layers = reading.read_num_layers(entries)
    num_extra = entries.count("num_nextn_predict_layers", default, most=MAX_LAYERS)
    extra = "|".join(str(layer_idx) for layer_idx in range(num_layers, num_layers + num_extra))
    return (rf"model\.layers\.({extra})\..*",) if extra else ()


def offer_later_layer(entries: Entries, config: ModelConfig, norm: str = "shared_head.norm") -> ModelConfig:
    """Return the config with the first of these layers, if there is one. It is like the model's last layer.

    norm: the name of its last norm.
    """
    has_one = entries.count("num_nextn_predict_layers", 0, most=MAX_LAYERS) > 0
    has_experts = isinstance(config.layers[-1].mlp, MoeConfig)
    return offer(config, nextn(config.num_layers, norm)) if has_one and has_experts else config


def latent_model(
    entries: Entries,
    mlps: list[MlpConfig | MoeConfig],
    *,
    is_interleaved: bool,
    default_eps: float = 1e-6,
    has_query_scaling: bool = False,
    indexers: Sequence[IndexerConfig] = (),
) -> ModelConfig:
    """Read a model with latent attention in all layers. mlps: what each layer has behind it.

    has_query_scaling: the file says how queries are scaled by their position. indexers: one for each layer, or none.
    """
    rope_dim = entries.size("qk_rope_head_dim", 64)
    rope = read_rope(
        entries,
        head_dim=rope_dim,
        rotary_dim=rope_dim,
        max_position_embeddings=reading.read_max_position(entries),
        interleaved=is_interleaved,
        has_query_scaling=has_query_scaling,
    )
    attention = latent_attention(entries, rope)
    attentions = [replace(attention, indexer=indexer) for indexer in indexers] or [attention] * len(mlps)
    pairs = zip(attentions, mlps, strict=True)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", default_eps)),
        layers=tuple(LayerConfig(attention=attention, mlp=mlp, rope=rope) for attention, mlp in pairs),
        names=(SHARED_EXPERTS,),
        ignored=later_layers(entries),
    )


def latent_attention(entries: Entries, rope: RopeConfig, **fields: Any) -> MlaConfig:
    """Read the sizes of a latent attention; `fields` are other fields of MlaConfig."""
    if rope.rotary_dim % 2:
        raise entries.wrong("qk_rope_head_dim", "an even number")
    nope_dim = entries.size("qk_nope_head_dim", 128)
    scale = (nope_dim + rope.rotary_dim) ** -0.5
    if rope.mscale_all_dim:
        mscale = yarn_mscale(rope.factor, rope.mscale_all_dim)
        scale *= mscale * mscale
        if not math.isfinite(scale):
            raise ModelLoadError("config.json: mscale_all_dim makes the scores of attention infinite")
    return MlaConfig(
        num_heads=entries.size("num_attention_heads"),
        q_lora_rank=entries.optional_size("q_lora_rank"),
        kv_lora_rank=entries.size("kv_lora_rank", 512),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope.rotary_dim,
        v_head_dim=entries.size("v_head_dim", 128),
        softmax_scale=scale,
        norm_eps=_LATENT_NORM_EPS,
        attention_bias=entries.flag("attention_bias", False),
        rope_interleaved=rope.interleaved,
        **fields,
    )
