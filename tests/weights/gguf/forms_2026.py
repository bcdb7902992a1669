"""The published forms of models of 2026, as llama.cpp's converter reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD

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


def publish_step(directory: Path) -> None:
    """Leave the text part alone, under the names of Step 3.5's entries and tensors."""
    path, weights_path = directory / "config.json", directory / "model.safetensors"
    config = json.loads(path.read_text())["text_config"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full, sliding = (config["rope_parameters"].pop(f"{kind}_attention") for kind in ("full", "sliding"))
    config |= {
        "architectures": ["Step3p5ForCausalLM"],
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "num_attention_groups": config["num_key_value_heads"],
        "norm_expert_weight": True,
        "moe_layers_enum": ",".join(str(idx) for idx, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"),
        "attention_other_setting": {"num_attention_heads": config["num_sliding_attention_heads"]},
        "rope_theta": [full.pop("rope_theta"), sliding["rope_theta"]],
        "partial_rotary_factors": [1.0 if slide else full["partial_rotary_factor"] for slide in slides],
        "rope_scaling": full,
    }
    for name in ("model_type", "rope_parameters", "num_key_value_heads"):
        del config[name]
    path.write_text(json.dumps(config))
    weights = load_file(weights_path)
    kept = {name: weight for name, weight in weights.items() if not name.startswith(("vision_model", "vit_"))}
    save_file(kept, weights_path, {"format": "pt"})


def publish_mimo(directory: Path) -> None:
    """Give MiMo-V2-Flash the names of its published entries. The number of a window does not count the new token."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    full, sliding = (config["rope_parameters"].pop(f"{kind}_attention") for kind in ("full", "sliding"))
    window = config["sliding_window"] - 1
    config |= {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        **{f"swa_{name}": config[name] for name in ("head_dim", "num_attention_heads", "v_head_dim")},
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "sliding_window": window,
        "sliding_window_size": window,
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    # transformers would rename entries again.
    for name in ("model_type", "rope_parameters"):
        del config[name]
    path.write_text(json.dumps(config))


def publish_exaone(directory: Path) -> None:
    """Give the limits of EXAONE 4.5's images the names of its published file."""
    path = directory / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    limits = {"min_pixels": settings["size"]["shortest_edge"], "max_pixels": settings["size"]["longest_edge"]}
    path.write_text(json.dumps({**settings, **limits}))


def publish_minicpm(directory: Path) -> None:
    """Write the settings for images of MiniCPM-V 4.6, of which a slice has about 32 x 32 pixels."""
    config = json.loads((directory / "config.json").read_text())
    settings = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": config["vision_config"]["patch_size"],
        "scale_resolution": 32, "downsample_mode": config["downsample_mode"], "max_slice_nums": 9,
        "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
