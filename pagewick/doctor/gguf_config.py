"""A GGUF file's metadata as a config.json in Hugging Face's terms. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf_header import GgufArray

# general.architecture -> what a config.json calls it.
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
# Key of the metadata, without the architecture before it -> entry of config.json.
_ENTRIES: Final = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_LATENT_ENTRIES: Final = {
    **_ENTRIES,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}


def config_of_gguf(values: Mapping[str, Any], vocab_size: int, *, has_output: bool) -> dict[str, Any]:
    """The entries of config.json that follow from a GGUF file's key-values.

    vocab_size: rows of the embedding. has_output: whether the file holds a vocabulary head. Raises ModelLoadError if
    the file names no architecture, or gives one of the sizes for each layer.
    """
    kind = values.get("general.architecture")
    if not isinstance(kind, str):
        raise ModelLoadError("the GGUF file does not say general.architecture\n  use one that holds a language model")
    is_latent = kind == "deepseek2"
    found: dict[str, Any] = {
        "architectures": [_ARCHITECTURES.get(kind, kind)],
        "vocab_size": vocab_size,
        "tie_word_embeddings": not has_output,
    }
    if is_latent:
        found["q_lora_rank"] = None
    for key, entry in (_LATENT_ENTRIES if is_latent else _ENTRIES).items():
        value = values.get(f"{kind}.{key}")
        if isinstance(value, GgufArray | list):
            raise ModelLoadError(
                f"{key} is a list with a number for each layer: its layers differ, which cannot be described\n"
                "  use the model's original repository, with *.safetensors"
            )
        if value is not None:
            found[entry] = value
    if is_latent and "head_dim" in found:
        found["qk_nope_head_dim"] = found["head_dim"] - found.get("qk_rope_head_dim", 0)
    if kind == "llama" and found.get("num_experts"):
        found |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": found["num_experts"]}
    return found
