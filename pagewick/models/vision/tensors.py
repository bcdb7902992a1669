"""The tensors of vision encoders: their names under the encoder's, and their shapes. Imports no torch."""

from __future__ import annotations

from pagewick.layers.config import CLIP_BOUNDS
from pagewick.models.vision.config import (
    BlipVisionConfig,
    Gemma4VisionConfig,
    GlmVisionConfig,
    PixtralConfig,
    SiglipConfig,
    VisionConfig,
)
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
from pagewick.models.vision.tensor_parts import (
    Dimension,
    KeyHeads,
    Shared,
    Tensors,
    block_tensors,
    linear_tensors,
    norm_tensors,
    patches_tensors,
)


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
    if isinstance(config, BlipVisionConfig):
        return _blip(config)
    return _qwen(config)


def _qwen(config: VisionConfig) -> Tensors:
    size = config.hidden_size
    yield from patches_tensors("patch_embed.proj", config, has_bias=config.patch_bias)
    if config.positions_per_side is not None:
        yield "pos_embed.weight", (config.positions_per_side**2, size)
    for index in range(config.num_blocks):
        yield from block_tensors(f"blocks.{index}", config, is_fused=True)
    mergers = {"merger": size}
    mergers |= {f"deepstack_merger_list.{index}": config.merged_size for index in range(len(config.deepstack_blocks))}
    inner = Shared(config.merged_size)
    for merger, norm_size in mergers.items():
        yield from norm_tensors(f"{merger}.norm", norm_size, has_bias=not config.is_rms)
        yield from linear_tensors(f"{merger}.linear_fc1", inner, config.merged_size)
        yield from linear_tensors(f"{merger}.linear_fc2", config.out_hidden_size, inner)


def _siglip_tower(config: VisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "each patch has a learned position"
    yield from patches_tensors("patch_embed.proj", config, has_bias=True)
    yield "pos_embed.weight", (side**2, size)
    for index in range(config.num_blocks):
        yield from block_tensors(f"blocks.{index}", config, is_fused=False)
    yield from norm_tensors("norm", size, has_bias=True)


def _siglip(config: SiglipConfig) -> Tensors:
    yield from _siglip_tower(config)
    yield from norm_tensors("projector.norm", config.hidden_size)
    yield "projector.linear.weight", (config.hidden_size, config.out_hidden_size)


def _merging_siglip(config: MergingConfig) -> Tensors:
    yield from _siglip_tower(config)
    yield from _merging_projector(config)


def _clip(config: ClipVisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "each patch has a learned position"
    yield from patches_tensors("patch_embed.proj", config, has_bias=config.patch_bias)
    yield "pos_embed.weight", (side**2 + config.num_firsts, size)
    if config.has_first:
        yield "first.weight", (size,)
        yield from norm_tensors("first_norm", size, has_bias=True)
    for index in range(config.num_blocks):
        yield from block_tensors(f"blocks.{index}", config, is_fused=False)
    yield from _merging_projector(config)
    if config.largest_canvas is not None:
        yield "newline.weight", (config.out_hidden_size,)


def _minicpm(config: MiniCPMVisionConfig) -> Tensors:
    yield from _siglip_tower(config)
    if config.window_block is not None:
        size, heads = config.hidden_size, Shared(config.num_heads, config.head_dim)
        inner = Shared(4 * config.intermediate_size)
        yield from norm_tensors("window_merger.norm1", size, has_bias=True)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from linear_tensors(f"window_merger.attn.{name}", heads, size)
        yield from linear_tensors("window_merger.attn.proj", size, heads)
        yield from norm_tensors("window_merger.norm2", config.merged_size, has_bias=True)
        yield from linear_tensors("window_merger.mlp.linear_1", inner, config.merged_size)
        yield from linear_tensors("window_merger.mlp.linear_fc2", size, inner)
    yield from _merging_projector(config)


def _moon(config: MoonVisionConfig | CropVisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "positions form a square"
    yield from patches_tensors("patch_embed.proj", config, has_bias=True)
    is_square = isinstance(config, MoonVisionConfig)
    yield "positions.weight", (side, side, size) if is_square else (1, side**2, size)
    for index in range(config.num_blocks):
        yield from block_tensors(f"blocks.{index}", config, is_fused=True)
    yield from norm_tensors("norm", size, has_bias=True)
    yield from _merging_projector(config)


def _llama4(config: Llama4VisionConfig) -> Tensors:
    size, side, width = config.hidden_size, config.positions_per_side, config.projector_size
    assert side is not None and width is not None, "there are learned positions and an MLP"
    yield from patches_tensors("patch_embed.proj", config, has_bias=False)
    yield "last.weight", (size,)
    yield "positions.weight", (side**2 + 1, size)
    yield from norm_tensors("first_norm", size, has_bias=True)
    for index in range(config.num_blocks):
        yield from block_tensors(f"blocks.{index}", config, is_fused=False)
    yield from norm_tensors("norm", size, has_bias=True)
    yield from linear_tensors("projector.linear_fc1", Shared(width), config.merged_size, has_bias=False)
    yield from linear_tensors("projector.linear_fc2", width, Shared(width), has_bias=False)
    yield from linear_tensors("projector.linear", config.out_hidden_size, width, has_bias=False)


def _merging_projector(config: MergingConfig) -> Tensors:
    if config.projector_eps is not None:
        size = config.merged_size if config.is_norm_merged else config.hidden_size
        yield from norm_tensors("projector.norm", size, has_bias=True)
    if config.projector_size is None:
        yield from linear_tensors("projector.projection", config.out_hidden_size, config.merged_size, has_bias=False)
        return
    width, has_bias = Shared(config.projector_size), config.projector_bias
    inputs = Shared(config.projector_size, 2) if config.is_projector_gated else width
    yield from linear_tensors("projector.projection.linear_1", inputs, config.merged_size, has_bias=has_bias)
    yield from linear_tensors("projector.projection.linear_fc2", config.out_hidden_size, width, has_bias=has_bias)


def _intern(config: InternVisionConfig) -> Tensors:
    size, side, inner = config.hidden_size, config.positions_per_side, Shared(config.intermediate_size)
    heads = Shared(config.num_heads, config.head_dim)
    assert side is not None, "each patch has a learned position"
    yield from patches_tensors("patch_embed.proj", config, has_bias=True)
    yield "first.weight", (1, 1, size)
    yield "positions.weight", (1, side**2 + 1, size)
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        for name in ("norm1", "norm2"):
            yield from norm_tensors(f"{block}.{name}", size, has_bias=not config.is_rms)
        for name in ("scale1", "scale2"):
            yield from norm_tensors(f"{block}.{name}", size)
        for name in ("q_proj", "k_proj", "v_proj"):
            # Queries and keys that are normalised over all heads are whole on every rank.
            rows = size if config.is_qk_normed and name != "v_proj" else heads
            yield from linear_tensors(f"{block}.attn.{name}", rows, size, has_bias=config.has_qkv_bias)
        for name in ("q_norm", "k_norm") if config.is_qk_normed else ():
            yield from norm_tensors(f"{block}.attn.{name}", size)
        yield from linear_tensors(f"{block}.attn.proj", size, heads)
        yield from linear_tensors(f"{block}.mlp.linear_fc1", inner, size)
        yield from linear_tensors(f"{block}.mlp.linear_fc2", size, inner)
    if config.has_norm:
        yield from norm_tensors("norm", size, has_bias=True)
    yield from _merging_projector(config)


def _lfm3(config: Lfm3VisionConfig) -> Tensors:
    size, inner, channels = config.hidden_size, Shared(config.intermediate_size), Shared(config.hidden_size)
    heads = Shared(config.num_heads, config.head_dim)
    key_heads = KeyHeads(config.num_heads, config.num_kv_heads, config.head_dim)
    yield from patches_tensors("patch_embed.proj", config, has_bias=False)
    yield from norm_tensors("first_norm", size)
    for index in range(config.num_blocks):
        block = f"blocks.{index}"
        for name in ("norm1", "norm2"):
            yield from norm_tensors(f"{block}.{name}", size)
        if index in config.attention_blocks:
            for name, rows in (("q_proj", heads), ("k_proj", key_heads), ("v_proj", key_heads)):
                yield from linear_tensors(f"{block}.attn.{name}", rows, size, has_bias=False)
            for name in ("q_norm", "k_norm"):
                yield from norm_tensors(f"{block}.attn.{name}", config.head_dim)
            yield from linear_tensors(f"{block}.attn.proj", size, heads, has_bias=False)
        else:
            yield from linear_tensors(f"{block}.conv.in_proj", Shared(size, 3), size, has_bias=False)
            yield f"{block}.conv.filter.weight", (channels, 1, config.conv_size, config.conv_size)
            yield from linear_tensors(f"{block}.conv.proj", size, channels, has_bias=False)
        for name in config.mlp_inputs:
            yield from linear_tensors(f"{block}.mlp.{name}", inner, size, has_bias=False)
        yield from linear_tensors(f"{block}.mlp.linear_fc2", size, inner, has_bias=False)
    yield from _merging_projector(config)


def _glm(config: GlmVisionConfig) -> Tensors:
    size, out_size = config.hidden_size, config.out_hidden_size
    heads, inner, has_bias = config.num_heads, Shared(config.intermediate_size), config.has_bias
    yield from patches_tensors("patch_embed.proj", config, has_bias=True)
    if config.positions_per_side is not None:
        yield from norm_tensors("first_norm", size)
        yield "pos_embed.weight", (config.positions_per_side**2, size)
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        for name in ("norm1", "norm2"):
            yield from norm_tensors(f"{block}.{name}", size)
        yield from linear_tensors(
            f"{block}.attn.qkv", Shared(heads, 3 * config.head_dim), size, has_bias=config.has_qkv_bias
        )
        for name in ("q_norm", "k_norm") if config.is_qk_normed else ():
            yield from norm_tensors(f"{block}.attn.{name}", config.head_dim)
        yield from linear_tensors(f"{block}.attn.proj", size, Shared(heads, config.head_dim), has_bias=has_bias)
        for name in config.mlp_inputs:
            yield from linear_tensors(f"{block}.mlp.{name}", inner, size, has_bias=has_bias)
        yield from linear_tensors(f"{block}.mlp.linear_fc2", size, inner, has_bias=has_bias)
    yield from norm_tensors("last_norm", size)
    yield "merger.downsample.weight", (out_size, size, config.merge_size, config.merge_size)
    yield "merger.downsample.bias", (out_size,)
    yield from linear_tensors("merger.proj", out_size, out_size, has_bias=False)
    yield from norm_tensors("merger.norm", out_size, has_bias=True)
    for name in ("gate_proj", "up_proj"):
        yield from linear_tensors(f"merger.{name}", Shared(config.merger_size), out_size, has_bias=False)
    yield from linear_tensors("merger.linear_fc2", out_size, Shared(config.merger_size), has_bias=False)


def _pixtral(config: PixtralConfig) -> Tensors:
    size, inner = config.hidden_size, Shared(config.intermediate_size)
    heads = Shared(config.num_heads, config.head_dim)
    yield from patches_tensors("patch_conv", config, has_bias=False)
    yield from norm_tensors("ln_pre", size)
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        yield from norm_tensors(f"{block}.norm1", size)
        yield from norm_tensors(f"{block}.norm2", size)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from linear_tensors(f"{block}.attn.{name}", heads, size, has_bias=False)
        yield from linear_tensors(f"{block}.attn.proj", size, heads, has_bias=False)
        for name in config.mlp_inputs:
            yield from linear_tensors(f"{block}.feed_forward.{name}", inner, size, has_bias=False)
        yield from linear_tensors(f"{block}.feed_forward.linear_fc2", size, inner, has_bias=False)
    if config.projector_eps is not None:
        yield from norm_tensors("projector.norm", size)
        yield from linear_tensors("projector.merging_layer", size, config.merged_size, has_bias=False)
    width = Shared(config.out_hidden_size)
    yield from linear_tensors("projector.linear_1", width, size, has_bias=config.projector_bias)
    yield from linear_tensors("projector.linear_fc2", config.out_hidden_size, width, has_bias=config.projector_bias)


def _gemma4(config: Gemma4VisionConfig) -> Tensors:
    size, inner = config.hidden_size, Shared(config.intermediate_size)
    heads = Shared(config.num_heads, config.head_dim)
    yield from patches_tensors("patch_embed.proj", config, has_bias=False)
    yield "patch_embed.positions.weight", (2, config.num_positions, size)
    products: dict[str, tuple[Dimension, Dimension]] = {
        **{f"attn.{name}": (heads, size) for name in ("q_proj", "k_proj", "v_proj")},
        "attn.o_proj": (size, heads),
        **{f"mlp.{name}": (inner, size) for name in config.mlp_inputs},
        "mlp.down_proj": (size, inner),
    }
    for block in (f"blocks.{index}" for index in range(config.num_blocks)):
        for name in ("norm1", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield from norm_tensors(f"{block}.{name}", size)
        for name in ("q_norm", "k_norm"):
            yield from norm_tensors(f"{block}.attn.{name}", config.head_dim)
        for name, shape in products.items():
            yield f"{block}.{name}.linear.weight", shape
            for bound in CLIP_BOUNDS if config.is_clipped else ():
                yield f"{block}.{name}.{bound}", ()
    if config.is_standardized:
        yield "standard.std_bias", (size,)
        yield "standard.std_scale", (size,)
    yield "projector.weight", (config.out_hidden_size, size)


def _blip(config: BlipVisionConfig) -> Tensors:
    size, side = config.hidden_size, config.positions_per_side
    assert side is not None, "each patch has a learned position"
    yield from patches_tensors("patch_embed.proj", config, has_bias=True)
    yield "first.weight", (1, 1, size)
    yield "positions.weight", (1, side**2 + 1, size)
    for index in range(config.num_blocks):
        yield from block_tensors(f"blocks.{index}", config, is_fused=True)
    yield from norm_tensors("norm", size, has_bias=True)
