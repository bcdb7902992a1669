"""Reads the vision part of Gemma 3's config.json, with the entries of its projection. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.config import SiglipConfig
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH
from pagewick.models.vision.tensor_names import TOWER_TENSORS, without_encoders

# The vision part stands beside the text part, or in newer files within the model; newer programs leave out the last
# name of the path to the encoder.
SIGLIP_PLACES: Final = tuple((outer, inner) for outer in ("", "model.") for inner in (".vision_model", ""))
IN_TOWER: Final = (
    ("patch_embed.proj", "embeddings.patch_embedding"), ("pos_embed", "embeddings.position_embedding"),
    ("blocks", "encoder.layers"), ("norm1", "layer_norm1"), ("norm2", "layer_norm2"),
    ("attn.proj", "self_attn.out_proj"), ("attn", "self_attn"), ("mlp.linear_fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2"),
)  # fmt: skip
# Parts that files may hold and that no image needs: one that makes one vector of an image, and the positions' numbers.
UNUSED: Final = r"(model\.)?vision_tower\.(vision_model\.)?(head\..*|embeddings\.position_ids)"
# Far above any existing encoder; a larger image would mean gigabytes for its patches.
MAX_SIDE: Final = 2**14


def with_siglip(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.renamed({"image_token_index": "image_token_id"}).count("image_token_index", 262144)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    vision = SiglipConfig(image_token_id=token, out_hidden_size=config.hidden_size, **_encoder(given, entries))
    return replace(
        config,
        vision=vision,
        layers=tuple(layer.seeing_images_whole() for layer in config.layers),
        names=tuple(
            NameMap(parts=(*names.parts, *_names_in(*place))) for names in config.names for place in SIGLIP_PLACES
        ),
        ignored=(*without_encoders(config.ignored), UNUSED),
    )


def _names_in(outer: str, inner: str) -> tuple[tuple[str, str], ...]:
    projector, tower = f"{outer}multi_modal_projector", f"{outer}vision_tower{inner}"
    return (
        ("visual.projector.norm", f"{projector}.mm_soft_emb_norm"),
        ("visual.projector.linear.weight", f"{projector}.mm_input_projection_weight"),
        ("visual.norm", f"{tower}.post_layernorm"),
        ("visual", tower),
        *IN_TOWER,
    )


def _encoder(entries: Entries, whole: Entries) -> dict[str, Any]:
    """Return the fields of the entry vision_config, and those of the projection. whole: the file's entries."""
    entries.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    fields = tower_fields(entries)
    patch_size = fields["patch_size"]
    image_size = entries.size("image_size", 224, most=MAX_SIDE)
    if image_size % patch_size:
        raise entries.wrong("image_size", f"a multiple of patch_size ({patch_size})")
    side = image_size // patch_size
    num_tokens = whole.size("mm_tokens_per_image", 256)
    rows = math.isqrt(num_tokens)
    if rows**2 != num_tokens or side % rows or side // rows > MAX_MERGED:
        fix = f"the square of a number that divides {side}, the patches in a row, into at most {MAX_MERGED} each"
        raise whole.wrong("mm_tokens_per_image", fix)
    return {**fields, "merge_size": side // rows, "positions_per_side": side}


def tower_fields(entries: Entries) -> dict[str, Any]:
    """Return the fields that all SigLIP encoders read alike from the entry vision_config."""
    width, num_heads = entries.size("hidden_size", 768), entries.size("num_attention_heads", 12)
    if width % num_heads:
        raise entries.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    entries.demand("num_channels", 3, 3, "images have three colours")
    return {
        "hidden_size": width,
        "num_blocks": entries.size("num_hidden_layers", 12, most=MAX_LAYERS),
        "num_heads": num_heads,
        "intermediate_size": entries.size("intermediate_size", 3072),
        "activation": read_activation(entries, "gelu_pytorch_tanh"),
        "patch_size": entries.size("patch_size", 16, most=MAX_PATCH),
        "temporal_patch_size": 1,
        "patch_bias": True,
        "norm_eps": entries.positive("layer_norm_eps", 1e-6),
        "tensors": TOWER_TENSORS,
    }
