"""Reads the vision part of Gemma 4's config.json. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.config import Gemma4VisionConfig
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH, check_heads, read_axial_theta
from pagewick.models.vision.tensor_names import GEMMA4_TENSORS, without_encoders

# Files of Gemma 4 have the vision part within the model; others may have it beside the text part.
_PLACES: Final = ("model.", "")
_IN_TOWER: Final = (
    ("patch_embed.proj", "patch_embedder.input_proj"),
    ("patch_embed.positions.weight", "patch_embedder.position_embedding_table"),
    ("blocks", "encoder.layers"), ("norm1", "input_layernorm"), ("attn", "self_attn"),
)  # fmt: skip


def with_gemma4(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id", 258880)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    vision = Gemma4VisionConfig(image_token_id=token, out_hidden_size=config.hidden_size, **_encoder(given))
    text = entries.child("text_config") or entries
    layers, inputs = config.layers, config.layer_inputs
    if text.get("use_bidirectional_attention") == "vision":
        # Layers without a window are causal, for tokens of images, too.
        layers = tuple(layer if layer.window is None else layer.seeing_images_whole() for layer in layers)
    if inputs is not None:
        row = text.count("pad_token_id", 0)
        if row >= config.vocab_size:
            raise text.wrong(
                "pad_token_id",
                f"below vocab_size ({config.vocab_size}): the tokens of images have its inputs of layers",
            )
        inputs = replace(inputs, image_row=row)
    return replace(
        config,
        vision=vision,
        layers=layers,
        layer_inputs=inputs,
        names=tuple(NameMap(parts=(*names.parts, *_names_in(place))) for names in config.names for place in _PLACES),
        ignored=without_encoders(config.ignored),
    )


def _names_in(place: str) -> tuple[tuple[str, str], ...]:
    return (
        ("visual.projector", f"{place}embed_vision.embedding_projection"),
        ("visual.standard", f"{place}vision_tower"),
        ("visual", f"{place}vision_tower"),
        *_IN_TOWER,
    )


def _encoder(entries: Entries) -> dict[str, Any]:
    """Return the fields of the entry vision_config."""
    entries.choice("model_type", ("gemma4_vision",), "gemma4_vision")
    width, num_heads = entries.size("hidden_size", 768), entries.size("num_attention_heads", 12)
    check_heads(entries, "num_attention_heads", width, num_heads)
    head_dim = width // num_heads
    # transformers' default does not depend on the other sizes.
    entries.demand("head_dim", head_dim, 64, "hidden_size / num_attention_heads")
    entries.demand("num_key_value_heads", num_heads, 12, "num_attention_heads")
    entries.demand("attention_bias", False, False, "the encoder's products have no biases")
    return {
        "hidden_size": width,
        "num_blocks": entries.size("num_hidden_layers", 16, most=MAX_LAYERS),
        "num_heads": num_heads,
        "intermediate_size": entries.size("intermediate_size", 3072),
        "activation": read_activation(entries, "gelu_pytorch_tanh", "hidden_activation"),
        "patch_size": entries.size("patch_size", 16, most=MAX_PATCH),
        "temporal_patch_size": 1,
        "merge_size": entries.size("pooling_kernel_size", 3, most=MAX_MERGED),
        "is_gated": True,
        "is_rms": True,
        "norm_eps": entries.positive("rms_norm_eps", 1e-6),
        "rope_theta": read_axial_theta(entries, 100.0),
        "num_positions": entries.size("position_embedding_size", 10240),
        "is_clipped": entries.flag("use_clipped_linears", False),
        "is_standardized": entries.flag("standardize", False),
        "tensors": GEMMA4_TENSORS,
    }
