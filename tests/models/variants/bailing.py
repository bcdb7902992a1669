"""Ling 3.0: the delta rule with decays that have a bound, latent attention with a gate for each head, experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.step3p7 import modeling_step3p7 as step

from tests.models.variants.qwen_next import steady
from tests.models.variants.variant import Variant, rope

LING: dict[str, Any] = {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.7, "num_mtp_layers": 0,
}  # fmt: skip


class LowRank(nn.Module):
    """DeepSeek-V3's projection of queries by two matrices, as Ling 3.0 tiny has it; transformers has flash's alone."""

    def __init__(self, num_inputs: int, rank: int, num_outputs: int) -> None:
        super().__init__()
        self.q_a_proj = nn.Linear(num_inputs, rank, bias=False)
        self.q_a_layernorm = DeepseekV3RMSNorm(rank)
        self.q_b_proj = nn.Linear(rank, num_outputs, bias=False)
        for weight in self.q_a_proj.weight, self.q_b_proj.weight:
            nn.init.normal_(weight, 0, 1.2 / weight.shape[-1] ** 0.5)
        nn.init.uniform_(self.q_a_layernorm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # type: ignore[no-any-return]


@torch.no_grad()
def _as_published(model: Any) -> None:
    """Do what transformers leaves out: queries of low rank, and Step 3.7's bounds of gated products, which are met."""
    steady(model)
    config = model.config
    experts, shared = (getattr(config, f"{kind}_swiglu_limit_list", None) for kind in ("expert", "share_expert"))
    for layer_idx, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        if (rank := getattr(config, "q_lora_rank", None)) is not None and hasattr(attention, "kv_b_proj"):
            attention.q_proj = LowRank(config.hidden_size, rank, attention.q_proj.out_features)
        if experts is not None and experts[layer_idx]:
            mlp.experts.limit = experts[layer_idx]
            mlp.experts._apply_gate = step.Step3p7Experts._apply_gate.__get__(mlp.experts)
            mlp.experts.forward = step.Step3p7Experts.forward.__get__(mlp.experts)
            mlp.experts.gate_up_proj.mul_(2.5)
        if shared is not None and shared[layer_idx]:
            mlp.shared_experts.limit = shared[layer_idx]
            mlp.shared_experts.forward = step.Step3p7MLP.forward.__get__(mlp.shared_experts)
            mlp.shared_experts.gate_proj.weight.mul_(2.5)
            mlp.shared_experts.up_proj.weight.mul_(2.5)


VARIANTS = {
    "ling-3-flash": Variant(
        "BailingHybrid",
        {
            **LING, "num_hidden_layers": 4, "layer_group_size": 2, "first_k_dense_replace": 1, "kda_lower_bound": -2.5,
            "rms_norm_eps": 5e-2, "short_conv_kernel_size": 3, "n_shared_experts": 2, **rope(theta=1e3),
        },
        is_loose=True, one_by_one=True, patch=steady,
    ),
    "ling-3-tiny": Variant(
        "BailingHybrid",
        {
            **LING, "layer_group_size": 3, "q_lora_rank": 20, "expert_swiglu_limit_list": [5, 0, 4],
            "share_expert_swiglu_limit_list": [7, 0, 5],
            "mlp_layer_types": ["sparse", "dense", "sparse"], "kda_safe_gate": False, "norm_topk_prob": False,
            "head_dim": 12, "tie_word_embeddings": False, **rope(theta=5e3),
        },
        is_loose=True, one_by_one=True, patch=_as_published,
    ),
}  # fmt: skip
