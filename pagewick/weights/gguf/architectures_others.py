"""The architectures of GGUF files of families with one or two of them, as tables like those in architectures.py.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pagewick.weights.gguf import architecture as common
from pagewick.weights.gguf.architecture import GgufArchitecture

_HUNYUAN_NORMS: Final = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

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

GPT2: Final = GgufArchitecture(
    name="GPT2ForCausalLM",
    entries={
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    required=common.LAYER_NORM,
    whole={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layer_prefix="transformer.h.{}.",
)
_WITHOUT_RMS: Final = {key: name for key, name in common.ENTRIES.items() if name != "rms_norm_eps"}
_FALCON_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON: Final = GgufArchitecture(
    name="FalconForCausalLM",
    entries={
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "ffn_hidden_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_kv_heads",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    required=common.LAYER_NORM,
    has={"bias": "attn_qkv.bias"},
    whole={
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer=_FALCON_LAYER,
    layer_prefix="transformer.h.{}.",
    is_by_head=True,
    fixed={"tensor_data_layout": "jploski"},
)
# 40B and 180B.
FALCON_WITH_TWO_NORMS: Final = replace(
    _FALCON, layer={**_FALCON_LAYER, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)

# general.architecture -> its meaning. `falcon` with two norms in a layer is FALCON_WITH_TWO_NORMS, `mistral3` that
# scales no queries is `llama`.
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
        predicting={**common.NEXTN, "nextn.shared_head_norm": "model.layers.{}.final_layernorm"},
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
        predicting=common.QWEN_MTP,
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
    "gpt2": GPT2,
    "gptneox": GgufArchitecture(
        name="GPTNeoXForCausalLM",
        entries={
            **_WITHOUT_RMS,
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        required=common.LAYER_NORM,
        has={"attention_bias": "attn_qkv.bias"},
        whole={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layer={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        layer_prefix="gpt_neox.layers.{}.",
        is_by_head=True,
    ),
    "falcon": _FALCON,
    "olmo": GgufArchitecture(
        name="OlmoForCausalLM",
        entries={**_WITHOUT_RMS, "attention.clamp_kqv": "clip_qkv"},
        required=common.LAYER_NORM,
        whole={name: theirs for name, theirs in common.WHOLE.items() if name != "output_norm"},
        layer={name: theirs for name, theirs in common.LAYER.items() if not name.endswith("norm")},
        is_permuted=True,
        harmless=frozenset({"attention.clamp_kqv"}),
        fixed={"attention.layer_norm_epsilon": 1e-5},
    ),
    "jais2": GgufArchitecture(
        name="Jais2ForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "layer_norm_eps"},
        required=common.LAYER_NORM,
        has=common.LLAMA_HAS,
    ),
    "minicpm3": GgufArchitecture(
        name="MiniCPM3ForCausalLM",
        entries=common.LATENT_ENTRIES,
        required=(*common.RMS, "attention.kv_lora_rank", "rope.dimension_count"),
        # Files have no keys for the model's factors, which are those of MiniCPM3 4B.
        constants={"q_lora_rank": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        layer={**common.GATED_MLP, **common.LATENT},
        is_written=False,
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
        predicting=common.NEXTN,
    ),
    "glm-dsa": GgufArchitecture(
        name="GlmMoeDsaForCausalLM",
        entries=_SPARSE_ENTRIES,
        required=_SPARSE_REQUIRED,
        constants=_BY_SIGMOID,
        layer=_SPARSE,
        predicting=common.NEXTN,
    ),
}
