"""The config.json of published checkpoints with short convolutions or Mamba-2, as in published.py, and their facts."""

from __future__ import annotations

from typing import Any

# fmt: off
_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_dim": 2048, "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7, "hidden_size": 2048,
    "initializer_range": 0.02, "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05,
    "num_attention_heads": 32, "num_heads": 32, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}
_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 1536, "init_method": "mup", "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_hidden_layers": 40, "num_key_value_heads": 4,
    "pad_token_id": 100256, "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 100352,
}
_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "torch_dtype": "bfloat16",
    "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}
# fmt: on
PUBLISHED_STATES: dict[str, dict[str, Any]] = {
    "LFM2-1.2B": {
        **_LFM2,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_hidden_layers": 16,
    },
    "LFM2-8B-A1B": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 7,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 7168,
        "layer_types": ["full_attention" if idx in (2, 6, 10, 14, 18, 21) else "conv" for idx in range(24)],
        "max_position_embeddings": 128000,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_expert_bias": True,
        "vocab_size": 65536,
    },
    "granite-4.0-h-tiny": {
        **_GRANITE,
        "attention_multiplier": 0.0078125,
        "intermediate_size": 512,
        "logits_scaling": 6,
        "layer_types": ["attention" if idx in (5, 15, 25, 35) else "mamba" for idx in range(40)],
        "num_experts_per_tok": 6,
        "num_local_experts": 64,
        "shared_intermediate_size": 1024,
    },
    "granite-4.0-h-1b": {
        **_GRANITE,
        "attention_multiplier": 0.0078125,
        "intermediate_size": 4096,
        "logits_scaling": 6,
        "layer_types": ["attention" if idx in (5, 15, 25, 35) else "mamba" for idx in range(40)],
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "shared_intermediate_size": 4096,
    },
    "NVIDIA-Nemotron-Nano-9B-v2": {
        **_NEMOTRON,
        "eos_token_id": 12,
        "hidden_size": 4480,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "intermediate_size": 15680,
        "mamba_head_dim": 80,
        "mamba_num_heads": 128,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_hidden_layers": 56,
        "num_key_value_heads": 8,
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B": {
        **_NEMOTRON,
        "eos_token_id": 11,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
}  # fmt: skip
_GRANITE_FACTS = "40 12/4x128 | 36 mamba 48x64 1x128 over 4 | none | all | sequential rms 1e-05"
_GRANITE_END = "131072 | tied, factors 12 0.22 0.166667"
FACTS_STATES = {
    "LFM2-1.2B": "16 32/8x64 | 10 convolutions of 2048 over 3 | none, default 64@1e+06 | all | sequential rms 1e-05 | "
    "silu 8192 | 128000 | tied, rms head norm",
    "LFM2-8B-A1B": "24 32/8x64 | 18 convolutions of 2048 over 3 | none, default 64@1e+06 | all | "
    "sequential rms 1e-05 | 2: silu 7168, 22: 4 of 32 x 1792 | 128000 | tied, rms head norm",
    "granite-4.0-h-tiny": f"{_GRANITE_FACTS} | 6 of 64 x 512 + 1024 | {_GRANITE_END}",
    "granite-4.0-h-1b": f"{_GRANITE_FACTS} | silu 4096 | {_GRANITE_END}",
    "NVIDIA-Nemotron-Nano-9B-v2": "56 40/8x128 | 27 mamba 128x80 8x128 over 4 | none | all | sequential rms 1e-05 | "
    "plain relu2 15680 | 131072 |",
    "NVIDIA-Nemotron-3-Nano-30B-A3B": "52 32/2x128 | 23 mamba 64x64 8x128 over 4 | none | all | "
    "sequential rms 1e-05 | plain 6 of 128 x 1856 + 3712 | 262144 |",
}
