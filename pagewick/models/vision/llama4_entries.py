"""Reads the vision part of Llama 4's config.json, with the entries of its projector. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH, check_heads, read_axial_theta
from pagewick.models.vision.merging_config import Llama4VisionConfig
from pagewick.models.vision.siglip_entries import MAX_SIDE
from pagewick.models.vision.tensor_names import LLAMA4_TENSORS, without_encoders

# transformers reads these entries and computes with this value of each.
_FIXED: Final = {
    "hidden_act": "gelu", "norm_eps": 1e-5, "num_channels": 3, "multi_modal_projector_bias": False,
    "vision_feature_select_strategy": "default", "vision_feature_layer": -1,
}  # fmt: skip


def with_llama4_vision(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.renamed({"image_token_index": "image_token_id"}).count("image_token_index", 200092)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    return replace(
        config,
        vision=_read(given, token, config.hidden_size),
        names=tuple(NameMap(parts=(*names.parts, *_names(names))) for names in config.names),
        ignored=without_encoders(config.ignored),
    )


def _names(text: NameMap) -> tuple[tuple[str, str], ...]:
    """text: the names of the text part, which apply to these first."""
    mlp, tower = text.in_file("mlp"), "vision_model"
    return (
        ("visual.projector.linear_fc1", f"{tower}.vision_adapter.mlp.fc1"),
        ("visual.projector.linear_fc2", f"{tower}.vision_adapter.mlp.fc2"),
        ("visual.projector.linear", "multi_modal_projector.linear_1"),
        ("visual.patch_embed.proj", f"{tower}.patch_embedding.linear"),
        ("visual.last.weight", f"{tower}.class_embedding"),
        ("visual.positions.weight", f"{tower}.positional_embedding_vlm"),
        ("visual.first_norm", f"{tower}.layernorm_pre"),
        ("visual.norm", f"{tower}.layernorm_post"),
        ("visual.blocks", f"{tower}.model.layers"),
        ("norm1", "input_layernorm"),
        ("norm2", "post_attention_layernorm"),
        ("attn.proj", "self_attn.o_proj"),
        ("attn", "self_attn"),
        (f"{mlp}.linear_fc1", "mlp.fc1"),
        (f"{mlp}.linear_fc2", "mlp.fc2"),
    )


def _read(entries: Entries, token: int, text_size: int) -> Llama4VisionConfig:
    """Read vision_config."""
    entries.choice("model_type", ("llama4_vision_model",), "llama4_vision_model")
    for name, known in _FIXED.items():
        entries.demand(name, known, known)
    width, num_heads = entries.size("hidden_size", 768), entries.size("num_attention_heads", 16)
    check_heads(entries, "num_attention_heads", width, num_heads)
    patch_size = entries.size("patch_size", 14, most=MAX_PATCH)
    image_size = entries.size("image_size", 448, most=MAX_SIDE)
    side = image_size // patch_size
    if image_size % patch_size:
        raise entries.wrong("image_size", f"a multiple of patch_size ({patch_size})")
    merge_size = _merge_size(entries, side)
    inner = entries.size("intermediate_size", 5632)
    if inner != width * merge_size**2:
        raise entries.wrong("intermediate_size", f"{width * merge_size**2}, the width of merged patches")
    projector_size = entries.size("projector_output_dim", 4096)
    for name, default in (("projector_input_dim", 4096), ("vision_output_dim", 7680)):
        entries.demand(name, projector_size, default, "projector_output_dim")
    return Llama4VisionConfig(
        image_token_id=token,
        hidden_size=width,
        out_hidden_size=text_size,
        num_blocks=entries.size("num_hidden_layers", 34, most=MAX_LAYERS),
        num_heads=num_heads,
        intermediate_size=inner,
        activation="gelu",
        patch_size=patch_size,
        temporal_patch_size=1,
        merge_size=merge_size,
        norm_eps=1e-5,
        rope_theta=read_axial_theta(entries, 10000.0),
        positions_per_side=side,
        projector_size=projector_size,
        tensors=LLAMA4_TENSORS,
    )


def _merge_size(entries: Entries, side: int) -> int:
    """Return the patches along a side of a square that becomes a row. side: those along a side of the image."""
    ratio = entries.positive("pixel_shuffle_ratio", 0.5)
    merge_size = round(min(1 / ratio, MAX_MERGED + 1))
    if not 0 < merge_size <= MAX_MERGED or 1 / ratio != merge_size or side % merge_size:
        raise entries.wrong("pixel_shuffle_ratio", f"1 divided by a divisor of {side}, the patches in a row")
    return merge_size
