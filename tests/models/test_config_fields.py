"""Every entry of config.json that distinguishes variants: a change of it moves our logits as it moves transformers'.

By more than 100 times what logits may differ. Weights stay the same where their shapes do. An entry that many
architectures have, such as rms_norm_eps, is changed for the first of them; PAGEWICK_DEEP=1 changes it for all.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deep import IS_DEEP
from tests.models.answers import Answer, answers, judge, make_prompts, running
from tests.models.checkpoints import VARIANTS, make_model, save
from tests.models.entry_changes_2025 import CHANGES_2025
from tests.models.entry_changes_early import CHANGES_EARLY
from tests.models.entry_changes_states import CHANGES_STATES

PROMPTS = make_prompts((2, 90, 61))
# For models with states, of which transformers takes one token after the other.
SHORT_PROMPTS = make_prompts((2, 30, 11))
NUM_NEW_TOKENS = 4

# variant -> the entries to change, each alone: dotted where one stands within another; None is null.
CHANGES: dict[str, list[dict[str, Any]]] = {
    **CHANGES_2025,
    **CHANGES_STATES,
    **CHANGES_EARLY,
    "llama": [
        {"rms_norm_eps": 0.02},
        {"rope_parameters.rope_theta": 9000.0},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": 3},
        {"head_dim": 12},
        {"num_attention_heads": 4},
        {"num_hidden_layers": 2},
    ],
    "llama-gelu": [
        {"hidden_act": "silu"},
        {"hidden_act": "relu"},
        {"hidden_act": "relu2"},
        {"hidden_act": "quick_gelu"},
    ],
    "llama-linear-rope": [{"rope_parameters.factor": 4.1}],
    "llama-dynamic-rope": [{"rope_parameters.factor": 3.2}, {"max_position_embeddings": 50}],
    "llama3-rope": [
        {"rope_parameters.factor": 7.0},
        {"rope_parameters.low_freq_factor": 1.5},
        {"rope_parameters.high_freq_factor": 5.0},
        {"rope_parameters.original_max_position_embeddings": 90},
    ],
    "llama-yarn-attention-factor": [
        {"rope_parameters.factor": 4.2},
        {"rope_parameters.attention_factor": 1.22},
        {"rope_parameters.attention_factor": None},
        {"rope_parameters.beta_fast": 8.0},
        {"rope_parameters.beta_slow": 2.0},
        {"rope_parameters.truncate": True},
        {"rope_parameters.original_max_position_embeddings": 80},
    ],
    "llama-yarn-mscale": [
        {"rope_parameters.mscale": 1.4},
        {"rope_parameters.mscale": None},
        {"rope_parameters.mscale_all_dim": 0.7},
    ],
    "llama-longrope": [
        {"rope_parameters.long_factor": [1.6, 2.0, 2.4, 3.1, 4.0, 5.2, 6.0, 7.5]},
        {"rope_parameters.factor": 6.0},
        {"rope_parameters.attention_factor": 1.1},
    ],
    "mistral-v0.1": [{"sliding_window": 25}, {"sliding_window": None}, {"rms_norm_eps": 0.02}],
    "mistral-nemo": [{"head_dim": 20}, {"rope_parameters.rope_theta": 9e5}],
    "mixtral": [{"num_experts_per_tok": 2}, {"sliding_window": 40}, {"rms_norm_eps": 0.02}],
    "qwen2": [{"rms_norm_eps": 0.02}, {"rope_parameters.rope_theta": 9e5}, {"tie_word_embeddings": True}],
    "qwen2-window": [{"sliding_window": 21}, {"max_window_layers": 1}, {"use_sliding_window": False}],
    "qwen3": [{"attention_bias": True}, {"head_dim": 16}, {"rms_norm_eps": 0.02}],
    "qwen3-window": [{"sliding_window": 19}, {"max_window_layers": 3}, {"use_sliding_window": False}],
    "qwen2-moe": [
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"shared_expert_intermediate_size": 20},
        {"qkv_bias": False},
    ],
    "qwen2-moe-window": [{"sliding_window": 21}, {"max_window_layers": 1}, {"use_sliding_window": False}],
    "qwen3-moe": [
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": False},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 30},
    ],
    "phi-1": [
        {"layer_norm_eps": 0.05},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rope_parameters.rope_theta": 9000.0},
        {"hidden_act": "relu"},
        {"qk_layernorm": True},
        {"num_key_value_heads": 3},
    ],
    "phi-3-mini-4k": [{"sliding_window": 22}, {"sliding_window": None}, {"rms_norm_eps": 0.02}],
    "phi-3.5-mini-long": [
        {"rope_parameters.long_factor": [1.6, 2.0, 2.4, 3.1, 4.0, 5.2, 6.0, 7.5]},
        {"original_max_position_embeddings": 30},
        {"max_position_embeddings": 1024},
    ],
    "phi-3.5-mini-short": [{"rope_parameters.short_factor": [1.1, 1.1, 1.3, 1.4, 1.6, 2.0, 2.1, 2.4]}],
    "phi-4": [{"rope_parameters.partial_rotary_factor": 0.5}, {"tie_word_embeddings": True}],
    "stablelm-3b": [
        {"layer_norm_eps": 0.05},
        {"rope_parameters.partial_rotary_factor": 0.5},
        {"rope_parameters.rope_theta": 5000.0},
        {"use_qkv_bias": True},
        {"qk_layernorm": True},
        {"use_parallel_residual": True},
        {"tie_word_embeddings": True},
    ],
    "gemma-2b": [
        {"rms_norm_eps": 0.02},
        {"head_dim": 16},
        {"attention_bias": True},
        {"hidden_act": "silu"},
        {"rope_parameters.rope_theta": 3000.0},
    ],
    "gemma-2": [
        {"attn_logit_softcapping": 3.5},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": 6.0},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 10},
        {"sliding_window": 20},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"hidden_activation": "silu"},
        {"rms_norm_eps": 0.02},
    ],
    "gemma-3-1b": [
        {"rope_parameters.sliding_attention.rope_theta": 900.0},
        {"rope_parameters.full_attention.rope_theta": 3e5},
        {"rope_parameters.full_attention.factor": 3.0},
        {"query_pre_attn_scalar": 24},
        {"sliding_window": 17},
        {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
        {"final_logit_softcapping": 4.0},
        {"attention_bias": True},
        {"rms_norm_eps": 0.02},
    ],
    "mistral-small-3.1": [{"text_config.sliding_window": 17}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "llava-1.5": [{"text_config.rms_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "llava-next": [{"text_config.rms_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "llava-onevision": [{"text_config.rms_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "command-a-vision": [{"text_config.layer_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "lighton-ocr": [{"text_config.rms_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "smolvlm": [{"text_config.rms_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "internvl": [{"text_config.rms_norm_eps": 0.1}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "gemma-3-multimodal": [{"text_config.sliding_window": 17}, {"text_config.query_pre_attn_scalar": 24}],
    "glm-4-9b-chat": [
        {"attention_bias": False},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rope_parameters.rope_theta": 9000.0},
        {"rms_norm_eps": 0.02},
        {"tie_word_embeddings": True},
    ],
    "glm-4-0414": [
        {"attention_bias": True},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rms_norm_eps": 0.02},
    ],
    "deepseek-v2-lite": [
        {"q_lora_rank": 20},
        {"routed_scaling_factor": 1.1},
        {"num_experts_per_tok": 3},
        {"first_k_dense_replace": 2},
        {"n_shared_experts": 1},
        {"attention_bias": True},
        {"qk_rope_head_dim": 4},
        {"qk_nope_head_dim": 16},
        {"v_head_dim": 14},
        {"kv_lora_rank": 32},
        {"rms_norm_eps": 0.02},
    ],
    "deepseek-v2": [
        {"topk_method": "greedy"},
        {"n_group": 3},
        {"topk_group": 3},
        {"rope_parameters.mscale": 1.0},
        {"rope_parameters.mscale_all_dim": 0.8},
        {"rope_parameters.factor": 7.0},
        {"rope_parameters.original_max_position_embeddings": 100},
        {"rope_parameters.beta_fast": 2},
        {"rope_parameters.beta_slow": 0.5},
        {"rope_parameters.rope_theta": 90.0},
    ],
    "deepseek-v3": [
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.8},
        {"n_group": 3},
        {"topk_group": 3},
        {"rope_interleave": False},
        {"first_k_dense_replace": 2},
        {"q_lora_rank": None},
        {"rope_parameters.mscale_all_dim": 0.8},
    ],
    "deepseek-v3.2": [{"index_topk": 9}],
    "glm-5.2": [{"index_topk": 9}, {"mlp_layer_types": ["dense", "dense", "sparse"]}],
    "starcoder": [
        {"multi_query": False},
        {"scale_attn_weights": False},
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.05},
        {"n_inner": 80},
        {"n_head": 4},
        {"tie_word_embeddings": False},
    ],
    "starcoder2-3b": [
        {"sliding_window": 21},
        {"sliding_window": None},
        {"use_bias": False},
        {"norm_epsilon": 0.05},
        {"hidden_act": "relu"},
        {"rope_parameters.rope_theta": 9e4},
        {"tie_word_embeddings": False},
    ],
    "gemma-4-e2b": [
        {"rms_norm_eps": 0.05},
        {"sliding_window": 23},
        {"final_logit_softcapping": None},
        {"use_double_wide_mlp": False},
        {"num_kv_shared_layers": 2},
        {"num_key_value_heads": 2},
        {"hidden_size_per_layer_input": 8},
        {"hidden_activation": "silu"},
        {"rope_parameters.sliding_attention.rope_theta": 2e3},
        {"rope_parameters.full_attention.rope_theta": 1e3},
        {"rope_parameters.full_attention.partial_rotary_factor": 0.5},
    ],
    "gemma-4-31b": [{"attention_k_eq_v": False}, {"num_global_key_value_heads": 3}, {"global_head_dim": 24}],
    "gemma-4-26b-a4b": [{"top_k_experts": 2}, {"enable_moe_block": False}],
    "gpt-oss": [
        {"rms_norm_eps": 0.05},
        {"sliding_window": 23},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"num_experts_per_tok": 2},
        {"attention_bias": False},
        {"rope_parameters.factor": 5.0},
        {"rope_parameters.truncate": True},
        {"tie_word_embeddings": True},
    ],
    "granite": [
        {"embedding_multiplier": 3.1},
        {"residual_multiplier": 0.45},
        {"attention_multiplier": 0.32},
        {"logits_scaling": 1.72},
        {"rope_parameters.rope_theta": 9e5},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rms_norm_eps": 0.5},
    ],
}


def rows() -> list[Any]:
    found = []
    known: set[str] = set()
    for name, changes in CHANGES.items():
        own = [{key.rpartition(".")[2] for key in change} for change in changes]
        for change, keys in zip(changes, own, strict=True):
            if IS_DEEP or not keys <= known:
                label = "-".join(f"{key}={value}" for key, value in change.items())
                found.append(pytest.param(name, change, id=f"{name}-{label}"))
        known.update(*own)
    return found


def apply(entries: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The entries with the change made; its names may be dotted."""
    changed = copy.deepcopy(entries)
    for name, value in change.items():
        *within, last = name.split(".")
        target = changed
        for part in within:
            target = target[part]
        target[last] = value
        if within and value is None:
            del target[last]
    return changed


def prompts_of(name: str) -> list[list[int]]:
    return SHORT_PROMPTS if name in CHANGES_STATES else PROMPTS


def ask(name: str, directory: Path) -> list[Answer]:
    """Our logits for all prompts."""
    with running(directory, **VARIANTS[name].engine) as engine:
        return answers(engine, prompts_of(name), num_tokens=NUM_NEW_TOKENS)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> transformers' model without a change, and our logits."""
    known: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in known:
            directory = tmp_path_factory.mktemp(name)
            model = make_model(name)
            save(model, directory)
            known[name] = model, ask(name, directory)
        return known[name]

    return get


@pytest.mark.parametrize(("name", "change"), rows())
def test_a_changed_entry_moves_the_logits(name: str, change: dict[str, Any], usual: Any, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    model, before = usual(name)
    changed = make_model(name, entries=apply(variant.all_entries(), change))
    known = model.state_dict()
    own = changed.state_dict()
    shared = {key for key in own.keys() & known.keys() if known[key].shape == own[key].shape}
    if "tie_word_embeddings" in change:
        shared.discard("lm_head.weight")
    changed.load_state_dict({key: (known if key in shared else own)[key] for key in own})
    save(changed, tmp_path)
    found = ask(name, tmp_path)
    expected = judge(changed, prompts_of(name), found, one_by_one=variant.one_by_one)
    for answer, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(answer.logits, logits, atol=variant.tolerance, rtol=0)
    # The first token of each answer follows the same prompt with both.
    moved = max(float((now.logits[0] - then.logits[0]).abs().max()) for now, then in zip(found, before, strict=True))
    assert moved > 100 * variant.tolerance
