"""InternVL's own form of its checkpoints, which llama.cpp's converter reads; transformers has another one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_BLOCK: Final = re.compile(r"vision_tower\.encoder\.layer\.(\d+)\.(.*)")
_IN_BLOCK: Final = {
    "attention.projection_layer": "attn.proj", "attention.q_norm": "attn.q_norm", "attention.k_norm": "attn.k_norm",
    "layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_1": "ls1", "lambda_2": "ls2",
}  # fmt: skip
_OTHERS: Final = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.embeddings.patch_embeddings.projection": "vision_model.embeddings.patch_embedding",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}
_ARCHITECTURES: Final = {"qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def publish_internvl(directory: Path) -> None:
    """Rewrite the checkpoint in a directory, which is in transformers' form. Source: the model cards' own code."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    vision, text = config["vision_config"], config["text_config"]
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    side, patch_size = vision["image_size"][0], vision["patch_size"][0]
    published: dict[str, Any] = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": config["downsample_ratio"],
        "max_dynamic_patch": settings["max_patches"],
        "min_dynamic_patch": 1,
        "llm_config": {**text, "architectures": [_ARCHITECTURES[text["model_type"]]]},
        "vision_config": {
            **vision, "architectures": ["InternVisionModel"], "image_size": side, "patch_size": patch_size,
            "norm_type": vision["norm_type"], "qkv_bias": vision["attention_bias"],
        },
    }  # fmt: skip
    published["llm_config"]["tie_word_embeddings"] = config["tie_word_embeddings"]
    # get_model_architecture looks here before the converter renames llm_config.
    published["text_config"] = published["llm_config"]
    path.write_text(json.dumps(published))
    file = directory / "model.safetensors"
    save_file(_renamed(load_file(file)), file, {"format": "pt"})


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if (match := _BLOCK.fullmatch(name)) is None:
            for ours, theirs in _OTHERS.items():
                name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
            found[name] = weight
            continue
        block, rest = f"vision_model.encoder.layers.{match[1]}", match[2]
        if rest.startswith("attention.q_proj."):
            parts = (weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            found[f"{block}.attn.qkv.{rest.rpartition('.')[2]}"] = torch.cat(list(parts))
        elif not rest.startswith(("attention.k_proj.", "attention.v_proj.")):
            for ours, theirs in _IN_BLOCK.items():
                rest = theirs + rest.removeprefix(ours) if rest.startswith(ours) else rest
            found[f"{block}.{rest}"] = weight
    return found
