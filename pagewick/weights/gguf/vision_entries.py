"""The config.json and preprocessor_config.json that a GGUF file with a vision part amounts to. Imports no torch.

Every function raises ModelLoadError, which names the key. tiled_entries.py has the families that cut images into tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isclose
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf import tiled_entries
from pagewick.weights.gguf.metadata import Metadata
from pagewick.weights.gguf.vision_keys import ProcessorFiles, VisionKeys

_WINDOW: Final = 112
# A square with this number of patches per side becomes a row, in all models of Gemma 3 and in all of Gemma 4.
_POOLED: Final = 4
_POOLED_4: Final = 3


def whole_entries(file: VisionKeys, text: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the whole model, without the token of images. config: that of the text part."""
    _check_effects(file)
    found: dict[str, Any] = {**config, "architectures": [file.family.models[text.kind]]}
    if file.family.text_types:
        found["text_config"] = {**config, "model_type": _text_type(file, text, config)}
        del found["text_config"]["architectures"]
        found = {name: found[name] for name in ("architectures", "tie_word_embeddings", "text_config")}
    return {**found, **_CONFIGS[file.projector](file, text, found)}


def _text_type(file: VisionKeys, text: Metadata, config: Mapping[str, Any]) -> str:
    (architecture,) = config["architectures"]
    if (found := file.family.text_types.get(architecture)) is None:
        raise ModelLoadError(
            f"{file.where} is not the vision part of {text.where}: a {architecture} is no text part of models with "
            f"vision parts of the kind {file.projector}\n  give the two files of one model"
        )
    return found


def processor_files(file: VisionKeys) -> ProcessorFiles:
    """Return the files that say how the model wants its images, with the least that its settings need."""
    files = _PROCESSORS[file.projector](file)
    usual = {name: file.channels(name) for name in ("image_mean", "image_std")}
    return files._replace(image={**files.image, **usual})


def _qwen_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {**(found.get("rope_scaling") or {"rope_type": "default"}), "mrope_section": _sections(text)}
    if file.family.is_interleaved:
        scaling["mrope_interleaved"] = True
    entries: dict[str, Any] = {"vision_config": _qwen(file, text), "rope_scaling": scaling}
    if text.kind == "qwen2vl":
        # Heads of Qwen2-VL always share out the hidden size.
        head_dim = found["head_dim"]
        if head_dim * found["num_attention_heads"] != found["hidden_size"]:
            raise text.wrong("qwen2vl.attention.key_length", f"{head_dim}, and heads share out embedding_length")
        entries["head_dim"] = None
    return entries


def _exaone_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = file.count("attention.head_count")
    vision = {
        **_qwen(file, text),
        "model_type": "exaone4_5_vision",
        "num_key_value_heads": file.count("attention.head_count_kv", num_heads),
    }
    return {"vision_config": vision}


def _pixtral_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    merges = "mm.patch_merger.weight" in file.names
    entries = {
        # Old readers of config.json put a window into a file that has none.
        "text_config": {"sliding_window": None, **found["text_config"]},
        "vision_config": _pixtral(file, text),
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in file.names,
    }
    if merges:
        return {**entries, "spatial_merge_size": file.count("spatial_merge_size", 2)}
    return {
        **entries, "architectures": ["LlavaForConditionalGeneration"], "vision_feature_select_strategy": "full",
    }  # fmt: skip


def _lighton_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vision_config": _pixtral(file, text),
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in file.names,
        "spatial_merge_size": file.count("spatial_merge_size", 2),
    }


def _glm_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    scaling = found.get("rope_scaling") or {"rope_type": "default"}
    entries = {"vision_config": _glm(file, text), "rope_scaling": {**scaling, "mrope_section": _sections(text)}}
    return entries if _has_positions(file) else {**entries, "architectures": ["GlmOcrForConditionalGeneration"]}


def _gemma3_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"vision_config": _gemma3(file), "mm_tokens_per_image": _num_tokens(file)}


def _gemma4_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    # No key says it: the models whose layers have inputs of their own are causal.
    sees_later = None if found.get("hidden_size_per_layer_input") else "vision"
    row = text.values.get("tokenizer.ggml.padding_token_id", 0)
    return {"vision_config": _gemma4(file), "use_bidirectional_attention": sees_later, "pad_token_id": row}


def _qwen(file: VisionKeys, text: Metadata) -> dict[str, Any]:
    """The entry vision_config of a model of Qwen's."""
    width, depth, inner = file.count("embedding_length"), file.depth, file.inner_size
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
    if file.projector in ("qwen2.5vl_merger", "exaone4_5"):
        # Without the key, all patches of EXAONE 4.5 see each other.
        every = file.count("n_wa_pattern", None if file.projector == "qwen2.5vl_merger" else 1)
        found["fullatt_block_indexes"] = list(range(every - 1, depth, every))
        found["window_size"] = file.count("window_size", _WINDOW)
    if file.projector == "qwen3vl_merger":
        found["num_position_embeddings"] = file.shape("v.position_embd.weight")[0]
        found["deepstack_visual_indexes"] = file.deepstack
    return found


def _glm(file: VisionKeys, text: Metadata) -> dict[str, Any]:
    """The entry vision_config of a GLM. That of GLM-OCR, which has no learned positions, names another width."""
    found: dict[str, Any] = {
        "model_type": "glm_ocr_vision",
        "depth": file.depth,
        "num_heads": file.count("attention.head_count"),
        "hidden_act": file.family.activation,
        "rms_norm_eps": file.family.eps[0],
        "patch_size": file.count("patch_size"),
        "spatial_merge_size": file.count("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "hidden_size": file.count("embedding_length"),
        "intermediate_size": file.inner_size,
        "out_hidden_size": text.get("embedding_length"),
        "attention_bias": "v.blk.0.attn_qkv.bias" in file.names,
    }
    if _has_positions(file):
        width = file.shape("mm.up.weight")[0]
        found |= {"model_type": "glm4v_vision", "intermediate_size": width, "image_size": file.count("image_size")}
    return found


def _pixtral(file: VisionKeys, text: Metadata) -> dict[str, Any]:
    """The entry vision_config of a model of Mistral's."""
    return {
        "model_type": "pixtral",
        "hidden_size": file.count("embedding_length"),
        "intermediate_size": file.inner_size,
        "num_hidden_layers": file.depth,
        "num_attention_heads": file.count("attention.head_count"),
        "hidden_act": file.family.activation,
        "patch_size": file.count("patch_size"),
        "image_size": file.count("image_size"),
        # Only files from params.json have the key.
        "rope_theta": file.values.get("clip.rope.freq_base", 10000.0),
    }


def _has_positions(file: VisionKeys) -> bool:
    return "v.position_embd.weight" in file.names


def _gemma3(file: VisionKeys) -> dict[str, Any]:
    """The entry vision_config of Gemma 3."""
    width = file.count("embedding_length")
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": file.inner_size,
        "num_hidden_layers": file.depth,
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
    return {
        "model_type": "gemma4_vision",
        "hidden_size": width,
        "intermediate_size": file.inner_size,
        "num_hidden_layers": file.depth,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": width // num_heads,
        "hidden_activation": file.family.activation,
        "patch_size": file.count("patch_size"),
        "pooling_kernel_size": file.count("projector.scale_factor", _POOLED_4),
        "position_embedding_size": positions[1],
        "use_clipped_linears": any(name.endswith(".input_max") and name.startswith("v.") for name in file.names),
        "standardize": "v.std_bias" in file.names,
    }


def _num_tokens(file: VisionKeys) -> int:
    """The number of an image's tokens in Gemma 3."""
    side = file.count("patch_size") * file.merge_size(_POOLED)
    return int((file.count("image_size") // side) ** 2)


def _qwen_processor(file: VisionKeys) -> ProcessorFiles:
    # Files rarely limit the pixels of an image; those of the models as they are published count then.
    entries: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": file.count("patch_size"),
        "merge_size": file.count("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }
    for name, default in zip(("min_pixels", "max_pixels"), file.family.limits, strict=True):
        entries[name] = file.count(f"image_{name}", default)
    return ProcessorFiles(entries)


def _pixtral_processor(file: VisionKeys) -> ProcessorFiles:
    size, merges = file.count("patch_size"), "mm.patch_merger.weight" in file.names
    entries = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": size, "width": size},
        # The longest side of an image is that for which the model was trained, in all models of Mistral's.
        "size": {"longest_edge": file.count("image_size")},
    }
    merged = file.count("spatial_merge_size", 2) if merges else 1
    return ProcessorFiles(entries, {}, {"patch_size": size, "spatial_merge_size": merged})


def _lighton_processor(file: VisionKeys) -> ProcessorFiles:
    """The settings of LightOnOCR, whose images fill patches, and not always tokens, as in LightOnOCR 2."""
    files = _pixtral_processor(file)
    edge = file.count("preproc_image_size", file.count("image_size"))
    config = {"architectures": list(set(file.family.models.values()))}
    return files._replace(image={**files.image, "size": {"longest_edge": edge}}, config=config)


def _glm_processor(file: VisionKeys) -> ProcessorFiles:
    least, most = (
        file.count(f"image_{name}_pixels", default)
        for name, default in zip(("min", "max"), file.family.limits, strict=True)
    )
    entries: dict[str, Any] = {
        "image_processor_type": "Glm4vImageProcessor",
        "patch_size": file.count("patch_size"),
        "merge_size": file.count("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        # These limits count the pixels of both pictures of a patch.
        "size": {"shortest_edge": 2 * least, "longest_edge": 2 * most},
    }
    return ProcessorFiles(entries)


def _gemma3_processor(file: VisionKeys) -> ProcessorFiles:
    side = file.count("image_size")
    entries = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}
    return ProcessorFiles(entries, {"vision_config": _gemma3(file), "mm_tokens_per_image": _num_tokens(file)})


def _gemma4_processor(file: VisionKeys) -> ProcessorFiles:
    vision = _gemma4(file)
    entries = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": file.count("patch_size"),
        "pooling_kernel_size": vision["pooling_kernel_size"],
        "do_normalize": True,
    }
    return ProcessorFiles(entries, {"vision_config": vision})


def _check_effects(file: VisionKeys) -> None:
    """Raise ModelLoadError for keys with which the encoder computes something else than that of its family."""
    for kind in ("gelu", "silu"):
        if bool(file.values.get(f"clip.use_{kind}", False)) != (kind in file.family.uses):
            raise file.wrong(f"clip.use_{kind}", f"not what {file.projector} has", is_whole=True)
    known = file.family.eps
    eps = file.values.get("clip.vision.attention.layer_norm_epsilon", known[0])
    if not isinstance(eps, int | float) or not any(isclose(eps, one, rel_tol=1e-4) for one in known):
        raise file.wrong("attention.layer_norm_epsilon", f"{eps!r:.80}, and only {known[0]:g} is supported")


def _sections(text: Metadata) -> list[int]:
    """The pairs that turn with time, row and column. A fourth number, for another axis, must be 0."""
    key = f"{text.kind}.rope.dimension_sections"
    sections = text.values.get(key)
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        raise text.wrong(key, "missing" if sections is None else f"{sections!r:.80}, and must be three numbers")
    return sections[:3]


_QWENS: Final = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
_CONFIGS: Final[Mapping[str, Callable[[VisionKeys, Metadata, Mapping[str, Any]], dict[str, Any]]]] = {
    **dict.fromkeys(_QWENS, _qwen_config),
    "exaone4_5": _exaone_config,
    "pixtral": _pixtral_config,
    "lightonocr": _lighton_config,
    "glm4v": _glm_config,
    "gemma3": _gemma3_config,
    "gemma4v": _gemma4_config,
    "idefics3": tiled_entries.idefics3_config,
    "lfm2": tiled_entries.lfm2_config,
    "internvl": tiled_entries.internvl_config,
    "minicpmv4_6": tiled_entries.minicpm_config,
}
_PROCESSORS: Final[Mapping[str, Callable[[VisionKeys], ProcessorFiles]]] = {
    **dict.fromkeys((*_QWENS, "exaone4_5"), _qwen_processor),
    "pixtral": _pixtral_processor,
    "lightonocr": _lighton_processor,
    "glm4v": _glm_processor,
    "gemma3": _gemma3_processor,
    "gemma4v": _gemma4_processor,
    "idefics3": tiled_entries.idefics3_processor,
    "lfm2": tiled_entries.lfm2_processor,
    "internvl": tiled_entries.internvl_processor,
    "minicpmv4_6": tiled_entries.minicpm_processor,
}
