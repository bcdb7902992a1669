"""The architectures of GGUF files: their metadata and tensors in Hugging Face's terms, as tables. Imports no torch.

Those of 2025 and later are in architectures_2025.py, architectures_2026.py and architectures_others.py, those of
Granite 3 in architectures_granite.py, those with Mamba-2 or short convolutions in architectures_hybrid.py, and those of
encoders in encoders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pagewick.weights.gguf.architecture import (
    ATTENTION,
    AXES,
    BIAS,
    ENTRIES,
    EXPERT_ENTRIES,
    EXPERTS,
    GATED_MLP,
    HEAD_NORMS,
    LABELS,
    LATENT,
    LATENT_ENTRIES,
    LAYER,
    LAYER_NORM,
    LLAMA_HAS,
    NEXTN,
    NUMBERED,
    RMS,
    ROUTED,
    SANDWICH,
    SHARED,
    WHOLE,
    GgufArchitecture,
)
from pagewick.weights.gguf.architectures_2025 import ARCHITECTURES_2025
from pagewick.weights.gguf.architectures_2026 import ARCHITECTURES_2026
from pagewick.weights.gguf.architectures_granite import ARCHITECTURES_GRANITE
from pagewick.weights.gguf.architectures_hybrid import ARCHITECTURES_HYBRID
from pagewick.weights.gguf.architectures_others import ARCHITECTURES_OTHERS, GPT2
from pagewick.weights.gguf.encoders import ENCODERS

_WITHOUT_RMS: Final = {key: name for key, name in ENTRIES.items() if name != "rms_norm_eps"}
_GEMMA2_ENTRIES: Final = {
    **ENTRIES,
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA3_ENTRIES: Final = {
    **ENTRIES,
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_FUSED_GATE: Final = {"ffn_up": "mlp.gate_up_proj"}
_GPT_OSS: Final = {
    **ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    **ROUTED,
    "ffn_gate_inp": "mlp.router",
}

MIXTRAL: Final = GgufArchitecture(
    name="MixtralForCausalLM",
    entries={**EXPERT_ENTRIES, "expert_count": "num_local_experts"},
    required=EXPERTS,
    layer={**LAYER, **NUMBERED},
    is_permuted=True,
)
DEEPSEEK_V3: Final = GgufArchitecture(
    name="DeepseekV3ForCausalLM",
    entries=LATENT_ENTRIES,
    required=(*EXPERTS, "attention.kv_lora_rank", "rope.dimension_count"),
    constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": None},
    layer={**GATED_MLP, **LATENT, **ROUTED},
    predicting=NEXTN,
)

YOUTU: Final = GgufArchitecture(
    name="YoutuForCausalLM",
    entries={
        # llama.cpp asks for these, too: all layers come before the first with experts.
        "leading_dense_block_count": "num_hidden_layers",
        "expert_feed_forward_length": "intermediate_size",
        **{key: name for key, name in LATENT_ENTRIES.items() if not key.startswith(("expert", "leading"))},
    },
    required=(*RMS, "attention.kv_lora_rank", "rope.dimension_count"),
    constants={"q_lora_rank": None},
    layer={**GATED_MLP, **LATENT},
    fixed={"expert_shared_count": 0},
)

# general.architecture -> its meaning. `llama` with experts is MIXTRAL, `deepseek2` with sigmoids DEEPSEEK_V3, and
# without experts YOUTU. `glm4` with sections of its rotation is GLM4V.
ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = {
    "llama": GgufArchitecture(name="LlamaForCausalLM", has=LLAMA_HAS, is_permuted=True),
    "qwen2": GgufArchitecture(name="Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture(
        name="Qwen3ForCausalLM", has=BIAS, whole={**WHOLE, **LABELS}, layer={**LAYER, **HEAD_NORMS}
    ),
    "qwen2moe": GgufArchitecture(
        name="Qwen2MoeForCausalLM",
        entries={**EXPERT_ENTRIES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        required=EXPERTS,
        has={"qkv_bias": "attn_q.bias"},
        layer={**LAYER, **ROUTED, **SHARED},
    ),
    "qwen3moe": GgufArchitecture(
        name="Qwen3MoeForCausalLM",
        entries=EXPERT_ENTRIES,
        required=EXPERTS,
        constants={"norm_topk_prob": True},
        has=BIAS,
        layer={**LAYER, **HEAD_NORMS, **ROUTED},
    ),
    "phi2": GgufArchitecture(
        name="PhiForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "layer_norm_eps"},
        required=LAYER_NORM,
        whole={**WHOLE, "output_norm": "model.final_layernorm"},
        layer={**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "phi3": GgufArchitecture(
        name="Phi3ForCausalLM",
        entries={
            **ENTRIES,
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        layer={**LAYER, **_FUSED_GATE, "attn_qkv": "self_attn.qkv_proj"},
    ),
    "phimoe": GgufArchitecture(
        name="PhimoeForCausalLM",
        entries={
            **EXPERT_ENTRIES,
            "expert_count": "num_local_experts",
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        required=EXPERTS,
        has=BIAS,
        layer={**LAYER, **NUMBERED},
        is_written=False,
    ),
    "stablelm": GgufArchitecture(
        name="StableLmForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "layer_norm_eps"},
        required=LAYER_NORM,
        has={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        lacks={"use_parallel_residual": "ffn_norm.weight"},
        layer={
            **LAYER,
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
    ),
    "gemma": GgufArchitecture(name="GemmaForCausalLM", has=BIAS, norm_offset=1.0),
    "gemma2": GgufArchitecture(
        name="Gemma2ForCausalLM", entries=_GEMMA2_ENTRIES, has=BIAS, layer={**LAYER, **SANDWICH}, norm_offset=1.0
    ),
    "gemma3": GgufArchitecture(
        name="Gemma3ForCausalLM",
        entries=_GEMMA3_ENTRIES,
        has=BIAS,
        layer={**LAYER, **SANDWICH, **HEAD_NORMS},
        norm_offset=1.0,
    ),
    "chatglm": GgufArchitecture(name="GlmForCausalLM", has=BIAS, layer={**LAYER, **_FUSED_GATE}),
    "glm4": GgufArchitecture(
        name="Glm4ForCausalLM",
        has=BIAS,
        harmless=AXES,
        layer={
            **LAYER,
            **_FUSED_GATE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "deepseek2": GgufArchitecture(
        name="DeepseekV2ForCausalLM",
        entries=LATENT_ENTRIES,
        required=DEEPSEEK_V3.required,
        constants={"q_lora_rank": None},
        layer=DEEPSEEK_V3.layer,
    ),
    "gpt-oss": GgufArchitecture(
        name="GptOssForCausalLM",
        entries={
            **EXPERT_ENTRIES,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        required=EXPERTS,
        has=BIAS,
        layer=_GPT_OSS,
    ),
    "starcoder": replace(GPT2, name="GPTBigCodeForCausalLM"),
    "starcoder2": GgufArchitecture(
        name="Starcoder2ForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "norm_epsilon"},
        required=LAYER_NORM,
        has={"use_bias": "attn_q.bias"},
        layer={**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    **ARCHITECTURES_2025,
    **ARCHITECTURES_2026,
    **ARCHITECTURES_GRANITE,
    **ARCHITECTURES_OTHERS,
    **ARCHITECTURES_HYBRID,
    **ENCODERS,
}
# The text part of GLM-4.1V and GLM-OCR.
GLM4V: Final = replace(ARCHITECTURES["glm4"], is_halved=True)
