"""Reads the vision part of BLIP's config.json. No torch.

transformers' class has the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from typing import Final

from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.reading import read_activation
from pagewick.models.vision.config import BlipVisionConfig
from pagewick.models.vision.entries import MAX_PATCH
from pagewick.models.vision.siglip_entries import MAX_SIDE
from pagewick.models.vision.tensor_names import BLIP_TENSORS

BLIP_NAMES: Final = (
    ("visual", "vision_model"), ("patch_embed.proj", "embeddings.patch_embedding"),
    ("first.weight", "embeddings.class_embedding"), ("positions.weight", "embeddings.position_embedding"),
    ("vision_model.norm", "vision_model.post_layernorm"), ("blocks", "encoder.layers"), ("norm1", "layer_norm1"),
    ("norm2", "layer_norm2"), ("attn.qkv", "self_attn.qkv"), ("attn.proj", "self_attn.projection"),
    ("mlp.linear_fc1", "mlp.fc1"), ("mlp.linear_fc2", "mlp.fc2"),
)  # fmt: skip
"""The file's names of the encoder's tensors, as in NameMap.parts."""


def read_blip_vision(entries: Entries, image_token_id: int) -> BlipVisionConfig:
    """Read the entries of vision_config. image_token_id: the token of images."""
    width, num_heads = entries.size("hidden_size", 768), entries.size("num_attention_heads", 12)
    if width % num_heads:
        raise entries.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    patch_size = entries.size("patch_size", 16, most=MAX_PATCH)
    image_size = entries.size("image_size", 384, most=MAX_SIDE)
    if image_size % patch_size:
        raise entries.wrong("image_size", f"a multiple of patch_size ({patch_size})")
    return BlipVisionConfig(
        image_token_id=image_token_id,
        hidden_size=width,
        out_hidden_size=width,
        num_blocks=entries.size("num_hidden_layers", 12, most=MAX_LAYERS),
        num_heads=num_heads,
        intermediate_size=entries.size("intermediate_size", 3072),
        activation=read_activation(entries, "gelu"),
        patch_size=patch_size,
        temporal_patch_size=1,
        merge_size=1,
        norm_eps=entries.positive("layer_norm_eps", 1e-5),
        patch_bias=True,
        positions_per_side=image_size // patch_size,
        tensors=BLIP_TENSORS,
    )
