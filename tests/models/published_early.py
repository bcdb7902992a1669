"""The config.json of checkpoints of early families, as in published.py, and their facts."""

from __future__ import annotations

from typing import Any

# fmt: off
_PYTHIA: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 16,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}
_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}
_OPT: dict[str, Any] = {
    "_name_or_path": "opt-125m", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
    "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768,
    "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
    "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 768,
}
_FALCON: dict[str, Any] = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
    "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
    "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    "num_kv_heads": 71, "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65024,
}
_OLMO: dict[str, Any] = {
    "architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 2048, "model_type": "olmo", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 1, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 50304,
}
PUBLISHED_EARLY: dict[str, dict[str, Any]] = {
    "OLMo-7B-hf": _OLMO,
    "falcon-7b": _FALCON,
    "falcon-40b": {
        **_FALCON, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
        "num_hidden_layers": 60, "num_kv_heads": 8,
    },
    "opt-125m": _OPT,
    "gpt2": _GPT2,
    "gpt2-xl": {**_GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "pythia-1b": _PYTHIA,
    "gpt-neox-20b": {
        **{name: value for name, value in _PYTHIA.items() if name != "use_parallel_residual"},
        "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,
        "intermediate_size": 24576, "num_attention_heads": 64, "num_hidden_layers": 44, "vocab_size": 50432,
    },
}
# fmt: on
_NEOX = "all | parallel_norms layer 1e-05 | plain"
_GPT2_END = "1024 | tied, learned positions, qkv bias, o bias, fused"
_FALCON_END = "layer 1e-05 | plain gelu"
FACTS_EARLY = {
    "OLMo-7B-hf": "32 32/32x128 | default 128@10000 | all | sequential layer 1e-05 no weight | silu 11008 | 2048 |",
    "falcon-7b": f"32 71/1x64 | default 64@10000 | all | parallel {_FALCON_END} 18176 | 2048 | tied",
    "falcon-40b": f"60 128/8x64 | default 64@10000 | all | parallel_norms {_FALCON_END} 32768 | 2048 | tied",
    "opt-125m": "12 12/12x64 | none | all | sequential layer 1e-05 | plain relu 3072 | 2048 | "
    "tied, learned positions, qkv bias, o bias",
    "gpt2": f"12 12/12x64 | none | all | sequential layer 1e-05 | plain gelu_tanh 3072 | {_GPT2_END}",
    "gpt2-xl": f"48 25/25x64 | none | all | sequential layer 1e-05 | plain gelu_tanh 6400 | {_GPT2_END}",
    "pythia-1b": f"16 8/8x256 | default 64@10000 | {_NEOX} gelu 8192 | 2048 | qkv bias, o bias",
    "gpt-neox-20b": f"44 64/64x96 | default 24@10000 | {_NEOX} gelu_tanh 24576 | 2048 | qkv bias, o bias",
}
