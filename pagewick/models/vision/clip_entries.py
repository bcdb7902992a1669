"""Reads the vision part of the config.json of LLaVA's models, CLIP's encoder or SigLIP's, with the projector. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.merging_config import ClipVisionConfig
from pagewick.models.vision.siglip_entries import IN_TOWER, MAX_SIDE, SIGLIP_PLACES, tower_fields
from pagewick.models.vision.tensor_names import LLAVA_TENSORS, without_encoders

CLIP: Final = "clip_vision_model"
SIGLIP: Final = "siglip_vision_model"
# The canvases of a file that names none.
_NEXT_CANVASES: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# The most tiles of a canvas, as in pagewick/images/tiles.py.
_MAX_TILES: Final = 60
_CLIP_DEFAULTS: Final = {"hidden_act": "quick_gelu", "patch_size": 32, "layer_norm_eps": 1e-5}
# Images are read from all rows of the encoder, or from those of patches.
_STRATEGIES: Final = {CLIP: "default", SIGLIP: "full"}
_WHY: Final = {CLIP: "the row that no patch makes is left out", SIGLIP: "all rows of this encoder are of patches"}


class LlavaDefaults(NamedTuple):
    """The values of entries that files of one of LLaVA's families leave out.

    joins_tiles: whether pictures may be read in tiles, whose tokens stand in common rows. canvases: of these.
    aspect_ratio: vision_aspect_ratio; None: the family has no such entry.
    """

    kind: str = CLIP
    image_token_id: int = 32000
    layer: int = -2
    strategy: str = "default"
    joins_tiles: bool = False
    canvases: list[list[int]] = _NEXT_CANVASES
    aspect_ratio: str | None = None


LLAVA: Final = LlavaDefaults()
NEXT: Final = LlavaDefaults(joins_tiles=True)
ONEVISION: Final = LlavaDefaults(
    SIGLIP,
    image_token_id=151646,
    layer=-1,
    strategy="full",
    joins_tiles=True,
    canvases=[[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
    aspect_ratio="anyres_max_9",
)


def with_llava(config: ModelConfig, entries: Entries, defaults: LlavaDefaults = LLAVA) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    renamed = entries.renamed({"image_token_index": "image_token_id"})
    token = renamed.count("image_token_index", defaults.image_token_id)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    kind = given.choice("model_type", tuple(_STRATEGIES), defaults.kind)
    entries.demand("vision_feature_select_strategy", _STRATEGIES[kind], defaults.strategy, _WHY[kind])
    num_blocks, fields = tower(given, entries, kind, default_layer=defaults.layer)
    if defaults.joins_tiles:
        canvas = _largest_canvas(entries, fields["image_size"], defaults.canvases)
        fields |= {"largest_canvas": canvas, "tensors": LLAVA_TENSORS}
    if defaults.aspect_ratio is not None:
        fields["shrinks_beyond"] = _most_tiles(entries, defaults.aspect_ratio)
    vision = ClipVisionConfig(
        **fields,
        image_token_id=token,
        out_hidden_size=config.hidden_size,
        merge_size=1,
        projector_size=config.hidden_size,
        projector_activation=read_activation(entries, "gelu", "projector_hidden_act"),
        projector_bias=entries.flag("multimodal_projector_bias", True),
    )
    return seeing(config, vision, num_blocks)


def _most_tiles(entries: Entries, default: str) -> int:
    """Return the number in vision_aspect_ratio."""
    found = re.fullmatch("anyres_max_([1-9][0-9]?)", entries.text("vision_aspect_ratio", default))
    if found is None:
        raise entries.wrong("vision_aspect_ratio", "anyres_max_ with a number from 1 to 99")
    return int(found[1])


def _largest_canvas(entries: Entries, side: int, default: list[list[int]]) -> int:
    """Return the pixels of the largest of the pictures that image_grid_pinpoints names. side: of a tile, in pixels."""
    name = "image_grid_pinpoints"
    canvases = entries.get(name) or default
    if not isinstance(canvases, list) or not all(_is_canvas(one, side) for one in canvases):
        raise entries.wrong(name, f"a list of heights and widths, multiples of {side} with at most {_MAX_TILES} tiles")
    return max(math.prod(canvas) for canvas in canvases)


def _is_canvas(value: Any, side: int) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    is_divided = all(type(length) is int and length > 0 and length % side == 0 for length in value)
    return is_divided and math.prod(value) <= _MAX_TILES * side**2


def seeing(config: ModelConfig, vision: ClipVisionConfig, num_blocks: int) -> ModelConfig:
    """Return a text part's config with its vision part. num_blocks: those in the file, of which some may be unused."""
    return replace(
        config,
        vision=vision,
        names=tuple(
            NameMap(parts=(*names.parts, *_names_in(*place))) for names in config.names for place in SIGLIP_PLACES
        ),
        ignored=(*without_encoders(config.ignored), _unused(range(vision.num_blocks, num_blocks))),
    )


def tower(given: Entries, entries: Entries, kind: str, *, default_layer: int) -> tuple[int, dict[str, Any]]:
    """Return the number of blocks in the file, and fields of the encoder: blocks behind the last one used are left out.

    given: vision_config. entries: those of the file. default_layer: vision_feature_layer of a file that leaves it out.
    """
    if kind == CLIP:
        given = given.without_null(_CLIP_DEFAULTS).filled(_CLIP_DEFAULTS)
    fields = tower_fields(given)
    num_blocks, patch_size = fields["num_blocks"], fields["patch_size"]
    # Patches at two edges that are not whole are not seen.
    whole = given.size("image_size", 224, most=MAX_SIDE)
    side = whole // patch_size
    if not side:
        raise given.wrong("image_size", f"at least patch_size ({patch_size})")
    features = _features(entries, num_blocks, default_layer)
    used = {"image_size": whole, "num_blocks": max(features), "patch_bias": kind == SIGLIP, "positions_per_side": side}
    return num_blocks, {**fields, **used, "has_first": kind == CLIP, "features": features}


def _features(entries: Entries, num_blocks: int, default: int) -> tuple[int, ...]:
    """Return the numbers of blocks behind which rows are read, from vision_feature_layer: a number, or a list."""
    name = "vision_feature_layer"
    value = entries.get(name)
    layers = value if isinstance(value, list) else [default if value is None else value]
    known = range(-num_blocks - 1, num_blocks + 1)
    if not layers or len(layers) > 16 or not all(type(layer) is int and layer in known for layer in layers):
        raise entries.wrong(name, f"a number from {known[0]} to {known[-1]}, or a list of at most 16 of them")
    return tuple(layer % (num_blocks + 1) for layer in layers)


def _unused(blocks: range) -> str:
    """Return a regular expression of tensors that files may hold and that no image needs."""
    behind = rf"encoder\.layers\.({'|'.join(map(str, blocks))})|" if blocks else ""
    inner = rf"({behind}post_layernorm|head)\..*|embeddings\.position_ids"
    return rf"(model\.)?vision_tower\.(vision_model\.)?({inner})"


def _names_in(outer: str, inner: str) -> tuple[tuple[str, str], ...]:
    projector, place = f"{outer}multi_modal_projector", f"{outer}vision_tower{inner}"
    return (
        ("visual.projector.norm", f"{projector}.layernorm"),
        ("visual.projector.projection.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector.projection", projector),
        ("visual.newline.weight", f"{outer}image_newline"),
        ("visual.first_norm", f"{place}.pre_layrnorm"),
        ("visual.first.weight", f"{place}.embeddings.class_embedding"),
        ("visual", place),
        *IN_TOWER,
    )
