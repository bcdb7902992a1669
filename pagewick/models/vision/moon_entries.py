"""Reads the vision part of the config.json of Kimi K2.5 and K2.6, with its projector. No torch.

Published files have other names for some entries than transformers' classes, whose defaults count for entries that a
file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH, check_heads, read_axial_theta
from pagewick.models.vision.merging_config import MoonVisionConfig
from pagewick.models.vision.siglip_entries import MAX_SIDE
from pagewick.models.vision.tensor_names import MOON_TENSORS, without_encoders

# Not in the file: the norms of all published encoders have it.
_NORM_EPS: Final = 1e-5
# Names in transformers -> those in published files.
_PUBLISHED: Final = {
    **{name: f"vt_{name}" for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")},
    **{name: f"init_{name}" for name in ("pos_emb_height", "pos_emb_width", "pos_emb_time")},
}
# Entries of published files that have one value in all of them.
_ONLY: Final = {
    "pos_emb_type": "divided_fixed", "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
}  # fmt: skip
_NAMES: Final = (
    ("visual.projector.norm", "mm_projector.pre_norm"),
    ("visual.projector.projection.linear_1", "mm_projector.proj.0"),
    ("visual.projector.projection.linear_fc2", "mm_projector.proj.2"),
    ("visual.positions", "vision_tower.patch_embed.pos_emb"),
    ("visual.norm", "vision_tower.encoder.final_layernorm"),
    ("visual.blocks", "vision_tower.encoder.blocks"),
    ("visual", "vision_tower"),
    # In this order: what is called norm1 here is norm0 there.
    ("norm1", "norm0"), ("norm2", "norm1"), ("mlp.linear_fc1", "mlp.fc0"), ("mlp.linear_fc2", "mlp.fc1"),
    ("attn.qkv", "wqkv"), ("attn.proj", "wo"),
)  # fmt: skip


def with_moon_vision(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.renamed({"image_token_id": "media_placeholder_token_id"}).count("image_token_id", 163605)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    return replace(
        config,
        vision=_read(given.renamed(_PUBLISHED), entries, token, config.hidden_size),
        names=tuple(NameMap(parts=(*names.parts, *_NAMES)) for names in config.names),
        ignored=without_encoders(config.ignored),
    )


def _read(given: Entries, entries: Entries, token: int, text_size: int) -> MoonVisionConfig:
    """Read vision_config (`given`) of a file with these entries."""
    # Published files have an empty name there.
    given.choice("model_type", ("kimi_k25_vision", "kimi_k25", ""), "kimi_k25_vision")
    for name, known in _ONLY.items():
        given.demand(name, known, known)
    width, num_heads = given.size("hidden_size", 1152), given.size("num_attention_heads", 16)
    check_heads(given, "num_attention_heads", width, num_heads)
    side = given.size("pos_emb_height", 64, most=MAX_SIDE)
    given.demand("pos_emb_width", side, 64, "learned positions form a square")
    _check_widths(given, entries, width, text_size)
    merge_size = _merge_size(given)
    return MoonVisionConfig(
        image_token_id=token,
        hidden_size=width,
        out_hidden_size=text_size,
        num_blocks=given.size("num_hidden_layers", 27, most=MAX_LAYERS),
        num_heads=num_heads,
        intermediate_size=given.size("intermediate_size", 4304),
        activation=read_activation(given, "gelu_pytorch_tanh"),
        patch_size=given.size("patch_size", 14, most=MAX_PATCH),
        temporal_patch_size=1,
        merge_size=merge_size,
        norm_eps=_NORM_EPS,
        patch_bias=True,
        rope_theta=read_axial_theta(given, 10000.0),
        positions_per_side=side,
        projector_eps=_projector_eps(given, entries),
        is_norm_merged=False,
        projector_size=merge_size**2 * width,
        projector_bias=True,
        tensors=MOON_TENSORS,
    )


def _merge_size(given: Entries) -> int:
    sides = given.sizes("merge_kernel_size") or (2, 2)
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] > MAX_MERGED:
        raise given.wrong("merge_kernel_size", f"two equal numbers up to {MAX_MERGED}: patches become squares")
    return sides[0]


def _projector_eps(given: Entries, entries: Entries) -> float:
    """Published files have it in vision_config, newer programs beside that."""
    name = "projection_layer_norm_eps"
    return entries.positive(name) if name in entries else given.positive("projector_ln_eps", 1e-5)


def _check_widths(given: Entries, entries: Entries, width: int, text_size: int) -> None:
    """Raise ModelLoadError unless the projector fits what is ahead of it and behind it."""
    entries.demand("projection_hidden_size", width, width, "the width of a patch in the encoder")
    given.demand("mm_hidden_size", width, width, "the width of a patch in the encoder")
    given.demand("text_hidden_size", text_size, text_size, "the hidden_size of the text part")
