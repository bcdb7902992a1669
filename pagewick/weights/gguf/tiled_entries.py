"""Entries of config.json and of processors' files, for GGUF files with the vision part of a model that cuts images.

SmolVLM, Idefics3, LFM2-VL, InternVL and MiniCPM-V 4.6. Files leave some entries out. These follow from the tensors, or
are the ones that the authors publish with their models. Every function raises ModelLoadError, which names the key.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, Final

from pagewick.weights.gguf.metadata import Metadata
from pagewick.weights.gguf.vision_keys import ProcessorFiles, VisionKeys

# The longer side of an image has this number of tiles, in all models of Idefics3 and SmolVLM.
_TILES_OF_SIDE: Final = 4
# Patches along the side of a token of MiniCPM-V -> downsample_mode, and the block behind which squares become rows.
_DOWNSAMPLING: Final = {2: "4x", 4: "16x"}
_WINDOW_BLOCK: Final = 6
# The fewest and the most tiles of an image. The oldest files of InternVL have no keys for them.
_INTERN_TILES: Final = (1, 12)


def idefics3_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of Idefics3 and SmolVLM."""
    return {
        "vision_config": {"model_type": "idefics3_vision", **_sizes(file), "image_size": file.count("image_size")},
        "scale_factor": file.merge_size(),
    }


def idefics3_processor(file: VisionKeys) -> ProcessorFiles:
    """The settings of Idefics3 and SmolVLM."""
    side, patch_size, merged = file.count("image_size"), file.count("patch_size"), file.merge_size()
    entries = {
        "image_processor_type": "Idefics3ImageProcessor",
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": file.count("preproc_image_size", _TILES_OF_SIDE * side)},
    }
    config = {"vision_config": {"image_size": side, "patch_size": patch_size}, "scale_factor": merged}
    return ProcessorFiles(entries, config, {"image_seq_len": (side // patch_size // merged) ** 2})


def minicpm_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of MiniCPM-V 4.6. The key image_size is that of a slice, and the positions form another square."""
    side = isqrt(file.shape("v.position_embd.weight")[0]) * file.count("patch_size")
    blocks = file.values.get("clip.vision.wa_layer_indexes", [_WINDOW_BLOCK])
    if not isinstance(blocks, list) or len(blocks) != 1 or blocks[0] not in range(file.depth):
        raise file.wrong("wa_layer_indexes", f"{blocks!r:.80}, and must be one block below {file.depth}")
    return {
        "vision_config": {
            "model_type": "minicpmv4_6_vision",
            **_sizes(file),
            "image_size": side,
        },
        "downsample_mode": _downsampling(file),
        "insert_layer_id": blocks[0],
    }


def minicpm_processor(file: VisionKeys) -> ProcessorFiles:
    """The settings of MiniCPM-V 4.6: the number of slices and the rest are those of its processor."""
    entries = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "patch_size": file.count("patch_size"),
        "scale_resolution": file.count("image_size"),
        "downsample_mode": _downsampling(file),
    }
    return ProcessorFiles(entries)


def _downsampling(file: VisionKeys) -> str:
    """Return downsample_mode by the number of patches along the side of a token."""
    merged = file.count("projector.scale_factor", 4)
    if merged not in _DOWNSAMPLING:
        raise file.wrong("projector.scale_factor", f"{merged}, and must be 2 or 4")
    return _DOWNSAMPLING[merged]


def lfm2_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of LFM2-VL. The key image_size is the same number in all files, and means nothing."""
    num_positions = file.shape("v.position_embd.weight")[0]
    return {
        "vision_config": {"model_type": "siglip2_vision_model", **_sizes(file), "num_patches": num_positions},
        "downsample_factor": file.count("projector.scale_factor"),
        "projector_use_layernorm": "mm.input_norm.weight" in file.names,
        "projector_hidden_size": file.shape("mm.1.weight")[0],
        "projector_hidden_act": "gelu",
        "projector_bias": "mm.1.bias" in file.names,
    }


def lfm2_processor(file: VisionKeys) -> ProcessorFiles:
    """The settings of LFM2-VL: tiles, tokens of an image and the rest are those of its processor."""
    entries = {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": file.count("patch_size"),
        "downsample_factor": file.count("projector.scale_factor"),
    }
    return ProcessorFiles(entries)


def internvl_config(file: VisionKeys, text: Metadata, found: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of InternVL. Its two encoders differ in what the tensors show."""
    names = file.names
    vision = {
        "model_type": "internvl_vision",
        **_sizes(file),
        "image_size": file.count("image_size"),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in names else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in names,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in names,
    }
    return {
        "vision_config": vision,
        "downsample_ratio": 1 / file.merge_size(),
        "projector_hidden_act": "gelu",
    }


def internvl_processor(file: VisionKeys) -> ProcessorFiles:
    """The settings of InternVL."""
    side, patch_size, merged = file.count("image_size"), file.count("patch_size"), file.merge_size()
    entries = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "min_patches": file.count("preproc_min_tiles", _INTERN_TILES[0]),
        "max_patches": file.count("preproc_max_tiles", _INTERN_TILES[1]),
    }
    num_tokens = (side // (patch_size * merged)) ** 2
    config = {
        "vision_config": {"image_size": side, "patch_size": patch_size},
        "downsample_ratio": 1 / merged,
        "image_seq_length": num_tokens,
    }
    return ProcessorFiles(entries, config, {"image_seq_length": num_tokens})


def _sizes(file: VisionKeys) -> dict[str, Any]:
    """Entries of all encoders."""
    return {
        "hidden_size": file.count("embedding_length"),
        "intermediate_size": file.inner_size,
        "num_hidden_layers": file.depth,
        "num_attention_heads": file.count("attention.head_count"),
        "hidden_act": file.family.activation,
        "layer_norm_eps": file.family.eps[0],
        "patch_size": file.count("patch_size"),
    }
