"""Reads the vision part of LFM3-VL's config.json, with the entries of its projector. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH, check_heads, read_axial_theta
from pagewick.models.vision.merging_config import Lfm3VisionConfig
from pagewick.models.vision.tensor_names import TOWER_TENSORS, without_encoders

# Not in the file: the class has it.
_PROJECTOR_EPS: Final = 1e-6
_CONVOLUTION, _ATTENTION = "conv", "full_attention"
# Far above any existing encoder; every patch is read as often as a square has patches.
_MAX_CONV_SIZE: Final = 31
# The names of published files, and those of the class.
_OWN_NAMES: Final = (
    (("patch_embed.proj", "patchifier"), ("attn.q_norm", "attn.q_layernorm"), ("attn.k_norm", "attn.k_layernorm")),
    (("patch_embed.proj", "patch_embed"),),
)


def with_lfm3_vl(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id", 125030)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    return replace(
        config,
        vision=_read(given, entries, token, config.hidden_size),
        names=tuple(NameMap(parts=(*names.parts, *_names(names, own))) for names in config.names for own in _OWN_NAMES),
        ignored=without_encoders(config.ignored),
    )


def _read(given: Entries, entries: Entries, token: int, text_size: int) -> Lfm3VisionConfig:
    """Read vision_config (`given`) of a file with these entries."""
    given.choice("model_type", ("lfm3_vl_vision", "lfm3_vl"), "lfm3_vl_vision")
    width, num_heads = given.size("hidden_size", 1024), given.size("num_attention_heads", 16)
    check_heads(given, "num_attention_heads", width, num_heads)
    num_kv_heads = given.size("num_key_value_heads", 8)
    if num_heads % num_kv_heads:
        raise given.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    given.demand("in_channels", 3, 3, "images have three colours")
    conv_size = given.size("conv_kernel_size", 3, most=_MAX_CONV_SIZE)
    if not conv_size % 2:
        raise given.wrong("conv_kernel_size", "an odd number: a square of patches has a middle")
    num_blocks = given.size("num_hidden_layers", 14, most=MAX_LAYERS)
    return Lfm3VisionConfig(
        image_token_id=token,
        hidden_size=width,
        out_hidden_size=text_size,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        attention_blocks=_attention_blocks(given, num_blocks),
        conv_size=conv_size,
        intermediate_size=given.size("intermediate_size", 2560),
        activation="silu",
        patch_size=given.size("patch_size", 16, most=MAX_PATCH),
        temporal_patch_size=given.size("temporal_patch_size", 2, most=MAX_MERGED),
        merge_size=given.size("spatial_merge_size", 2, most=MAX_MERGED),
        is_gated=True,
        is_rms=True,
        norm_eps=given.positive("norm_eps", 1e-5),
        rope_theta=read_axial_theta(given, 1e6),
        projector_eps=_PROJECTOR_EPS,
        is_norm_merged=False,
        projector_size=entries.size("projector_hidden_size", 4096),
        projector_activation=read_activation(entries, "gelu", "projector_hidden_act"),
        projector_bias=entries.flag("projector_bias", True),
        tensors=TOWER_TENSORS,
    )


def _attention_blocks(entries: Entries, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks with attention; the others have a convolution."""
    kinds = entries.texts("layer_types")
    if kinds is None:
        return tuple(range(2, num_blocks, 2))
    if len(kinds) != num_blocks or set(kinds) - {_CONVOLUTION, _ATTENTION}:
        expected = f"a list of num_hidden_layers ({num_blocks}) kinds, {_CONVOLUTION} or {_ATTENTION}"
        raise entries.wrong("layer_types", expected)
    return tuple(index for index, kind in enumerate(kinds) if kind == _ATTENTION)


def _names(text: NameMap, own: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """text: the names of the text part, which apply to these first. own: one of _OWN_NAMES."""
    tower, projector, mlp = "model.vision_tower", "model.multi_modal_projector", text.in_file("mlp")
    return (
        ("visual.projector.norm", f"{projector}.layer_norm"),
        ("visual.projector.projection.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector.projection", projector),
        ("visual.first_norm", f"{tower}.embedding_norm"),
        *own,
        ("visual", tower),
        ("blocks", "layers"),
        ("norm1", "operator_norm"),
        ("norm2", "ffn_norm"),
        ("attn.proj", "self_attn.out_proj"),
        ("attn", "self_attn"),
        ("conv.filter", "conv.spatial_conv"),
        ("conv.proj", "conv.out_proj"),
        (f"{mlp}.linear_fc2", f"{mlp}.w2"),
    )
