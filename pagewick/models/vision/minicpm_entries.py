"""Reads the vision part of the config.json of MiniCPM-V 4.6 and 4.7. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.vision.entries import with_axes
from pagewick.models.vision.merging_config import CanvasMarks, MiniCPMVisionConfig
from pagewick.models.vision.siglip_entries import IN_TOWER, MAX_SIDE, UNUSED, tower_fields
from pagewick.models.vision.tensor_names import MINICPM_TENSORS, without_encoders

# Not in the file: the class has it.
_PROJECTOR_EPS: Final = 1e-6
_KINDS: Final = tuple(f"minicpmv4_{number}{end}" for number in (6, 7) for end in ("_vision", ""))
_MARKS: Final = {
    "image_start": "image_start_id", "image_end": "image_end_id", "slice_start": "slice_start_id",
    "slice_end": "slice_end_id", "row_end": "newline_id",
}  # fmt: skip
# Qwen3.5's default of mrope_section.
_SECTIONS: Final = (11, 11, 10)
_SQUARE: Final = (2, 2)
_NAMES: Final = (
    ("visual.projector.norm", "model.merger.mlp.0.pre_norm"),
    ("visual.projector.projection.linear_fc2", "model.merger.mlp.0.linear_2"),
    ("visual.projector.projection", "model.merger.mlp.0"),
    ("visual.norm", "model.vision_tower.post_layernorm"),
    ("window_merger.norm2", "window_merger.pre_norm"),
    ("window_merger.mlp.linear_fc2", "window_merger.linear_2"),
    ("window_merger.mlp", "window_merger"),
    ("window_merger", "vit_merger"),
    ("visual", "model.vision_tower"),
    *IN_TOWER,
)
_WINDOW_MERGER: Final = r"(model\.)?vision_tower\.vit_merger\..*"


def with_minicpm(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id")
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    vision = _read(given, entries, token, config.hidden_size)
    unused = (UNUSED,) if vision.window_block is not None else (UNUSED, _WINDOW_MERGER)
    return replace(
        config,
        vision=vision,
        names=tuple(NameMap(parts=(*names.parts, *_NAMES)) for names in config.names),
        ignored=(*without_encoders(config.ignored), *unused),
    )


def with_minicpm_canvas(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Do the same for a model whose images lie on canvases: tokens have three positions."""
    config = with_minicpm(config, entries)
    if not isinstance(config.vision, MiniCPMVisionConfig):
        return config
    marks = CanvasMarks(**{field: entries.count(name) for field, name in _MARKS.items()})
    return replace(
        config,
        vision=replace(config.vision, canvas=marks),
        layers=with_axes(config, entries.child("text_config") or entries, _SECTIONS, is_interleaved=True),
    )


def _read(given: Entries, entries: Entries, token: int, text_size: int) -> MiniCPMVisionConfig:
    """Read vision_config (`given`) of a file with these entries."""
    given.choice("model_type", _KINDS, _KINDS[0])
    for owner, name in ((entries, "merge_kernel_size"), (given, "window_kernel_size")):
        if owner.sizes(name) not in (None, _SQUARE):
            raise owner.wrong(name, "[2, 2]: other squares are not supported")
    entries.demand("merger_times", 1, 1, "the processor counts the tokens of one step")
    fields = tower_fields(given)
    side = given.size("image_size", 224, most=MAX_SIDE) // fields["patch_size"]
    if not side:
        raise given.wrong("image_size", f"at least patch_size ({fields['patch_size']})")
    merges_twice = entries.choice("downsample_mode", ("4x", "16x"), "16x") == "16x"
    # That of vision_config counts for nothing.
    window_block = entries.count("insert_layer_id", 6)
    if merges_twice and window_block >= fields["num_blocks"]:
        expected = f"below num_hidden_layers of vision_config ({fields['num_blocks']})"
        raise entries.wrong("insert_layer_id", expected)
    return MiniCPMVisionConfig(
        **{**fields, "tensors": MINICPM_TENSORS},
        image_token_id=token,
        out_hidden_size=text_size,
        merge_size=4 if merges_twice else 2,
        positions_per_side=side,
        window_block=window_block if merges_twice else None,
        projector_eps=_PROJECTOR_EPS,
        projector_size=4 * fields["hidden_size"],
        projector_bias=True,
    )
