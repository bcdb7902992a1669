"""Reads the entry vision_config of config.json, and how three positions turn the heads of the text part. No torch.

Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and EXAONE 4.5; transformers' classes have the defaults of entries that a file
leaves out. Every function raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, MAX_SIZE, Entries
from pagewick.models.name_map import NameMap
from pagewick.models.reading import read_activation
from pagewick.models.vision.config import VisionConfig
from pagewick.models.vision.tensor_names import without_encoders

if TYPE_CHECKING:
    from pagewick.layers.config import RopeConfig

# Far above any existing encoder; a larger number would mean gigabytes for one patch.
MAX_PATCH: Final = 256
MAX_MERGED: Final = 16
_MERGER_OF_QWEN2: Final = (
    ("merger.norm", "merger.ln_q"), ("merger.linear_fc1", "merger.mlp.0"), ("merger.linear_fc2", "merger.mlp.2"),
)  # fmt: skip
_NAMES_OF_QWEN2: Final = (("mlp.linear_fc1", "mlp.fc1"), ("mlp.linear_fc2", "mlp.fc2"), *_MERGER_OF_QWEN2)
_NAMES_OF_QWEN2_5: Final = (("mlp.linear_fc2", "mlp.down_proj"), *_MERGER_OF_QWEN2)
# Where the encoder stands in a file, the newest one first.
_PLACES: Final = ("model.visual", "visual")
# Frequencies are computed, but some files may hold them.
_FREQUENCIES: Final = r"(model\.)?visual\.rotary_pos_emb\.inv_freq"

ReadVision = Callable[[Entries, int, int], VisionConfig]
"""Reads vision_config, given the id of the image token and the decoder's hidden size."""


def with_vision(
    config: ModelConfig,
    entries: Entries,
    read: ReadVision,
    *,
    image_token_id: int = 151655,
    sections: tuple[int, ...] | None = None,
    is_interleaved: bool | None = None,
    has_axes: bool = True,
) -> ModelConfig:
    """Return the text part's config with the vision part of the file, if the file describes one that can be used.

    image_token_id: the family's default. sections: the family's default of mrope_section; None: the file has to give
    them. is_interleaved: whether sections alternate, or follow each other; None: they alternate if there is a default.
    has_axes: whether a token has three positions.
    """
    vision_entries = entries.child("vision_config")
    if vision_entries is None:
        return config
    token = entries.count("image_token_id", image_token_id)
    if token >= config.vocab_size:
        # The vocabulary was cut down to the tokens of texts: no prompt has a place for an image.
        return config
    vision = read(vision_entries, token, config.hidden_size)
    if len(vision.deepstack_blocks) > config.num_layers:
        raise vision_entries.wrong(
            "deepstack_visual_indexes", f"a list of at most num_hidden_layers ({config.num_layers}) blocks"
        )
    places = [(("visual", place), *vision.names) if place != "visual" else vision.names for place in _PLACES]
    layers = config.layers
    if has_axes:
        is_interleaved = sections is not None if is_interleaved is None else is_interleaved
        text = entries.child("text_config") or entries
        layers = with_axes(config, text, sections, is_interleaved=is_interleaved)
    return replace(
        config,
        vision=vision,
        layers=layers,
        names=tuple(NameMap(parts=(*names.parts, *parts)) for names in config.names for parts in places),
        ignored=(*without_encoders(config.ignored), _FREQUENCIES),
    )


def with_axes(config: ModelConfig, text: Entries, default: tuple[int, ...] | None, *, is_interleaved: bool) -> Any:
    """Return the layers, rotated by the three positions that the rotary entries of the text part describe."""
    scaling = text.child("rope_parameters") or text.child("rope_scaling") or Entries({}, "rope_scaling")
    sections = scaling.sizes("mrope_section", least=0) or default or ()
    scaling.demand("mrope_interleaved", is_interleaved, is_interleaved, "the family has no other order of its sections")

    def turned(rope: RopeConfig) -> RopeConfig:
        found = replace(rope, mrope_section=sections, mrope_interleaved=is_interleaved)
        if not found.has_fitting_sections:
            order = ", which can alternate" if is_interleaved else ""
            raise scaling.wrong("mrope_section", f"three numbers with the sum {rope.rotary_dim // 2}{order}")
        return found

    return tuple(layer if layer.rope is None else replace(layer, rope=turned(layer.rope)) for layer in config.layers)


def read_qwen2_vl_vision(entries: Entries, image_token_id: int, text_size: int) -> VisionConfig:
    """Layer norms, plain MLPs, and patches that all see each other."""
    width, ratio = entries.size("embed_dim", 1280), entries.positive("mlp_ratio", 4)
    inner = int(min(width * ratio, MAX_SIZE))
    if not inner:
        raise entries.wrong("mlp_ratio", "a number that makes the MLP at least 1 wide")
    return VisionConfig(
        **common_fields(
            entries, image_token_id, text_size, width=width, out="hidden_size", patch_size=14, num_blocks=32
        ),
        intermediate_size=inner,
        activation=read_activation(entries, "quick_gelu"),
        names=_NAMES_OF_QWEN2,
    )


def read_qwen2_5_vl_vision(entries: Entries, image_token_id: int, text_size: int) -> VisionConfig:
    """RMS norms, gated MLPs, and windows in most blocks."""
    width = entries.size("hidden_size", 3584)
    common = common_fields(
        entries, image_token_id, text_size, width=width, out="out_hidden_size", patch_size=14, num_blocks=32
    )
    pixels = common["patch_size"] * common["merge_size"]
    window = entries.size("window_size", 112)
    if window < pixels:
        raise entries.wrong("window_size", f"at least patch_size * spatial_merge_size ({pixels})")
    full_blocks = entries.sizes("fullatt_block_indexes", least=0)
    return VisionConfig(
        **common,
        intermediate_size=entries.size("intermediate_size", 3420),
        activation=read_activation(entries, "silu"),
        is_gated=True,
        is_rms=True,
        window=window // common["merge_size"] // common["patch_size"],
        full_blocks=(7, 15, 23, 31) if full_blocks is None else full_blocks,
        names=_NAMES_OF_QWEN2_5,
    )


def read_exaone_vision(entries: Entries, image_token_id: int, text_size: int) -> VisionConfig:
    """Qwen2.5-VL's with heads of keys and values that serve several heads of queries."""
    entries.choice("model_type", ("exaone4_5_vision",), "exaone4_5_vision")
    vision = read_qwen2_5_vl_vision(entries, image_token_id, text_size)
    num_kv_heads = entries.size("num_key_value_heads", 8)
    if vision.num_heads % num_kv_heads:
        raise entries.wrong("num_key_value_heads", f"a divisor of num_heads ({vision.num_heads})")
    return replace(vision, num_kv_heads=num_kv_heads)


def read_qwen3_vl_vision(entries: Entries, image_token_id: int, text_size: int) -> VisionConfig:
    """Layer norms, plain MLPs, learned positions beside the rotation, and features for the decoder's first layers."""
    vision = read_qwen3_5_vision(entries, image_token_id, text_size)
    blocks = entries.sizes("deepstack_visual_indexes", least=0)
    blocks = (8, 16, 24) if blocks is None else blocks
    if list(blocks) != sorted(set(blocks)) or any(block >= vision.num_blocks for block in blocks):
        raise entries.wrong("deepstack_visual_indexes", f"a rising list of blocks below depth ({vision.num_blocks})")
    return replace(vision, deepstack_blocks=blocks)


def read_qwen3_5_vision(entries: Entries, image_token_id: int, text_size: int) -> VisionConfig:
    """Qwen3-VL's without features for the decoder's first layers."""
    width = entries.size("hidden_size", 1152)
    num_positions = entries.size("num_position_embeddings", 2304)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise entries.wrong("num_position_embeddings", "a square number: positions form a square")
    return VisionConfig(
        **common_fields(
            entries, image_token_id, text_size, width=width, out="out_hidden_size", patch_size=16, num_blocks=27
        ),
        intermediate_size=entries.size("intermediate_size", 4304),
        activation=read_activation(entries, "gelu_pytorch_tanh"),
        patch_bias=True,
        positions_per_side=side,
    )


def check_heads(entries: Entries, name: str, width: int, num_heads: int) -> None:
    """Raise ModelLoadError unless the heads share out the width of a patch, and rows and columns turn half of each."""
    if width % num_heads or width // num_heads % 4:
        raise entries.wrong(name, f"a number that cuts the width of a patch ({width}) into multiples of 4")


def read_axial_theta(entries: Entries, default: float) -> float:
    """Return the base of a rotation by rows and columns."""
    rope = entries.child("rope_parameters") or entries
    # The first files have the usual name for it, though rows and columns turn.
    rope.choice("rope_type", ("axial", "default"), "axial")
    theta = rope.positive("rope_theta", default)
    if theta <= 1.0:
        raise rope.wrong("rope_theta", "a number above 1")
    return theta


def common_fields(
    entries: Entries, image_token_id: int, text_size: int, *, width: int, out: str, patch_size: int, num_blocks: int
) -> dict[str, Any]:
    """Return the fields that Qwen's and GLM's families read alike; `out`: the entry with the width of the output."""
    num_heads = entries.size("num_heads", 16)
    check_heads(entries, "num_heads", width, num_heads)
    if entries.size(out, 3584) != text_size:
        raise entries.wrong(out, f"the hidden_size of the text part ({text_size})")
    for name in ("in_channels", "in_chans"):
        entries.demand(name, 3, 3, "images have three colours")
    head_dim = width // num_heads
    entries.demand("head_dim", head_dim, head_dim, "heads share out the width of a patch")
    return {
        "image_token_id": image_token_id,
        "hidden_size": width,
        "out_hidden_size": text_size,
        "num_blocks": entries.size("depth", num_blocks, most=MAX_LAYERS),
        "num_heads": num_heads,
        "patch_size": entries.size("patch_size", patch_size, most=MAX_PATCH),
        "temporal_patch_size": entries.size("temporal_patch_size", 2, most=MAX_MERGED),
        "merge_size": entries.size("spatial_merge_size", 2, most=MAX_MERGED),
        "rope_theta": _theta(entries),
    }


def _theta(entries: Entries) -> float:
    """Return the base of the rotation, which may have its old place beside the entry that describes the rotation."""
    rope = entries.child("rope_scaling") or entries.child("rope_parameters") or entries
    for name in ("rope_type", "type"):
        rope.demand(name, "axial", "axial")
    owner = rope if "rope_theta" in rope else entries
    theta = owner.positive("rope_theta", 10000.0)
    if theta <= 1.0:
        raise owner.wrong("rope_theta", "a number above 1")
    return theta
