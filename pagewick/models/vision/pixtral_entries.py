"""Reads the vision part of the config.json of Mistral 3, Pixtral 12B, Mistral Large 4 and LightOnOCR. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.config import PixtralConfig
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH, check_heads, read_axial_theta
from pagewick.models.vision.tensor_names import (
    LIGHTON_TENSORS,
    MISTRAL_TENSORS,
    TOWER_TENSORS,
    without_encoders,
)

# Not in the file: the norms of all published encoders have it.
_NORM_EPS: Final = 1e-5
# Old files have the vision part beside the text part, newer ones have both within the model.
_PLACES: Final = ("model.", "")
_IN_TOWER: Final = (
    ("blocks", "transformer.layers"), ("norm1", "attention_norm"), ("norm2", "ffn_norm"), ("attn.proj", "attn.o_proj"),
    ("attn", "attention"), ("feed_forward.linear_fc2", "feed_forward.down_proj"),
)  # fmt: skip

_ORIGINAL_NAMES: Final = (
    ("visual.projector.norm", "pre_mm_projector_norm"),
    ("visual.projector.merging_layer", "patch_merger.merging_layer"),
    ("visual.projector.linear_1", "vision_language_adapter.w_in"),
    ("visual.projector.linear_fc2", "vision_language_adapter.w_out"),
    ("visual", "vision_encoder"), ("attn.q_proj", "attn.wq"), ("attn.k_proj", "attn.wk"), ("attn.v_proj", "attn.wv"),
    ("attn.proj", "attn.wo"), ("linear_fc2", "down_proj"), *_IN_TOWER,
)  # fmt: skip


def with_pixtral(config: ModelConfig, entries: Entries, *, merges: bool = True) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used.

    merges: whether squares of patches become rows (Mistral 3), or each patch does (Llava).
    """
    vision = _read(config, entries, merges=merges)
    if vision is None:
        return config
    return _seeing(config, vision, tower="vision_tower", projector="multi_modal_projector")


def with_original_pixtral(config: ModelConfig, entries: Entries) -> ModelConfig:
    """As with_pixtral, for Mistral Large 4: the file has Mistral's own names, and queries and keys of their layout."""
    vision = _read(config, entries, merges=True)
    if vision is None:
        return config
    return replace(
        config,
        vision=replace(vision, is_interleaved=True, tensors=MISTRAL_TENSORS),
        names=tuple(NameMap(parts=(*_ORIGINAL_NAMES, *names.parts)) for names in config.names),
        ignored=without_encoders(config.ignored),
    )


def _read(config: ModelConfig, entries: Entries, *, merges: bool) -> PixtralConfig | None:
    given = entries.child("vision_config")
    if given is None:
        return None
    renamed = entries.renamed({"image_token_index": "image_token_id"})
    token = renamed.count("image_token_index", 10 if merges else 32000)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return None
    entries.demand("vision_feature_layer", -1, -1 if merges else -2, "images are read from the encoder's last layer")
    if not merges:
        entries.demand("vision_feature_select_strategy", "full", "default", "this encoder has a row for patches only")
    return PixtralConfig(
        image_token_id=token,
        **_encoder(given),
        out_hidden_size=config.hidden_size,
        merge_size=entries.size("spatial_merge_size", 2, most=MAX_MERGED) if merges else 1,
        projector_eps=config.norm.eps if merges else None,
        projector_activation=read_activation(entries, "gelu", "projector_hidden_act"),
        projector_bias=entries.flag("multimodal_projector_bias", not merges),
        tensors=TOWER_TENSORS,
    )


def with_lighton(config: ModelConfig, entries: Entries) -> ModelConfig:
    """As with_pixtral, for LightOnOCR: without tokens between rows, and for images whose patches fill no squares."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.renamed({"image_token_id": "image_token_index"}).count("image_token_id", 151655)
    if token >= config.vocab_size:
        return config
    entries.demand("vision_feature_layer", -1, -1, "images are read from the encoder's last layer")
    entries.demand("projector_hidden_act", "gelu", "gelu", "the projector has no other activation")
    entries.demand("multimodal_projector_bias", False, False, "the projector has no biases")
    vision = PixtralConfig(
        image_token_id=token,
        **_encoder(given),
        out_hidden_size=config.hidden_size,
        merge_size=entries.size("spatial_merge_size", 2, most=MAX_MERGED),
        projector_eps=config.norm.eps,
        has_row_tokens=False,
        takes_rest=True,
        tensors=LIGHTON_TENSORS,
    )
    return _seeing(config, vision, tower="vision_encoder", projector="vision_projection")


def _seeing(config: ModelConfig, vision: PixtralConfig, *, tower: str, projector: str) -> ModelConfig:
    """Return the config with a vision part. tower, projector: their names in the file."""
    return replace(
        config,
        vision=vision,
        names=tuple(
            NameMap(parts=(*names.parts, *_names_in(f"{place}{tower}", f"{place}{projector}")))
            for names in config.names
            for place in _PLACES
        ),
        ignored=without_encoders(config.ignored),
    )


def _names_in(tower: str, projector: str) -> tuple[tuple[str, str], ...]:
    return (
        ("visual.projector.merging_layer", f"{projector}.patch_merger.merging_layer"),
        ("visual.projector.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector", projector),
        ("visual", tower),
        *_IN_TOWER,
    )


def _encoder(entries: Entries) -> dict[str, Any]:
    """Return the fields of the entry vision_config."""
    entries.choice("model_type", ("pixtral",), "pixtral")
    width, num_heads = entries.size("hidden_size", 1024), entries.size("num_attention_heads", 16)
    check_heads(entries, "num_attention_heads", width, num_heads)
    entries.demand("head_dim", width // num_heads, width // num_heads, "hidden_size / num_attention_heads")
    entries.demand("num_channels", 3, 3, "images have three colours")
    return {
        "hidden_size": width,
        "num_blocks": entries.size("num_hidden_layers", 24, most=MAX_LAYERS),
        "num_heads": num_heads,
        "intermediate_size": entries.size("intermediate_size", 4096),
        "activation": read_activation(entries, "gelu"),
        "patch_size": entries.size("patch_size", 16, most=MAX_PATCH),
        "temporal_patch_size": 1,
        "is_gated": True,
        "is_rms": True,
        "norm_eps": _NORM_EPS,
        "rope_theta": read_axial_theta(entries, 10000.0),
    }
