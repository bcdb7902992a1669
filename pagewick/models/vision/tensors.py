"""The tensors of vision encoders: their names under the encoder's, and their shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pagewick.layers.config import CLIP_BOUNDS
from pagewick.models.vision.config import Gemma4VisionConfig, GlmVisionConfig, PixtralConfig, SiglipConfig, VisionConfig
from pagewick.models.vision.merging_config import (
    ClipVisionConfig,
    CropVisionConfig,
    InternVisionConfig,
    Lfm3VisionConfig,
    Llama4VisionConfig,
    MergingConfig,
    MergingSiglipConfig,
    MiniCPMVisionConfig,
    MoonVisionConfig,
    PaddleVisionConfig,
)


class Shared(NamedTuple):
    """A dimension of which ranks have shares: `number` is shared out among them, and each unit has `unit` elements."""

    number: int
    unit: int = 1


class KeyHeads(NamedTuple):
    """A dimension of keys or values: a rank keeps the heads that its share of `num_heads` heads of queries needs.

    Each of `num_kv_heads` heads has `unit` elements.
    """

    num_heads: int
    num_kv_heads: int
    unit: int


class AllHeads(NamedTuple):
    """A dimension of all queries, then all keys, then all values; fields and shares are those of KeyHeads."""

    num_heads: int
    num_kv_heads: int
    unit: int


Dimension = int | Shared | KeyHeads | AllHeads
"""A dimension that every rank keeps whole, or one that is shared out."""

Tensors = Iterator[tuple[str, tuple[Dimension, ...]]]


def vision_tensors(config: VisionConfig) -> Tensors:
    """Yield the path and the shape of each tensor. Matrices are [out, in], but for SigLIP's TransposedLinear."""
    if isinstance(config, PixtralConfig):
        return _pixtral(config)
    if isinstance(config, SiglipConfig):
        return _siglip(config)
    if isinstance(config, MergingSiglipConfig | PaddleVisionConfig):
        return _merging_siglip(config)
    if isinstance(config, ClipVisionConfig):
        return _clip(config)
    if isinstance(config, MiniCPMVisionConfig):
        return _minicpm(config)
    if isinstance(config, MoonVisionConfig | CropVisionConfig):
        return _moon(config)
    if isinstance(config, Llama4VisionConfig):
        return _llama4(config)
    if isinstance(config, InternVisionConfig):
        return _intern(config)
    if isinstance(config, Lfm3VisionConfig):
        return _lfm3(config)
    if isinstance(config, GlmVisionConfig):
        return _glm(config)
    if isinstance(config, Gemma4VisionConfig):
        return _gemma4(config)
    return _qwen(config)


def _qwen(config: VisionConfig) -> Tensors:
    size = config.hidden_size
    yield from _patches("patch_embed.proj", config, has_bias=config.patch_bias)
    if config.positions_per_side is not None:
        yield "pos_embed.weight", (config.positions_per_side**2, size)
    for index in range(config.num_blocks):
        yield from _block(f"blocks.{index}", config, is_fused=True)
    mergers = {"merger": size}
    mergers |= {f"deepstack_merger_list.{index}": config.merged_size for index in range(len(config.deepstack_blocks))}
    inner = Shared(config.merged_size)
    for merger, norm_size in mergers.items():
        yield from _norm(f"{merger}.norm", norm_size, has_bias=not config.is_rms)
        yield from _linear(f"{merger}.linear_fc1", inner, config.merged_size)
        yield from _linear(f"{merger}.linear_fc2", config.out_hidden_size, inner)


def _siglip_tower(config: VisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "each patch has a learned position"
    yield from _patches("patch_embed.proj", config, has_bias=True)
    yield "pos_embed.weight", (side**2, size)
    for index in range(config.num_blocks):
        yield from _block(f"blocks.{index}", config, is_fused=False)
    yield from _norm("norm", size, has_bias=True)


def _siglip(config: SiglipConfig) -> Tensors:
    yield from _siglip_tower(config)
    yield from _norm("projector.norm", config.hidden_size)
    yield "projector.linear.weight", (config.hidden_size, config.out_hidden_size)


def _merging_siglip(config: MergingConfig) -> Tensors:
    yield from _siglip_tower(config)
    yield from _merging_projector(config)


def _clip(config: ClipVisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "each patch has a learned position"
    yield from _patches("patch_embed.proj", config, has_bias=config.patch_bias)
    yield "pos_embed.weight", (side**2 + config.num_firsts, size)
    if config.has_first:
        yield "first.weight", (size,)
        yield from _norm("first_norm", size, has_bias=True)
    for index in range(config.num_blocks):
        yield from _block(f"blocks.{index}", config, is_fused=False)
    yield from _merging_projector(config)
    if config.largest_canvas is not None:
        yield "newline.weight", (config.out_hidden_size,)


def _minicpm(config: MiniCPMVisionConfig) -> Tensors:
    yield from _siglip_tower(config)
    if config.window_block is not None:
        size, heads = config.hidden_size, Shared(config.num_heads, config.head_dim)
        inner = Shared(4 * config.intermediate_size)
        yield from _norm("window_merger.norm1", size, has_bias=True)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from _linear(f"window_merger.attn.{name}", heads, size)
        yield from _linear("window_merger.attn.proj", size, heads)
        yield from _norm("window_merger.norm2", config.merged_size, has_bias=True)
        yield from _linear("window_merger.mlp.linear_1", inner, config.merged_size)
        yield from _linear("window_merger.mlp.linear_fc2", size, inner)
    yield from _merging_projector(config)


def _moon(config: MoonVisionConfig | CropVisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "positions form a square"
    yield from _patches("patch_embed.proj", config, has_bias=True)
    is_square = isinstance(config, MoonVisionConfig)
    yield "positions.weight", (side, side, size) if is_square else (1, side**2, size)
    for index in range(config.num_blocks):
        yield from _block(f"blocks.{index}", config, is_fused=True)
    yield from _norm("norm", size, has_bias=True)
    yield from _merging_projector(config)


def _llama4(config: Llama4VisionConfig) -> Tensors:
    size, side, width = config.hidden_size, config.positions_per_side, config.projector_size
    assert side is not None and width is not None, "there are learned positions and an MLP"
    yield from _patches("patch_embed.proj", config, has_bias=False)
    yield "last.weight", (size,)
    yield "positions.weight", (side**2 + 1, size)
    yield from _norm("first_norm", size, has_bias=True)
    for index in range(config.num_blocks):
        yield from _block(f"blocks.{index}", config, is_fused=False)
    yield from _norm("norm", size, has_bias=True)
    yield from _linear("projector.linear_fc1", Shared(width), config.merged_size, has_bias=False)
    yield from _linear("projector.linear_fc2", width, Shared(width), has_bias=False)
    yield from _linear("projector.linear", config.out_hidden_size, width, has_bias=False)


def _merging_projector(config: MergingConfig) -> Tensors:
    if config.projector_eps is not None:
        size = config.merged_size if config.is_norm_merged else config.hidden_size
        yield from _norm("projector.norm", size, has_bias=True)
    if config.projector_size is None:
        yield from _linear("projector.projection", config.out_hidden_size, config.merged_size, has_bias=False)
        return
    width, has_bias = Shared(config.projector_size), config.projector_bias
    inputs = Shared(config.projector_size, 2) if config.is_projector_gated else width
    yield from _linear("projector.projection.linear_1", inputs, config.merged_size, has_bias=has_bias)
    yield from _linear("projector.projection.linear_fc2", config.out_hidden_size, width, has_bias=has_bias)


def _intern(config: InternVisionConfig) -> Tensors:
    size, side, inner = config.hidden_size, config.positions_per_side, Shared(config.intermediate_size)
    heads = Shared(config.num_heads, config.head_dim)
    assert side is not None, "each patch has a learned position"
    yield from _patches("patch_embed.proj", config, has_bias=True)
    yield "first.weight", (1, 1, size)
    yield "positions.weight", (1, side**2 + 1, size)
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        for name in ("norm1", "norm2"):
            yield from _norm(f"{block}.{name}", size, has_bias=not config.is_rms)
        for name in ("scale1", "scale2"):
            yield from _norm(f"{block}.{name}", size)
        for name in ("q_proj", "k_proj", "v_proj"):
            # Queries and keys that are normalised over all heads are whole on every rank.
            rows = size if config.is_qk_normed and name != "v_proj" else heads
            yield from _linear(f"{block}.attn.{name}", rows, size, has_bias=config.has_qkv_bias)
        for name in ("q_norm", "k_norm") if config.is_qk_normed else ():
            yield from _norm(f"{block}.attn.{name}", size)
        yield from _linear(f"{block}.attn.proj", size, heads)
        yield from _linear(f"{block}.mlp.linear_fc1", inner, size)
        yield from _linear(f"{block}.mlp.linear_fc2", size, inner)
    if config.has_norm:
        yield from _norm("norm", size, has_bias=True)
    yield from _merging_projector(config)


def _lfm3(config: Lfm3VisionConfig) -> Tensors:
    size, inner, channels = config.hidden_size, Shared(config.intermediate_size), Shared(config.hidden_size)
    heads = Shared(config.num_heads, config.head_dim)
    key_heads = KeyHeads(config.num_heads, config.num_kv_heads, config.head_dim)
    yield from _patches("patch_embed.proj", config, has_bias=False)
    yield from _norm("first_norm", size)
    for index in range(config.num_blocks):
        block = f"blocks.{index}"
        for name in ("norm1", "norm2"):
            yield from _norm(f"{block}.{name}", size)
        if index in config.attention_blocks:
            for name, rows in (("q_proj", heads), ("k_proj", key_heads), ("v_proj", key_heads)):
                yield from _linear(f"{block}.attn.{name}", rows, size, has_bias=False)
            for name in ("q_norm", "k_norm"):
                yield from _norm(f"{block}.attn.{name}", config.head_dim)
            yield from _linear(f"{block}.attn.proj", size, heads, has_bias=False)
        else:
            yield from _linear(f"{block}.conv.in_proj", Shared(size, 3), size, has_bias=False)
            yield f"{block}.conv.filter.weight", (channels, 1, config.conv_size, config.conv_size)
            yield from _linear(f"{block}.conv.proj", size, channels, has_bias=False)
        for name in config.mlp_inputs:
            yield from _linear(f"{block}.mlp.{name}", inner, size, has_bias=False)
        yield from _linear(f"{block}.mlp.linear_fc2", size, inner, has_bias=False)
    yield from _merging_projector(config)


def _glm(config: GlmVisionConfig) -> Tensors:
    size, out_size = config.hidden_size, config.out_hidden_size
    heads, inner, has_bias = config.num_heads, Shared(config.intermediate_size), config.has_bias
    yield from _patches("patch_embed.proj", config, has_bias=True)
    if config.positions_per_side is not None:
        yield from _norm("first_norm", size)
        yield "pos_embed.weight", (config.positions_per_side**2, size)
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        for name in ("norm1", "norm2"):
            yield from _norm(f"{block}.{name}", size)
        yield from _linear(f"{block}.attn.qkv", Shared(heads, 3 * config.head_dim), size, has_bias=config.has_qkv_bias)
        for name in ("q_norm", "k_norm") if config.is_qk_normed else ():
            yield from _norm(f"{block}.attn.{name}", config.head_dim)
        yield from _linear(f"{block}.attn.proj", size, Shared(heads, config.head_dim), has_bias=has_bias)
        for name in config.mlp_inputs:
            yield from _linear(f"{block}.mlp.{name}", inner, size, has_bias=has_bias)
        yield from _linear(f"{block}.mlp.linear_fc2", size, inner, has_bias=has_bias)
    yield from _norm("last_norm", size)
    yield "merger.downsample.weight", (out_size, size, config.merge_size, config.merge_size)
    yield "merger.downsample.bias", (out_size,)
    yield from _linear("merger.proj", out_size, out_size, has_bias=False)
    yield from _norm("merger.norm", out_size, has_bias=True)
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"merger.{name}", Shared(config.merger_size), out_size, has_bias=False)
    yield from _linear("merger.linear_fc2", out_size, Shared(config.merger_size), has_bias=False)


def _pixtral(config: PixtralConfig) -> Tensors:
    size, inner = config.hidden_size, Shared(config.intermediate_size)
    heads = Shared(config.num_heads, config.head_dim)
    yield from _patches("patch_conv", config, has_bias=False)
    yield from _norm("ln_pre", size)
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        yield from _norm(f"{block}.norm1", size)
        yield from _norm(f"{block}.norm2", size)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from _linear(f"{block}.attn.{name}", heads, size, has_bias=False)
        yield from _linear(f"{block}.attn.proj", size, heads, has_bias=False)
        for name in config.mlp_inputs:
            yield from _linear(f"{block}.feed_forward.{name}", inner, size, has_bias=False)
        yield from _linear(f"{block}.feed_forward.linear_fc2", size, inner, has_bias=False)
    if config.projector_eps is not None:
        yield from _norm("projector.norm", size)
        yield from _linear("projector.merging_layer", size, config.merged_size, has_bias=False)
    width = Shared(config.out_hidden_size)
    yield from _linear("projector.linear_1", width, size, has_bias=config.projector_bias)
    yield from _linear("projector.linear_fc2", config.out_hidden_size, width, has_bias=config.projector_bias)


def _gemma4(config: Gemma4VisionConfig) -> Tensors:
    size, inner = config.hidden_size, Shared(config.intermediate_size)
    heads = Shared(config.num_heads, config.head_dim)
    yield from _patches("patch_embed.proj", config, has_bias=False)
    yield "patch_embed.positions.weight", (2, config.num_positions, size)
    products: dict[str, tuple[Dimension, Dimension]] = {
        **{f"attn.{name}": (heads, size) for name in ("q_proj", "k_proj", "v_proj")},
        "attn.o_proj": (size, heads),
        **{f"mlp.{name}": (inner, size) for name in config.mlp_inputs},
        "mlp.down_proj": (size, inner),
    }
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        for name in ("norm1", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield from _norm(f"{block}.{name}", size)
        for name in ("q_norm", "k_norm"):
            yield from _norm(f"{block}.attn.{name}", config.head_dim)
        for name, shape in products.items():
            yield f"{block}.{name}.linear.weight", shape
            for bound in CLIP_BOUNDS if config.is_clipped else ():
                yield f"{block}.{name}.{bound}", ()
    if config.is_standardized:
        yield "standard.std_bias", (size,)
        yield "standard.std_scale", (size,)
    yield "projector.weight", (config.out_hidden_size, size)


def _block(path: str, config: VisionConfig, *, is_fused: bool) -> Tensors:
    size, inner, heads = config.hidden_size, Shared(config.intermediate_size), config.num_heads
    for name in ("norm1", "norm2"):
        yield from _norm(f"{path}.{name}", size, has_bias=not config.is_rms)
    if is_fused:
        yield from _linear(f"{path}.attn.qkv", AllHeads(heads, config.num_kv_heads or heads, config.head_dim), size)
    else:
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from _linear(f"{path}.attn.{name}", Shared(heads, config.head_dim), size)
    yield from _linear(f"{path}.attn.proj", size, Shared(heads, config.head_dim))
    for name in config.mlp_inputs:
        yield from _linear(f"{path}.mlp.{name}", inner, size)
    yield from _linear(f"{path}.mlp.linear_fc2", size, inner)


def _patches(path: str, config: VisionConfig, *, has_bias: bool) -> Tensors:
    yield f"{path}.weight", (config.hidden_size, *config.patch_shape)
    if has_bias:
        yield f"{path}.bias", (config.hidden_size,)


def _linear(path: str, rows: Dimension, columns: Dimension, *, has_bias: bool = True) -> Tensors:
    yield f"{path}.weight", (rows, columns)
    if has_bias:
        yield f"{path}.bias", (rows,)


def _norm(path: str, size: int, *, has_bias: bool = False) -> Tensors:
    yield f"{path}.weight", (size,)
    if has_bias:
        yield f"{path}.bias", (size,)
