"""The config.json and preprocessor_config.json that a GGUF file with a vision part amounts to. Imports no torch.

Every function raises ModelLoadError, which names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, prod
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.metadata import Metadata
from pagewick.weights.gguf.vision_keys import VisionKeys

# The encoders of these families have one eps; the converter writes that of the text part, which is the same.
_EPS: Final = 1e-6
_WINDOW: Final = 112
_GEMMA3: Final = "gemma3"
_GEMMA4: Final = "gemma4v"
# A square with this number of patches per side becomes a row, in all models of Gemma 3 and in all of Gemma 4.
_POOLED: Final = 4
_POOLED_4: Final = 3


def whole_entries(file: VisionKeys, text: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the whole model, without the token of images. config: that of the text part."""
    _check_effects(file)
    found: dict[str, Any] = {**config, "architectures": [file.family.models[text.kind]]}
    if file.projector == _GEMMA3:
        return {**found, "vision_config": _gemma3(file), "mm_tokens_per_image": _num_tokens(file)}
    if file.projector == _GEMMA4:
        # No key says it: the models whose layers have inputs of their own are causal.
        sees_later = None if found.get("hidden_size_per_layer_input") else "vision"
        row = text.values.get("tokenizer.ggml.padding_token_id", 0)
        return {
            **found, "vision_config": _gemma4(file), "use_bidirectional_attention": sees_later, "pad_token_id": row,
        }  # fmt: skip
    found["vision_config"] = _qwen(file, text)
    scaling = found.get("rope_scaling") or {"rope_type": "default"}
    found["rope_scaling"] = {**scaling, "mrope_section": _sections(text)}
    if file.family.is_interleaved:
        found["rope_scaling"]["mrope_interleaved"] = True
    # Heads of Qwen2-VL always share out the hidden size.
    head_dim = found.pop("head_dim") if text.kind == "qwen2vl" else 0
    if head_dim and head_dim * found["num_attention_heads"] != found["hidden_size"]:
        raise text.wrong("qwen2vl.attention.key_length", f"{head_dim}, and heads share out embedding_length")
    return found


def processor_files(file: VisionKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the preprocessor_config.json, and the entries of config.json that the settings of images need."""
    config: dict[str, Any] = {}
    if file.projector == _GEMMA3:
        config = {"vision_config": _gemma3(file), "mm_tokens_per_image": _num_tokens(file)}
        side = file.count("image_size")
        entries: dict[str, Any] = {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
        }
    elif file.projector == _GEMMA4:
        config = {"vision_config": _gemma4(file)}
        entries = {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": file.count("patch_size"),
            "pooling_kernel_size": config["vision_config"]["pooling_kernel_size"],
            "do_normalize": True,
        }
    else:
        entries = _qwen_processor(file)
    return {**entries, **{name: file.channels(name) for name in ("image_mean", "image_std")}}, config


def _qwen(file: VisionKeys, text: Metadata) -> dict[str, Any]:
    """The entry vision_config of a model of Qwen's."""
    width, depth = file.count("embedding_length"), _depth(file)
    inner = _inner(file, width)
    found: dict[str, Any] = {
        "depth": depth,
        "num_heads": file.count("attention.head_count"),
        "hidden_act": file.family.activation,
        "patch_size": file.count("patch_size"),
        "spatial_merge_size": file.count("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "hidden_size": width,
        "intermediate_size": inner,
        "out_hidden_size": text.get("embedding_length"),
    }
    if file.projector == "qwen2vl_merger":
        found |= {"embed_dim": width, "hidden_size": text.get("embedding_length"), "mlp_ratio": inner / width}
    if file.projector == "qwen2.5vl_merger":
        every = file.count("n_wa_pattern")
        found["fullatt_block_indexes"] = list(range(every - 1, depth, every))
        found["window_size"] = file.count("window_size", _WINDOW)
    if file.projector == "qwen3vl_merger":
        found["num_position_embeddings"] = file.shape("v.position_embd.weight")[0]
        found["deepstack_visual_indexes"] = file.deepstack
    return found


def _gemma3(file: VisionKeys) -> dict[str, Any]:
    """The entry vision_config of Gemma 3."""
    width = file.count("embedding_length")
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": _inner(file, width),
        "num_hidden_layers": _depth(file),
        "num_attention_heads": file.count("attention.head_count"),
        "hidden_act": file.family.activation,
        "image_size": file.count("image_size"),
        "patch_size": file.count("patch_size"),
    }


def _gemma4(file: VisionKeys) -> dict[str, Any]:
    """The entry vision_config of Gemma 4."""
    width, num_heads = file.count("embedding_length"), file.count("attention.head_count")
    positions = file.shape("v.position_embd.weight")
    if len(positions) != 3:
        raise ModelLoadError(f"{file.where}: v.position_embd.weight must have three dimensions\n  use another file")
    names = {tensor.name for tensor in file.tensors}
    return {
        "model_type": "gemma4_vision",
        "hidden_size": width,
        "intermediate_size": _inner(file, width),
        "num_hidden_layers": _depth(file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": width // num_heads,
        "hidden_activation": file.family.activation,
        "patch_size": file.count("patch_size"),
        "pooling_kernel_size": file.count("projector.scale_factor", _POOLED_4),
        "position_embedding_size": positions[1],
        "use_clipped_linears": any(name.endswith(".input_max") and name.startswith("v.") for name in names),
        "standardize": "v.std_bias" in names,
    }


def _num_tokens(file: VisionKeys) -> int:
    """The number of an image's tokens in Gemma 3."""
    per_side = file.count("image_size") // file.count("patch_size")
    pooled = file.count("projector.scale_factor", _POOLED)
    if per_side % pooled:
        raise file.wrong("projector.scale_factor", f"{pooled}, which does not divide {per_side} patches along a side")
    return int((per_side // pooled) ** 2)


def _depth(file: VisionKeys) -> int:
    if (depth := file.count("block_count")) > len(file.tensors):
        raise file.wrong("block_count", f"{depth}, more than the tensors of the file")
    return depth


def _inner(file: VisionKeys, width: int) -> int:
    """The width of MLPs. The key feed_forward_length is another number in files of Qwen2-VL."""
    return int(prod(file.shape("v.blk.0.ffn_up.weight")) // width)


def _qwen_processor(file: VisionKeys) -> dict[str, Any]:
    # Files rarely limit the pixels of an image; those of the models as they are published count then.
    entries: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": file.count("patch_size"),
        "merge_size": file.count("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }
    for name, default in zip(("min_pixels", "max_pixels"), file.family.limits, strict=True):
        entries[name] = file.count(f"image_{name}", default)
    return entries


def _check_effects(file: VisionKeys) -> None:
    """Raise ModelLoadError for keys with which the encoder computes something else than that of its family."""
    for kind in ("gelu", "silu"):
        if bool(file.values.get(f"clip.use_{kind}", False)) != (kind in file.family.uses):
            raise file.wrong(f"clip.use_{kind}", f"not what {file.projector} has", is_whole=True)
    eps = file.values.get("clip.vision.attention.layer_norm_epsilon", _EPS)
    if not isinstance(eps, int | float) or not isclose(eps, _EPS, rel_tol=1e-4):
        raise file.wrong("attention.layer_norm_epsilon", f"{eps!r:.80}, and only {_EPS:g} is supported")


def _sections(text: Metadata) -> list[int]:
    """The pairs that turn with time, row and column. A fourth number, for another axis, must be 0."""
    key = f"{text.kind}.rope.dimension_sections"
    sections = text.values.get(key)
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        raise text.wrong(key, "missing" if sections is None else f"{sections!r:.80}, and must be three numbers")
    return sections[:3]
