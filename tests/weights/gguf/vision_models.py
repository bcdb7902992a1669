"""Tiny models that read images, as pairs of GGUF files in `files/images`: the text part, and the vision part (mmproj).

llama.cpp's converter wrote both (convert.py). Weights are multiples of 1/16, so that the files are small.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import torch
from torch import nn

from tests.models.checkpoints import make_model
from tests.models.variants import VARIANTS
from tests.weights.gguf.mixes import Change
from tests.weights.gguf.models import FILES

# Patches of 4 pixels, of which 2 x 2 become a token.
SIDE: Final = 8
VOCAB_SIZE: Final = 97
PLACEHOLDER: Final = "<|image_pad|>"
IMAGE: Final = 90
_TEXT: Final = {
    "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "intermediate_size": 64, "hidden_size": 48,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
_VISION: Final = {"hidden_size": 48, "embed_dim": 48, "out_hidden_size": 48}
# The keys have no room for these windows; a block sees everything after each second one.
_WINDOWS: Final = {"window_size": 112, "fullatt_block_indexes": [1]}
# Six heads share out 48 numbers.
_NARROW: Final = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
_MOE: Final = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
# The converter writes this eps for the encoder, too, which always has 1e-6.
_STATE: Final = {
    "num_hidden_layers": 4, "linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_value_head_dim": 16,
    "attention_bias": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
# Files have another eps only if the model has.
_WHOLE_HEADS: Final = {
    "rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 1.0, "mrope_section": [3, 4, 5],
}  # fmt: skip
_GLM: Final = {"embed_dim": None, "rms_norm_eps": 1e-5}

# Variant -> entries of its text part and of its vision part that differ from it.
PAIRS: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "qwen2-vl": (_NARROW, {"hidden_size": 48}),
    "qwen2.5-vl-window": ({**_NARROW, "use_sliding_window": False}, _WINDOWS),
    "qwen3-vl": ({}, {}),
    "qwen3-vl-moe": ({**_MOE, "mlp_only_layers": []}, {}),
    "qwen3.5-multimodal": (_STATE, {}),
    "qwen3.5-moe-multimodal": ({**_STATE, **_MOE, "shared_expert_intermediate_size": 32}, {}),
    "exaone-4.5": (
        {"num_hidden_layers": 4},
        {"embed_dim": None, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}},
    ),
    "glm-4.1v": ({"hidden_size": 96}, {**_GLM, "out_hidden_size": 96}),
    "glm-4.5v": ({"n_routed_experts": 4, "num_experts_per_tok": 2}, _GLM),
    "glm-ocr": ({"num_nextn_predict_layers": 1, "rope_parameters": _WHOLE_HEADS}, _GLM),
}
# Models whose images all have one size. Readers of the files know the layers with windows and the scale of scores.
FIXED: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "gemma-3-multimodal": (
        {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16},
        {"hidden_size": 64, "num_attention_heads": 4, "out_hidden_size": None, "embed_dim": None},
    ),
}
# Models that scale all images to about the same number of pixels. Files have neither the size of the squares that
# become a token, nor the base of the rotation, nor the eps of the encoder.
_SMALL: Final = {"embed_dim": None, "out_hidden_size": None, "rms_norm_eps": 1e-6, "pooling_kernel_size": 3}
# The converter here writes no padding, which then is token 0.
_TABLES: Final = {
    "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB_SIZE, "rms_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip
SCALED: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "gemma-4-multimodal": (_TABLES, _SMALL),
    "gemma-4-31b-multimodal": (_TABLES, {**_SMALL, "hidden_size": 72, "rope_parameters": None}),
}
# Models that cut images into tiles. Files have neither the eps of SmolVLM nor the size of LFM2-VL's tiles, and the
# converter knows patches of LFM2-VL with 16 pixels along a side only. Heads of LFM2 share out the width of the model.
_EPS: Final = {"embed_dim": None, "out_hidden_size": None, "layer_norm_eps": 1e-6}
# Fewer blocks than tensors of the projector are more than the converter has names for.
_INTERN: Final = {**_EPS, "hidden_size": 60, "num_hidden_layers": 4}
TILED: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "smolvlm": ({}, {**_EPS, "hidden_size": 60}),
    "lfm2-vl": (
        {"num_hidden_layers": 4, "block_multiple_of": 16},
        {**_EPS, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "patch_size": 16},
    ),
    # Files say neither how many slices an image has nor whether its number stands ahead of it.
    "minicpm-v-4.6": (_STATE, {**_EPS, "hidden_size": 60}),
    "minicpm-v-4.6-4x": (_STATE, {**_EPS, "hidden_size": 60}),
    "internvl": ({}, _INTERN),
    "internvl-6b-moe": ({**_MOE, "norm_topk_prob": True}, {**_INTERN, "hidden_act": "gelu", "use_mean_pooling": True}),
}
# Models with another token behind each row of an image. Files say neither the base of the rotation nor the activation
# of the projector.
_ROWS: Final = {"embed_dim": None, "out_hidden_size": None, "rope_theta": 1e4, "hidden_act": "silu"}
ROWS: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "mistral-small-3.1": ({}, {**_ROWS, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}),
    "ministral-3-multimodal": ({}, _ROWS),
    "mistral-small-4": ({"num_key_value_heads": 6}, _ROWS),
    "pixtral-12b": ({}, _ROWS),
}
ROW_END: Final = "[IMG_BREAK]"
# This model has the same encoder, and no such tokens.
LIGHTON: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {"lighton-ocr": ({}, _ROWS)}
ALL: Final = {**PAIRS, **FIXED, **SCALED, **TILED, **ROWS, **LIGHTON}


def placeholder_of(name: str) -> str:
    if name in SCALED or name.startswith("glm"):
        return "<|image|>"
    if name in ROWS:
        return "[IMG]"
    if name in TILED and not name.startswith("minicpm"):
        return "<IMG_CONTEXT>" if name.startswith("internvl") else "<image>"
    return "<image_soft_token>" if name in FIXED else PLACEHOLDER


class Pair(NamedTuple):
    """Paths of the two files of a model."""

    text: Path
    vision: Path


def original(name: str) -> nn.Module:
    """The transformers model from which the files were converted."""
    entries = VARIANTS[name].all_entries()
    text, vision = ALL[name]
    whole = {"image_token_index" if name in (*FIXED, *ROWS) else "image_token_id": IMAGE}
    if name in ROWS:
        whole["projector_hidden_act"] = "gelu"
    seeing = {**entries["vision_config"], **_VISION, **vision}
    model = make_model(
        name,
        {
            **entries,
            "text_config": {**entries["text_config"], **_TEXT, **text},
            "vision_config": {key: value for key, value in seeing.items() if value is not None},
            **whole,
        },
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight * 16).round() / 16)
    return model


def write_pair(name: str, directory: Path) -> Pair:
    """Decompress the files of a model into a directory."""
    pair = Pair(directory / f"{name}-F32.gguf", directory / f"mmproj-{name}-F32.gguf")
    for path, stored in zip(pair, (f"{name}.gguf.xz", f"mmproj-{name}.gguf.xz"), strict=True):
        path.write_bytes(lzma.decompress((FILES / "images" / stored).read_bytes()))
    return pair


def stored_and_plain(kind: str, num_dims: tuple[int, ...]) -> tuple[Change, Change]:
    """Return two changes of a file's tensors, as mixes.rewrite has them.

    The first one stores tensors with these numbers of dimensions in a type, if their rows can be; the second one stores
    the numbers that they have then.
    """
    number_type = gguf.GGMLQuantizationType[kind]

    def is_stored(numbers: Any) -> bool:
        return numbers.ndim in num_dims and numbers.shape[-1] % (32 if kind == "Q8_0" else 1) == 0

    def stored(name: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        is_kept = not is_stored(numbers)
        yield name, numbers if is_kept else gguf.quants.quantize(numbers, number_type), "F32" if is_kept else kind

    def plain(name: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        if is_stored(numbers):
            numbers = gguf.quants.dequantize(gguf.quants.quantize(numbers, number_type), number_type)
        yield name, numbers, "F32"

    return stored, plain
