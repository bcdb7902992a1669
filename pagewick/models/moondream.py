"""Moondream 2 (HfMoondream), its revision of 2025-06-21: Phi's decoder, and an encoder of crops that overlap.

The entries have names of their own, within the entry config, which is empty in the published file: the model's code has
their defaults (https://github.com/vikhyat/moondream, moondream/torch/config.py). Older revisions have the same tensors
and another vocabulary (pagewick/text/moondream.py). The part that finds points and boxes is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import NormConfig
from pagewick.models.vision.entries import MAX_PATCH
from pagewick.models.vision.merging_config import CropVisionConfig
from pagewick.models.vision.siglip_entries import MAX_SIDE
from pagewick.models.vision.tensor_names import CROP_TENSORS

_KIND: Final = "moondream1"
# Common name -> the file's.
_TEXT_NAMES: Final = {
    "hidden_size": "dim", "intermediate_size": "ff_dim", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "max_position_embeddings": "max_context",
}  # fmt: skip
_TEXT: Final = {
    "dim": 2048, "ff_dim": 8192, "n_layers": 24, "vocab_size": 51200, "max_context": 2048, "n_heads": 32,
    "n_kv_heads": 32, "prefix_attn": 730, "group_size": None,
}  # fmt: skip
_VISION: Final = {
    "enc_dim": 1152, "enc_patch_size": 14, "enc_n_layers": 27, "enc_ff_dim": 4304, "enc_n_heads": 16,
    "proj_out_dim": 2048, "crop_size": 378, "in_channels": 3, "max_crops": 12, "overlap_margin": 4,
    "proj_inner_dim": 8192,
}  # fmt: skip
_ROTATION: Final = ("rope_theta", "rope_scaling", "rope_parameters")
_PARTS: Final = ("text", "vision", "region", "tokenizer")
# Tokens of prompts, which pagewick/text/moondream.py makes. That of size_id stands for images: no text has it.
_TOKENS: Final = {
    "bos_id": 0, "eos_id": 0, "answer_id": 3, "thinking_id": 4, "coord_id": 5, "size_id": 6,
    "start_ground_points_id": 7, "end_ground_id": 9,
}  # fmt: skip
_TEMPLATES: Final = ("query", "caption", "detect", "point")
# Not in the file: the norms of the model's code have it.
_EPS: Final = 1e-5
# As in pagewick/images/moondream_settings.py.
_MAX_CROPS: Final = 60
_IN_TEXT: Final = (
    ("model.embed_tokens.weight", "text.wte"), ("model.norm", "text.post_ln"), ("model.layers", "text.blocks"),
    ("lm_head", "text.lm_head"), ("input_layernorm", "ln"), ("self_attn.qkv_proj", "attn.qkv"),
    ("self_attn.o_proj", "attn.proj"), ("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2"),
)  # fmt: skip
_IN_VISION: Final = (
    ("visual.patch_embed.proj", "vision.patch_emb"), ("visual.positions.weight", "vision.pos_emb"),
    ("visual.norm", "vision.post_ln"), ("visual.projector.projection.linear_1", "vision.proj_mlp.fc1"),
    ("visual.projector.projection.linear_fc2", "vision.proj_mlp.fc2"), ("visual", "vision"), ("norm1", "ln1"),
    ("norm2", "ln2"), ("mlp.linear_fc1", "mlp.fc1"), ("mlp.linear_fc2", "mlp.fc2"),
)  # fmt: skip
# Within the class of transformers' kind, or by itself.
_NAMES: Final = (
    NameMap(parts=(*_IN_TEXT, *_IN_VISION, ("text", "model.text"), ("vision", "model.vision"))),
    NameMap(parts=(*_IN_TEXT, *_IN_VISION)),
)


def read_moondream(entries: Entries) -> ModelConfig:
    entries.demand("model_type", _KIND, _KIND, "other models of this name are built in another way")
    given = entries.child("config") or Entries({}, "config")
    _check_known(given, _PARTS)
    outer: dict[str, Any] = {"architectures": [architecture_of(entries.values)], "dtype": reading.read_dtype(entries)}
    # A user's own rotary embedding stands there.
    outer |= {name: entries.values[name] for name in _ROTATION if name in entries}
    text = _part(given, "text", _TEXT).renamed(_TEXT_NAMES).filled(outer)
    config = _read_text(text)
    tokens = _part(given, "tokenizer", {**_TOKENS, "templates": None})
    for name in _TOKENS:
        if tokens.count(name) >= config.vocab_size:
            raise tokens.wrong(name, f"below the size of the vocabulary ({config.vocab_size})")
    _check_templates(tokens, config.vocab_size)
    vision = _read_vision(_part(given, "vision", _VISION), tokens.count("size_id"), config)
    text.demand("prefix_attn", vision.fixed_tokens + 1, None, "the first token and those of an image see each other")
    return replace(
        config,
        vision=vision,
        layers=tuple(layer.seeing_images_whole() for layer in config.layers),
        ignored=(*config.ignored, r"(model\.)?region\..*"),
    )


def _check_templates(tokens: Entries, vocab_size: int) -> None:
    """Raise ModelLoadError unless templates has lists of tokens of the vocabulary where the model's code has them."""
    templates = tokens.child("templates") or Entries({}, "config.tokenizer.templates")
    _check_known(templates, _TEMPLATES)
    for kind in templates:
        lists = templates.child(kind)
        assert lists is not None, "null entries are left out"
        for name in lists:
            if max(lists.sizes(name, least=0) or [0]) >= vocab_size:
                raise lists.wrong(name, f"a list of tokens below the size of the vocabulary ({vocab_size})")


def _part(given: Entries, name: str, defaults: Mapping[str, Any]) -> Entries:
    """Return the entries of a part, with the defaults of those that are missing. Raises ModelLoadError for others."""
    part = given.child(name) or Entries({}, f"config.{name}")
    _check_known(part, defaults)
    return part.without_null(defaults).filled(defaults)


def _check_known(given: Entries, known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise given.wrong(name, f"left out: known are {', '.join(known)}")


def _read_text(text: Entries) -> ModelConfig:
    text.demand("group_size", None, None, "weights that the model's own code packs are not supported")
    attention = reading.read_attention(text, layout="fused", qkv_bias=True, o_bias=True)
    if attention.head_dim % 4:
        raise text.wrong("num_attention_heads", "such that half of a head consists of pairs of numbers")
    mlp = reading.read_mlp(text, activation="gelu_tanh", is_gated=False, bias=True)
    rope = reading.read_rope_of(text, attention, default_partial_rotary_factor=0.5)
    return reading.model_config(
        text,
        norm=NormConfig(kind="layer", eps=_EPS, has_bias=True),
        block="parallel",
        layers=reading.same_layers(reading.read_num_layers(text), attention, mlp, rope),
        head_bias=True,
        names=_NAMES,
    )


def _read_vision(given: Entries, token: int, text: ModelConfig) -> CropVisionConfig:
    given.demand("in_channels", 3, None, "images have three colours")
    given.demand("proj_out_dim", text.hidden_size, None, "the width of the text part")
    width, num_heads = given.size("enc_dim"), given.size("enc_n_heads")
    if width % num_heads:
        raise given.wrong("enc_n_heads", f"a divisor of enc_dim ({width})")
    patch_size, crop = given.size("enc_patch_size", most=MAX_PATCH), given.size("crop_size", most=MAX_SIDE)
    if crop % patch_size:
        raise given.wrong("crop_size", f"a multiple of enc_patch_size ({patch_size})")
    side = crop // patch_size
    margin = given.count("overlap_margin")
    if 2 * margin >= side:
        raise given.wrong("overlap_margin", f"less than half of the {side} patches along a crop")
    return CropVisionConfig(
        image_token_id=token,
        hidden_size=width,
        out_hidden_size=text.hidden_size,
        num_blocks=given.size("enc_n_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        intermediate_size=given.size("enc_ff_dim"),
        activation="gelu_tanh",
        patch_size=patch_size,
        temporal_patch_size=1,
        merge_size=1,
        norm_eps=_EPS,
        patch_bias=True,
        positions_per_side=side,
        projector_size=given.size("proj_inner_dim"),
        projector_activation="gelu_tanh",
        projector_bias=True,
        margin=margin,
        max_crops=given.size("max_crops", most=_MAX_CROPS),
        tensors=CROP_TENSORS,
    )
