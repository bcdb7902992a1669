"""Reads the vision part of InternVL's config.json, with the entries of its projector. No torch.

transformers' classes have the defaults of entries that a file leaves out. Raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.entries import MAX_MERGED, MAX_PATCH
from pagewick.models.vision.merging_config import InternVisionConfig
from pagewick.models.vision.siglip_entries import MAX_SIDE
from pagewick.models.vision.tensor_names import TOWER_TENSORS, without_encoders

# Not in the file: PyTorch's own, which the projector has.
_PROJECTOR_EPS: Final = 1e-5
# Old files have the vision part beside the text part, newer ones have both within the model.
_PLACES: Final = ("model.", "")
_IN_TOWER: Final = (
    ("patch_embed.proj", "embeddings.patch_embeddings.projection"), ("first.weight", "embeddings.cls_token"),
    ("positions.weight", "embeddings.position_embeddings"), ("blocks", "encoder.layer"), ("norm1", "layernorm_before"),
    ("norm2", "layernorm_after"), ("attn.proj", "attention.projection_layer"), ("attn", "attention"),
    ("scale1.weight", "lambda_1"), ("scale2.weight", "lambda_2"), ("mlp.linear_fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2"),
)  # fmt: skip
# A part that files may hold and that no image needs: what stands for patches that training hides.
_UNUSED: Final = r"(model\.)?vision_tower\.embeddings\.mask_token"


def with_intern(config: ModelConfig, entries: Entries) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used."""
    given = entries.child("vision_config")
    if given is None:
        return config
    token = entries.count("image_token_id", 151667)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    entries.demand("vision_feature_layer", -1, -1, "images are read from the encoder's last layer")
    entries.demand("vision_feature_select_strategy", "default", "default", "the row that no patch makes is left out")
    fields = _encoder(given)
    ratio = entries.positive("downsample_ratio", 0.5)
    merge_size = round(min(1 / ratio, MAX_MERGED + 1))
    side = fields["positions_per_side"]
    if not 0 < merge_size <= MAX_MERGED or 1 / ratio != merge_size or side % merge_size:
        raise entries.wrong("downsample_ratio", f"1 divided by a divisor of {side}, the patches in a row")
    vision = InternVisionConfig(
        **fields,
        image_token_id=token,
        out_hidden_size=config.hidden_size,
        merge_size=merge_size,
        projector_eps=_PROJECTOR_EPS,
        projector_size=config.hidden_size,
        projector_activation=read_activation(entries, "gelu", "projector_hidden_act"),
        projector_bias=True,
        tensors=TOWER_TENSORS,
    )
    return replace(
        config,
        vision=vision,
        names=tuple(NameMap(parts=(*names.parts, *_names_in(place))) for names in config.names for place in _PLACES),
        ignored=(*without_encoders(config.ignored), _UNUSED),
    )


def _names_in(place: str) -> tuple[tuple[str, str], ...]:
    projector, tower = f"{place}multi_modal_projector", f"{place}vision_tower"
    return (
        ("visual.projector.norm", f"{projector}.layer_norm"),
        ("visual.projector.projection.linear_fc2", f"{projector}.linear_2"),
        ("visual.projector.projection", projector),
        ("visual.norm", f"{tower}.layernorm"),
        ("visual", tower),
        *_IN_TOWER,
    )


def _encoder(entries: Entries) -> dict[str, Any]:
    """Return the fields of the entry vision_config."""
    entries.choice("model_type", ("internvl_vision",), "internvl_vision")
    width, num_heads = entries.size("hidden_size", 1024), entries.size("num_attention_heads", 16)
    if width % num_heads:
        raise entries.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    entries.demand("num_channels", 3, 3, "images have three colours")
    entries.demand("use_absolute_position_embeddings", True, True, "patches have learned positions")
    image_size = _side(entries, "image_size", 448, MAX_SIDE)
    patch_size = _side(entries, "patch_size", 14, MAX_PATCH)
    if image_size % patch_size:
        raise entries.wrong("image_size", f"a multiple of patch_size ({patch_size})")
    return {
        "hidden_size": width,
        "num_blocks": entries.size("num_hidden_layers", 24, most=MAX_LAYERS),
        "num_heads": num_heads,
        "intermediate_size": entries.size("intermediate_size", 4096),
        "activation": read_activation(entries, "gelu"),
        "patch_size": patch_size,
        "temporal_patch_size": 1,
        "patch_bias": True,
        "is_rms": entries.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "rms_norm",
        "norm_eps": entries.positive("layer_norm_eps", 1e-6),
        "positions_per_side": image_size // patch_size,
        "has_qkv_bias": entries.flag("attention_bias", False),
        "is_qk_normed": entries.flag("use_qk_norm", False),
        "has_norm": not entries.flag("use_mean_pooling", True),
    }


def _side(entries: Entries, name: str, default: int, most: int) -> int:
    """Return a number that may be written as a list of two equal ones."""
    if isinstance(entries.get(name), list):
        sides = entries.sizes(name) or ()
        if len(sides) != 2 or sides[0] != sides[1]:
            raise entries.wrong(name, "a number, or a list of two equal ones")
        entries = entries.replaced({name: sides[0]})
    return entries.size(name, default, most=most)
