"""Tiny random checkpoints, written by transformers, the reference for all models. Their weights reveal mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging

from tests.models.moondream import publish_moondream
from tests.models.published_names import (
    publish_bailing_hybrid,
    publish_deepseek_v4,
    publish_hy_v4,
    publish_kimi_k25,
    publish_kimi_linear,
    publish_olmo_hybrid,
)
from tests.models.variants import COMMON, VARIANTS

__all__ = ["COMMON", "CONFIGS", "VARIANTS", "auto_model", "make_model", "write_checkpoint"]

logging.disable_progress_bar()

# Models that read images normalise red, green and blue with these numbers.
IMAGE_MEAN, IMAGE_STD = [0.5, 0.4, 0.3], [0.5, 0.6, 0.2]
# Llama's class computes these, and gives its own name.
_COMPUTED_BY_LLAMA = {"internlm3": "InternLM3ForCausalLM", "iquestcoder": "IQuestCoderForCausalLM"}
# Variants for tests of other things than models.
CONFIGS = ("llama", "llama-bias-tied", "llama3-rope", "llama-linear-rope", "qwen3", "qwen3-tied-bias")


def write_checkpoint(name: str, directory: Path, *, max_shard_size: str = "1GB") -> nn.Module:
    """Write the checkpoint `name` of VARIANTS and return the transformers model, in float32, to compare with."""
    model = make_model(name)
    save(model, directory, max_shard_size=max_shard_size)
    return model


def save(model: nn.Module, directory: Path, *, max_shard_size: str = "1GB") -> None:
    model.save_pretrained(directory, max_shard_size=max_shard_size)  # type: ignore[operator]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    config = json.loads((directory / "config.json").read_text())
    if (name := _COMPUTED_BY_LLAMA.get(config["model_type"])) is not None:
        (directory / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    if config["model_type"] == "kimi_k25":
        publish_kimi_k25(directory)
        settings = {
            "patch_size": config["vision_config"]["patch_size"], "merge_size": 2, "max_patches": 96,
            "size": {"max_height": 16, "max_width": 16}, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "image_processor_type": "Kimi_K25ImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] == "olmo_hybrid":
        publish_olmo_hybrid(directory, config)
    if config["model_type"] == "bailing_hybrid" and "q_lora_rank" in config:
        publish_bailing_hybrid(directory, config)
    if config["model_type"] == "deepseek_v4":
        publish_deepseek_v4(directory, config)
    if "moondream" in config:
        publish_moondream(directory, config)
    if config["model_type"] == "hy_v4":
        publish_hy_v4(directory)
    if config["model_type"] == "kimi_linear":
        publish_kimi_linear(directory, config)
    if config["model_type"] == "paddleocr_vl":
        settings = {
            "patch_size": config["vision_config"]["patch_size"], "size": {"shortest_edge": 1, "longest_edge": 2**20},
            "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD, "image_processor_type": "PaddleOCRVLImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"].startswith(("qwen", "lfm3_vl", "exaone4_5")) and (vision := config.get("vision_config")):
        settings = {
            "patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "size": {"shortest_edge": 1, "longest_edge": 2**20}, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "image_processor_type": "Qwen2VLImageProcessorFast",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] == "gemma3":
        side = config["vision_config"]["image_size"]
        settings = {
            "size": {"height": side, "width": side}, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "image_processor_type": "Gemma3ImageProcessorFast", "image_seq_length": config["mm_tokens_per_image"],
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] == "llava_next":
        side = config["vision_config"]["image_size"]
        settings = {
            "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "image_mean": IMAGE_MEAN,
            "image_std": IMAGE_STD, "image_grid_pinpoints": config["image_grid_pinpoints"],
            "image_processor_type": "LlavaNextImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] == "llava_onevision":
        side = config["vision_config"]["image_size"]
        settings = {
            "size": {"height": side, "width": side}, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "image_grid_pinpoints": config["image_grid_pinpoints"],
            "image_processor_type": "LlavaOnevisionImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        processor = {"vision_aspect_ratio": config["vision_aspect_ratio"]}
        (directory / "processor_config.json").write_text(json.dumps(processor))
    vision_kind = (config.get("vision_config") or {}).get("model_type")
    if config["model_type"] == "llava" and vision_kind != "pixtral":
        side = config["vision_config"]["image_size"]
        settings = {
            "size": {"shortest_edge": side + 2}, "crop_size": {"height": side, "width": side}, "image_mean": IMAGE_MEAN,
            "image_std": IMAGE_STD, "image_processor_type": "CLIPImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    elif config["model_type"] in ("mistral3", "mistral_large4", "llava", "lighton_ocr"):
        size = config["vision_config"]["patch_size"]
        settings = {
            "patch_size": {"height": size, "width": size}, "size": {"longest_edge": 160}, "image_mean": IMAGE_MEAN,
            "image_std": IMAGE_STD, "image_processor_type": "PixtralImageProcessorFast",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        processor = {"patch_size": size, "spatial_merge_size": config.get("spatial_merge_size", 1)}
        (directory / "processor_config.json").write_text(json.dumps(processor))
    if config["model_type"] == "lfm2_vl":
        factor = config["downsample_factor"]
        settings = {
            "encoder_patch_size": config["vision_config"]["patch_size"], "downsample_factor": factor,
            "tile_size": 8 * factor, "min_image_tokens": 2, "max_image_tokens": 6, "max_tiles": 6,
            "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD, "image_processor_type": "Lfm2VlImageProcessorFast",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] in ("idefics3", "smolvlm"):
        vision = config["vision_config"]
        side = vision["image_size"]
        settings = {
            "max_image_size": {"longest_edge": side}, "size": {"longest_edge": 3 * side}, "image_mean": IMAGE_MEAN,
            "image_std": IMAGE_STD, "image_processor_type": "SmolVLMImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        processor = {"image_seq_len": (side // vision["patch_size"] // config["scale_factor"]) ** 2}
        (directory / "processor_config.json").write_text(json.dumps(processor))
    if config["model_type"] in ("glm4v", "glm46v", "glm4v_moe", "glm_ocr"):
        vision = config["vision_config"]
        settings = {
            "patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"],
            "temporal_patch_size": vision["temporal_patch_size"], "size": {"shortest_edge": 2, "longest_edge": 2**20},
            "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD, "image_processor_type": "Glm4vImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] in ("minicpmv4_6", "minicpmv4_7"):
        settings = {
            "patch_size": config["vision_config"]["patch_size"], "scale_resolution": 32, "max_slice_nums": 6,
            "downsample_mode": config["downsample_mode"], "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "image_processor_type": "MiniCPMV4_6ImageProcessor",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] == "internvl":
        height, width = config["vision_config"]["image_size"]
        settings = {
            "size": {"height": height, "width": width}, "max_patches": 6, "image_mean": IMAGE_MEAN,
            "image_std": IMAGE_STD, "image_processor_type": "GotOcr2ImageProcessorFast",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        processor = {"image_seq_length": config["image_seq_length"]}
        (directory / "processor_config.json").write_text(json.dumps(processor))
    if config["model_type"] == "cohere2_vision":
        side = config["vision_config"]["image_size"]
        settings = {
            "size": {"height": side, "width": side}, "max_patches": 6, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "patch_size": side // config["vision_config"]["patch_size"] // config["downsample_factor"],
            "image_processor_type": "Cohere2VisionImageProcessorFast",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    if config["model_type"] == "llama4":
        side = config["vision_config"]["image_size"]
        settings = {
            "size": {"height": side, "width": side}, "max_patches": 6, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
            "image_processor_type": "Llama4ImageProcessorFast",
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        (directory / "processor_config.json").write_text(json.dumps({"patch_size": 4}))
    if config["model_type"] == "gemma4" and (vision := config.get("vision_config")):
        settings = {
            "patch_size": vision["patch_size"], "pooling_kernel_size": vision["pooling_kernel_size"],
            "max_soft_tokens": 70, "image_processor_type": "Gemma4ImageProcessor", "do_normalize": False,
            "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0],
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))


def auto_model(config: Any) -> Any:
    """The class that makes the transformers model of a config."""
    is_known = type(config) in transformers.AutoModelForCausalLM._model_mapping
    is_text_only = is_known and getattr(config, "text_config", None) is None
    return transformers.AutoModelForCausalLM if is_text_only else transformers.AutoModelForImageTextToText


def make_model(name: str, entries: dict[str, Any] | None = None) -> nn.Module:
    """The transformers model of the variant `name` with random weights. entries: in place of the variant's own."""
    variant = VARIANTS[name]
    config = getattr(transformers, f"{variant.config}Config")(**(entries or variant.all_entries()))
    torch.manual_seed(sum(map(ord, name)))
    model = auto_model(config).from_config(config, attn_implementation="eager").eval()
    stored = model.state_dict().keys()
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter_name in stored:
                _reinitialise(parameter_name, parameter, is_peaked=name not in CONFIGS)
    variant.patch(model)
    return model  # type: ignore[no-any-return]


def _reinitialise(name: str, weight: Tensor, *, is_peaked: bool) -> None:
    """Move norm weights and biases away from 1 and 0; make attention peaked, and logits vary by 1 and more.

    is_peaked: also where queries and keys are normalised.
    """
    if not weight.shape or not weight.is_floating_point():
        # A limit of products, or a table of experts, which the variant sets.
        return
    if name.endswith("bias"):
        weight.normal_(0, 0.2)
    elif "lambda_" in name:
        weight.uniform_(0.5, 1.5)
    elif "norm" in name or "ln_" in name:
        # Gemma's are added to 1.
        offset = 0.0 if bool((weight == 0).all()) else 1.0
        if offset == 0.0 and "post_" in name:
            # Its embeddings are large and its head is tied to them: without more from its layers it repeats the token.
            offset = 2.5
        is_of_heads = any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_", "key_"))
        low, high = (0.0, 1.5) if is_of_heads and is_peaked else (-0.5, 0.5)
        weight.uniform_(low, high).add_(offset)
    elif (
        "embed_tokens" in name
        or name.endswith("embeddings.weight")
        or "lm_head" in name
        or "wte" in name
        or "wpe" in name
    ):
        weight.normal_(0, 0.25 * (48 / weight.shape[-1]) ** 0.5)
    elif "qkv_proj" in name:
        # Longrope's factor makes scores larger.
        weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    elif "_a_proj" in name or "_b_proj" in name:
        # Two of them follow each other.
        weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
    else:
        weight.normal_(0, 2.0 / weight.shape[-1] ** 0.5)
