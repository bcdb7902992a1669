"""Models with Mamba-2 in most layers: Granite 4.0-H, Bamba, Nemotron-H, Falcon-H1; with Mamba-1: Jamba; both alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.granite import MULTIPLIERS, OTHERS
from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

SIZES: dict[str, Any] = {
    **NO_HEAD_DIM, "num_hidden_layers": 4, "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_state": 24, "mamba_chunk_size": 8,
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
GROUPS: dict[str, Any] = {
    "mamba_n_groups": 6, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_expand": 1,
    "mamba_d_head": 8,
}  # fmt: skip


def steady(model: nn.Module) -> None:
    """Let states decay at various rates as trained ones do, and give norms, skips and steps numbers of their own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 0.5)
            elif name.endswith(".D"):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)


def steady_channels(model: nn.Module) -> None:
    """Let states of channels decay, too, and make products as small as those of trained models."""
    steady(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("x_proj.weight", "dt_proj.weight")):
                parameter.mul_(0.15)
            elif name.endswith("dt_proj.bias"):
                parameter.uniform_(-3.0, 0.5)
            elif name.endswith("out_proj.weight"):
                parameter.mul_(0.4)


def variant(config: str, entries: dict[str, Any], *, is_loose: bool = False) -> Variant:
    """transformers computes prompts in chunks, with other rounding errors than token by token, which Bamba's cannot."""
    entries = {**SIZES, "rms_norm_eps": 2e-2, **entries}
    return Variant(config, entries, is_loose=is_loose, one_by_one=config != "Bamba", patch=steady)


GRANITE: dict[str, Any] = {"num_local_experts": 0, "shared_intermediate_size": 40, "layer_types": LAYERS}

# transformers raises steps to time_step_min where it reads several tokens at once; the published code does not.
NEMOTRON: dict[str, Any] = {
    "time_step_min": 1e-30,
    "num_hidden_layers": None, "rms_norm_eps": None, "layer_norm_epsilon": 2e-2, "mamba_num_heads": 12,
    "mamba_head_dim": 8, "n_groups": 6, "ssm_state_size": 24, "chunk_size": 8,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention", "mlp"],
}  # fmt: skip
NEMOTRON_MOE: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "moe"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.7,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
    **rope(theta=1e6),
}
MAMBA2: dict[str, Any] = {
    "hidden_size": 96, "head_dim": 16, "intermediate_size": None, "num_attention_heads": None,
    "num_key_value_heads": None, "num_heads": 12, "n_groups": 6, "state_size": 24, "layer_norm_epsilon": 2e-2,
    "chunk_size": 8, "num_hidden_layers": 4,
}  # fmt: skip
# The norms of FalconMamba divide by small numbers, too.
MAMBA1: dict[str, Any] = {
    "hidden_size": 96, "head_dim": None, "intermediate_size": None, "num_attention_heads": None,
    "num_key_value_heads": None, "state_size": 12, "layer_norm_epsilon": 2e-2, "num_hidden_layers": 4,
}  # fmt: skip
# Two layers with attention, one of them with experts.
JAMBA: dict[str, Any] = {
    **NO_HEAD_DIM, "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 0, "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40,
    "mamba_d_state": 12, "mamba_dt_rank": 9, "rms_norm_eps": 1e-2,
}  # fmt: skip

VARIANTS = {
    "granite-4-h": variant(
        "GraniteMoeHybrid", {**GRANITE, **MULTIPLIERS, "tie_word_embeddings": True, **rope(theta=1e6)}
    ),
    "granite-4-h-groups": variant(
        "GraniteMoeHybrid",
        {**GRANITE, **OTHERS, **GROUPS, **rope(theta=1e6), "position_embedding_type": "rope", "attention_bias": True},
    ),
    "granite-4-h-moe": variant(
        "GraniteMoeHybrid",
        {
            **GRANITE,
            **MULTIPLIERS,
            **rope(theta=1e6),
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
    "bamba": variant("Bamba", {"attn_layer_indices": [1], **rope(theta=1e4, partial_rotary_factor=0.5)}),
    "bamba-groups": variant(
        "Bamba",
        {**GROUPS, "attn_layer_indices": [0, 2], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "jamba": Variant("Jamba", JAMBA, is_loose=True, one_by_one=True, patch=steady_channels),
    "jamba-dense": Variant(
        "Jamba",
        {
            **JAMBA,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": "auto",
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_expand": 1,
            "attn_layer_offset": 0,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
        one_by_one=True,
        patch=steady_channels,
    ),
    "mamba-1": Variant(
        "Mamba",
        {**MAMBA1, "conv_kernel": 3, "use_bias": True, "use_conv_bias": False, "time_step_rank": 9, "expand": 1},
        one_by_one=True,
        patch=steady_channels,
    ),
    "falcon-mamba": Variant(
        "FalconMamba",
        {**MAMBA1, "mixer_rms_eps": 1e-2, "tie_word_embeddings": False},
        one_by_one=True,
        patch=steady_channels,
    ),
    "mamba-2": Variant("Mamba2", MAMBA2, one_by_one=True, patch=steady),
    "mamba-2-one-group": Variant(
        "Mamba2",
        {
            **MAMBA2,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "expand": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
        one_by_one=True,
        patch=steady,
    ),
    "nemotron-h": Variant("NemotronH", NEMOTRON, one_by_one=True, patch=steady),
    "nemotron-h-bias": Variant(
        "NemotronH",
        {
            **NEMOTRON,
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "mlp_hidden_act": "silu",
        },
        one_by_one=True,
        patch=steady,
    ),
    "nemotron-3": Variant("NemotronH", {**NEMOTRON, **NEMOTRON_MOE}, is_loose=True, one_by_one=True, patch=steady),
    "nemotron-3-latents": Variant(
        "NemotronH",
        {**NEMOTRON, **NEMOTRON_MOE, "moe_latent_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        is_loose=True,
        one_by_one=True,
        patch=steady,
    ),
    "falcon-h1": variant("FalconH1", {**FALCON, "mamba_d_ssm": 96, "mamba_d_head": 8}),
    "falcon-h1-norm": variant(
        "FalconH1",
        {
            **FALCON,
            **GROUPS,
            "mamba_proj_bias": False,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-gate-first": variant(
        "FalconH1", {"mamba_d_ssm": 192, "mamba_rms_norm": True, "mamba_norm_before_gate": False, **rope(theta=1e4)}
    ),
}
