"""The architectures of GGUF files of families with one or two of them, as tables like those in architectures.py.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagewick.weights.gguf import architecture as common
from pagewick.weights.gguf.architecture import GgufArchitecture

_HUNYUAN_NORMS: Final = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

# general.architecture -> its meaning. `mistral3` that scales no queries is `llama`.
# DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer.
_SPARSE_ENTRIES: Final = {
    **common.LATENT_ENTRIES,
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_SPARSE_REQUIRED: Final = (
    *common.EXPERTS,
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "rope.dimension_count",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
)
_BY_SIGMOID: Final = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_SPARSE: Final = {
    **common.GATED_MLP,
    **common.LATENT,
    **common.ROUTED,
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

ARCHITECTURES_OTHERS: Final[Mapping[str, GgufArchitecture]] = {
    "hunyuan-dense": GgufArchitecture(
        name="HunYuanDenseV1ForCausalLM", has=common.BIAS, layer={**common.LAYER, **_HUNYUAN_NORMS}
    ),
    "hunyuan-moe": GgufArchitecture(
        name="HunYuanMoEV1ForCausalLM",
        entries={
            **common.ENTRIES,
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "num_shared_expert",
        },
        required=common.EXPERTS,
        has=common.BIAS,
        layer={
            **common.ATTENTION,
            **_HUNYUAN_NORMS,
            "ffn_norm": "post_attention_layernorm",
            **common.ROUTED,
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
    ),
    "hy_v3": GgufArchitecture(
        name="HYV3ForCausalLM",
        entries={
            **common.EXPERT_ENTRIES,
            "expert_weights_scale": "router_scaling_factor",
            "expert_weights_norm": "route_norm",
        },
        required=common.EXPERTS,
        has=common.BIAS,
        layer={
            **common.LAYER,
            **common.HEAD_NORMS,
            **common.ROUTED,
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        endings={"exp_probs_b": ""},
    ),
    "mellum": GgufArchitecture(
        name="MellumForCausalLM",
        entries={
            **common.EXPERT_ENTRIES,
            "attention.sliding_window": "sliding_window",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        required=common.EXPERTS,
        constants={"norm_topk_prob": True},
        has=common.BIAS,
        layer={
            **common.ATTENTION,
            **common.HEAD_NORMS,
            "ffn_norm": "post_attention_layernorm",
            **common.ROUTED,
        },
        has_pattern=True,
    ),
    "dots1": GgufArchitecture(
        name="Dots1ForCausalLM",
        entries=common.CHOSEN_ENTRIES,
        required=common.EXPERTS,
        constants={"sliding_window": None},
        has=common.BIAS,
        layer={**common.LAYER, **common.HEAD_NORMS, **common.ROUTED, **common.CHOSEN},
    ),
    "afmoe": GgufArchitecture(
        name="AfmoeForCausalLM",
        entries={
            **common.EXPERT_ENTRIES,
            "attention.sliding_window": "sliding_window",
            "leading_dense_block_count": "num_dense_layers",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
            "expert_weights_norm": "route_norm",
        },
        required=common.EXPERTS,
        constants={"mup_enabled": True},
        has=common.BIAS,
        layer={
            **common.ATTENTION,
            **common.HEAD_NORMS,
            **common.DENSE,
            **common.ROUTED,
            **common.CHOSEN,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
        },
    ),
    "exaone-moe": GgufArchitecture(
        name="ExaoneMoeForCausalLM",
        entries={
            **{key: "num_experts" if key == "expert_count" else name for key, name in common.CHOSEN_ENTRIES.items()},
            "expert_shared_count": "num_shared_experts",
            "attention.sliding_window": "sliding_window",
        },
        required=common.EXPERTS,
        layer={
            **common.LAYER,
            **common.HEAD_NORMS,
            **common.ROUTED,
            **common.CHOSEN,
            "exp_probs_b": "mlp.e_score_correction_bias",
        },
        fixed={"rope.scaling.type": "none", "nextn_predict_layers": 0},
        has_pattern=True,
    ),
    "arcee": GgufArchitecture(name="ArceeForCausalLM", has=common.LLAMA_HAS, is_permuted=True),
    "nemotron": GgufArchitecture(
        name="NemotronForCausalLM",
        entries={
            **common.ENTRIES,
            # Files have it twice.
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "attention.layer_norm_epsilon": "norm_eps",
        },
        required=common.LAYER_NORM,
        has=common.LLAMA_HAS,
        norm_offset=1.0,
        fixed={"rope.scaling.type": "none"},
    ),
    "mistral3": GgufArchitecture(
        name="Ministral3ForCausalLM",
        constants={"sliding_window": None},
        is_permuted=True,
        harmless=frozenset({"attention.temperature_scale"}),
    ),
    "mistral4": GgufArchitecture(
        name="Mistral4ForCausalLM",
        entries={**common.LATENT_ENTRIES, "expert_weights_norm": "norm_topk_prob"},
        required=(*common.EXPERTS, "attention.kv_lora_rank", "rope.dimension_count"),
        constants={"q_lora_rank": None},
        layer={**common.GATED_MLP, **common.LATENT, **common.ROUTED},
        harmless=frozenset({"attention.temperature_scale"}),
    ),
    "deepseek32": GgufArchitecture(
        name="DeepseekV32ForCausalLM",
        entries=_SPARSE_ENTRIES,
        required=_SPARSE_REQUIRED,
        constants=_BY_SIGMOID,
        layer=_SPARSE,
    ),
    "glm-dsa": GgufArchitecture(
        name="GlmMoeDsaForCausalLM",
        entries=_SPARSE_ENTRIES,
        required=_SPARSE_REQUIRED,
        constants=_BY_SIGMOID,
        layer=_SPARSE,
    ),
}
