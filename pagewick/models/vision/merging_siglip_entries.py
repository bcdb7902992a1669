"""Reads vision parts of LFM2-VL, Idefics3, SmolVLM and Command A Vision, with the entries of projectors. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.entries import MAX_MERGED
from pagewick.models.vision.merging_config import MergingSiglipConfig
from pagewick.models.vision.siglip_entries import IN_TOWER, MAX_SIDE, SIGLIP_PLACES, UNUSED, tower_fields
from pagewick.models.vision.tensor_names import CONNECTOR_TENSORS, without_encoders

# Not in the file: PyTorch's own, which the projector has.
_PROJECTOR_EPS: Final = 1e-5
# Newer programs leave out the last name of the path to the encoder.
_PLACES: Final = ("model.vision_tower.vision_model", "model.vision_tower")

# Defaults of entries that files leave out, even those of SmolVLM2.
_IDEFICS3: Final = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_IDEFICS3_NAMES: Final = (
    ("visual.projector.projection", "model.connector.modality_projection.proj"),
    ("visual.norm", "model.vision_model.post_layernorm"),
    ("visual.patch_embed.proj", "model.vision_model.embeddings.patch_embedding"),
    ("visual", "model.vision_model"),
    *IN_TOWER,
)
_IDEFICS3_UNUSED: Final = r"model\.vision_model\.embeddings\.position_ids"


def with_lfm2_vl(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.renamed({"image_token_id": "image_token_index"}).count("image_token_id", 396)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    entries.demand("vision_feature_layer", -1, -1, "images are read from the encoder's last layer")
    given.choice("model_type", ("siglip2_vision_model",), "siglip2_vision_model")
    num_positions = given.size("num_patches", 256)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise given.wrong("num_patches", "a square number: positions form a square")
    vision = MergingSiglipConfig(
        **tower_fields(given),
        image_token_id=token,
        out_hidden_size=config.hidden_size,
        merge_size=entries.size("downsample_factor", 2, most=MAX_MERGED),
        positions_per_side=side,
        is_stretched=True,
        projector_eps=_PROJECTOR_EPS if entries.flag("projector_use_layernorm", True) else None,
        projector_size=entries.size("projector_hidden_size", 2560),
        projector_activation=read_activation(entries, "gelu", "projector_hidden_act"),
        projector_bias=entries.flag("projector_bias", True),
    )
    return replace(
        config,
        vision=vision,
        names=tuple(
            NameMap(parts=(*names.parts, *_lfm2_vl_names(names, place))) for names in config.names for place in _PLACES
        ),
        ignored=(*without_encoders(config.ignored), UNUSED),
    )


def _lfm2_vl_names(text: NameMap, place: str) -> tuple[tuple[str, str], ...]:
    """text: the names of the text part, which apply to these first."""
    projector, mlp = "model.multi_modal_projector", text.in_file("mlp")
    return (
        ("visual.projector.norm", f"{projector}.layer_norm"),
        ("visual.projector.projection.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector.projection", projector),
        ("visual.norm", f"{place}.post_layernorm"),
        ("visual.patch_embed.proj", f"{place}.embeddings.patch_embedding"),
        ("visual", place),
        (f"{mlp}.linear_fc1", "mlp.fc1"),
        (f"{mlp}.linear_fc2", "mlp.fc2"),
        *IN_TOWER,
    )


def with_idefics3(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id", 128257)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    given.choice("model_type", ("idefics3_vision", "idefics3", "smolvlm_vision"), "idefics3_vision")
    fields = tower_fields(given.filled(_IDEFICS3))
    # Patches at two edges that are not whole are not seen.
    side = given.size("image_size", 224, most=MAX_SIDE) // fields["patch_size"]
    merge_size = entries.size("scale_factor", 2, most=MAX_MERGED)
    if not side or side % merge_size:
        raise entries.wrong("scale_factor", f"a divisor of {side}, the patches in a row")
    vision = MergingSiglipConfig(
        **{**fields, "tensors": CONNECTOR_TENSORS},
        image_token_id=token,
        out_hidden_size=config.hidden_size,
        merge_size=merge_size,
        positions_per_side=side,
        is_stretched=False,
        is_rounded=True,
    )
    return replace(
        config,
        vision=vision,
        names=tuple(NameMap(parts=(*names.parts, *_IDEFICS3_NAMES)) for names in config.names),
        ignored=(*without_encoders(config.ignored), _IDEFICS3_UNUSED),
    )


def with_cohere_siglip(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id", 255036)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    given.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    fields = tower_fields(given)
    merge_size = entries.size("downsample_factor", 2, most=MAX_MERGED)
    image_size, square = given.size("image_size", 224, most=MAX_SIDE), fields["patch_size"] * merge_size
    if image_size % square:
        raise given.wrong("image_size", f"a multiple of patch_size * downsample_factor ({square})")
    inner = entries.size("alignment_intermediate_size", 36864)
    if inner % 2:
        raise entries.wrong("alignment_intermediate_size", "an even number: half of it are gates")
    vision = MergingSiglipConfig(
        **fields,
        image_token_id=token,
        out_hidden_size=config.hidden_size,
        merge_size=merge_size,
        positions_per_side=image_size // fields["patch_size"],
        is_stretched=False,
        projector_size=inner // 2,
        projector_activation="silu",
        projector_bias=True,
        is_projector_gated=True,
    )
    return replace(
        config,
        vision=vision,
        names=tuple(
            NameMap(parts=(*names.parts, *_cohere_names(*place))) for names in config.names for place in SIGLIP_PLACES
        ),
        ignored=(*without_encoders(config.ignored), UNUSED),
    )


def _cohere_names(outer: str, inner: str) -> tuple[tuple[str, str], ...]:
    projector = f"{outer}multi_modal_projector"
    return (
        ("visual.projector.projection.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector.projection", projector),
        ("visual.norm", f"{outer}vision_tower{inner}.post_layernorm"),
        ("visual", f"{outer}vision_tower{inner}"),
        *IN_TOWER,
    )
