"""The published form of Ling 3.0, as llama.cpp's converter reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

# Name in published files -> the name that transformers writes.
_NAMES: Final = {
    "max_position_embeddings": "model_max_length", "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token", "head_dim": "linear_head_dim",
}  # fmt: skip


def publish_ling(directory: Path) -> None:
    """Rewrite config.json and the names of tensors in a directory that transformers has written."""
    path, weights_path = directory / "config.json", directory / "model.safetensors"
    config = json.loads(path.read_text())
    config |= {name: config[written] for name, written in _NAMES.items()}
    config |= {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "score_function": "sigmoid",
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    # transformers, which the converter asks, does not read these.
    del config["model_type"]
    path.write_text(json.dumps(config))
    weights = load_file(weights_path)
    linear = [name.removesuffix("A_log") for name in weights if name.endswith("A_log")]
    renamed = {
        name.replace(".dense.", ".o_proj.") if name.startswith(tuple(linear)) else name: weight
        for name, weight in weights.items()
    }
    save_file(renamed, weights_path, {"format": "pt"})
