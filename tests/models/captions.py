"""Tiny random checkpoints of BLIP, written by transformers: an image of 6 x 6 patches, 37 rows in 64 tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD

SIDE, PATCH, NUM_TOKENS, NUM_ROWS = 24, 4, 64, 37
PAD, BOS, SEP, VOCAB = 3, 190, 7, 193
# Architectures whose prompts all have an image, so that they are no variants in tests/models/variants.
CAPTIONERS: Final = ("BlipForConditionalGeneration",)
ENTRIES: Final[dict[str, Any]] = {
    "text_config": {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 41, "layer_norm_eps": 3e-3, "bos_token_id": BOS,
        "pad_token_id": PAD, "sep_token_id": SEP, "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 5,
        "image_size": SIDE, "patch_size": PATCH, "layer_norm_eps": 2e-3,
    },
}  # fmt: skip


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries: `part.entry` stands within a part."""
    config = transformers.BlipConfig(**ENTRIES).to_dict()
    config = json.loads(json.dumps({**config, "architectures": ["BlipForConditionalGeneration"]}))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    return config  # type: ignore[no-any-return]


def make_captioner(**entries: Any) -> Any:
    """Return transformers' model, in float32. entries: of text_config."""
    torch.manual_seed(0)
    both = {**ENTRIES, "text_config": {**ENTRIES["text_config"], **entries}}
    model = transformers.BlipForConditionalGeneration(transformers.BlipConfig(**both)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.normal_(1, 0.2)
            elif parameter.dim() == 2 and "embeddings" not in name:
                # Attention is far from even, and words matter beside the image.
                is_sharp = "query" in name or "key" in name or "qkv" in name
                scale = 2.5 if is_sharp else 0.5 if "crossattention.self.value" in name else 1.2
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 0.3 if "word_embeddings" in name else 0.5)
    return model


def write_captioner(directory: Path, **entries: Any) -> Any:
    """Write a checkpoint and return transformers' model."""
    model = make_captioner(**entries)
    model.save_pretrained(directory)
    settings = {
        "image_processor_type": "BlipImageProcessor", "size": {"height": SIDE, "width": SIDE}, "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_STD,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def values_of(pixels: Any) -> Tensor:
    """Return the numbers that transformers' model reads of an image [height, width, 3] uint8."""
    normed = (torch.as_tensor(pixels).double() / 255 - torch.tensor(IMAGE_MEAN)) / torch.tensor(IMAGE_STD)
    return normed.permute(2, 0, 1).unsqueeze(0).float()
