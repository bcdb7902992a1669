"""DeepSeek V4: windows and compressed entries, an indexer that selects fewer than sequences have, several streams.

Windows end inside of blocks, and chunks of prompts inside of windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.variant import Variant

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
V4: dict[str, Any] = {
    "num_key_value_heads": None, "intermediate_size": None, "head_dim": 24, "q_lora_rank": 20,
    "partial_rotary_factor": 1 / 3, "layer_types": [_SLIDING, _SPARSE, _HEAVY],
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "compress_rates": {_SPARSE: 4, _HEAVY: 16},
    "sliding_window": 21, "o_groups": 2, "o_lora_rank": 14, "index_n_heads": 14, "index_head_dim": 18, "index_topk": 6,
    "hc_mult": 3, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3, "n_routed_experts": 12, "num_experts_per_tok": 4,
    "moe_intermediate_size": 20, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-4, "rope_theta": 900.0,
    "compress_rope_theta": 400.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


@torch.no_grad()
def _with_bounded_gates(model: nn.Module) -> None:
    """Let the bounds of gated products be reached, and give each token experts by its id, for some tokens twice."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("gate_up_proj", "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight")):
            parameter.mul_(3.0)
        elif name.endswith("down_proj") or name.endswith("down_proj.weight"):
            parameter.mul_(0.1)
        elif name.endswith("tid2eid"):
            ids = torch.rand(len(parameter), 12).argsort(-1)[:, : parameter.shape[1]]
            ids[::5, 0] = ids[::5, 1]
            parameter.copy_(ids)


VARIANTS = {
    "deepseek-v4": Variant(
        "DeepseekV4", {**V4, "rope_parameters": YARN}, is_loose=True, patch=_with_bounded_gates,
    ),
}  # fmt: skip
