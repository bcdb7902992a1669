"""Tiny random checkpoints whose weights make mistakes show, written by transformers, the reference for all models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

COMMON = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama-bias-tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, "num_key_value_heads": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-tied-bias": ("Qwen3Config", {"tie_word_embeddings": True, "attention_bias": True}),
}


def write_checkpoint(name: str, directory: Path, *, max_shard_size: str = "1GB") -> nn.Module:
    """Write the checkpoint `name` of CONFIGS and return the transformers model, in float32, to compare with."""
    class_name, changes = CONFIGS[name]
    config = getattr(transformers, class_name)(**{**COMMON, **changes})
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _reinitialise(parameter_name, parameter)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return model  # type: ignore[no-any-return]


def _reinitialise(name: str, parameter: nn.Parameter) -> None:
    """Norm weights and biases away from 1 and 0; attention peaked; logits of standard deviation 1 and more."""
    if "norm" in name:
        parameter.uniform_(0.5, 1.5)
    elif name.endswith("bias"):
        parameter.normal_(0, 0.2)
    elif "q_proj" in name or "k_proj" in name:
        parameter.normal_(0, 2.0 / parameter.shape[1] ** 0.5)
    elif "embed_tokens" in name or "lm_head" in name:
        parameter.normal_(0, 0.25)
    else:
        parameter.normal_(0, 2.0 / parameter.shape[1] ** 0.5)
