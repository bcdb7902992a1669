"""A vision encoder: the pixels of one image to the decoder's inputs for its placeholder tokens.

Differences between families are data, in a VisionConfig. T: patches of the image, in the order of PatchOrder; N: rows
of the output, T / merge_size ** 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pagewick.layers.config import RopeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import Activation, add
from pagewick.layers.embedding import WholeEmbedding
from pagewick.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.patches import PatchAttention, PatchProjection, Rotation
from pagewick.layers.rotary import inverse_frequencies
from pagewick.models.vision.config import VisionConfig
from pagewick.models.vision.pixels import EncodedImage, PatchReader
from pagewick.models.vision.positions import PatchOrder, grid_taps, patch_order


class VisionMLP(nn.Module):
    """[..., in_size] -> [..., out_size] through `inner` numbers."""

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        in_size: int,
        inner: int,
        out_size: int,
        *,
        activation: str,
        inputs: Sequence[str] = ("linear_fc1",),
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.inputs = MergedColumnParallelLinear(context, prefix, in_size, dict.fromkeys(inputs, inner), bias=bias)
        self.act = Activation(activation, is_gated=len(inputs) > 1)
        self.linear_fc2 = RowParallelLinear(context, f"{prefix}.linear_fc2", inner, out_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.act(self.inputs(x)))  # type: ignore[no-any-return]


class PatchMerger(VisionMLP):
    """[T, hidden_size] -> [N, out_hidden_size]. is_norm_merged: patches are normalised together, after merging."""

    def __init__(self, context: LayerContext, prefix: str, config: VisionConfig, *, is_norm_merged: bool) -> None:
        size = config.merged_size
        super().__init__(context, prefix, size, size, config.out_hidden_size, activation="gelu")
        self.norm = make_norm(context, config, size if is_norm_merged else config.hidden_size)
        self._shapes = (-1, size if is_norm_merged else config.hidden_size), (-1, size)

    def forward(self, x: Tensor) -> Tensor:
        before, after = self._shapes
        return super().forward(self.norm(x.view(before)).view(after))


class VisionBlock(nn.Module):
    """h += attention(norm1(h)); h += mlp(norm2(h)): [T, hidden_size] -> [T, hidden_size].

    is_fused, bias, qkv_bias, head_norm_eps: see PatchAttention; MLPs have biases if `bias` is true.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        config: VisionConfig,
        *,
        is_fused: bool = True,
        bias: bool = True,
        qkv_bias: bool | None = None,
        head_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = make_norm(context, config, size)
        self.attn = PatchAttention(
            context,
            f"{prefix}.attn",
            size,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            bias=bias,
            qkv_bias=qkv_bias,
            is_fused=is_fused,
            head_norm_eps=head_norm_eps,
        )
        self.norm2 = make_norm(context, config, size)
        self.mlp = VisionMLP(
            context,
            f"{prefix}.mlp",
            size,
            config.intermediate_size,
            size,
            activation=config.activation,
            inputs=config.mlp_inputs,
            bias=bias,
        )

    def forward(self, x: Tensor, rotation: Rotation | None, cu_seqlens: Sequence[int]) -> Tensor:
        attended = self.attn(self.norm1(x), rotation, cu_seqlens)
        normed, x = self.norm2.add_and_norm(attended, x)
        return add(self.mlp(normed), x)


class PatchEmbedding(nn.Module):
    """Patches [T, numbers of a patch] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, config: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(
            context, f"{prefix}.proj", config.patch_shape, config.hidden_size, bias=config.patch_bias
        )

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)  # type: ignore[no-any-return]


class VisionEncoder(PatchReader):
    """The encoder of one image at a time: pixels [height, width, 3] uint8, on the model's device -> EncodedImage.

    Its modules have the names that most checkpoints give them, under `prefix`. use_pixels comes first.
    """

    def __init__(self, context: LayerContext, prefix: str, config: VisionConfig) -> None:
        super().__init__(context, config)
        self.patch_embed = PatchEmbedding(context, f"{prefix}.patch_embed", config)
        self.pos_embed: WholeEmbedding | None = None
        if config.positions_per_side is not None:
            num_positions = config.positions_per_side**2
            self.pos_embed = WholeEmbedding(context, f"{prefix}.pos_embed", num_positions, config.hidden_size)
        self.blocks = nn.ModuleList(
            VisionBlock(context, f"{prefix}.blocks.{index}", config) for index in range(config.num_blocks)
        )
        self.merger = PatchMerger(context, f"{prefix}.merger", config, is_norm_merged=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(context, f"{prefix}.deepstack_merger_list.{index}", config, is_norm_merged=True)
            for index in range(len(config.deepstack_blocks))
        )
        rope = RopeConfig(theta=config.rope_theta, kind="default", rotary_dim=config.head_dim // 2)
        self._frequencies = inverse_frequencies(rope).to(context.device)

    def forward(self, pixels: Tensor) -> EncodedImage:
        height, width, _ = pixels.shape
        num_rows, size = self.num_tokens(height, width), self.config.patch_size
        rows, columns = height // size, width // size
        order = patch_order(rows, columns, self.config.merge_size, self.config.window)
        place = self._to_device(order.rows * columns + order.columns)
        x = self.patch_embed(self._patches(pixels, place))
        if self.pos_embed is not None:
            x = add(x, self._positions(order, rows, columns))
        rotation = self._rotation(order, self._frequencies, self._frequencies)
        whole = (0, len(x))
        mergers = dict(zip(self.config.deepstack_blocks, self.deepstack_merger_list, strict=True))
        deepstack = []
        for index, block in enumerate(self.blocks):
            is_whole = self.config.window is None or index in self.config.full_blocks
            x = block(x, rotation, whole if is_whole else order.windows)
            if index in mergers:
                deepstack.append(mergers[index](x))
        merged = self.merger(x)
        if self.config.window is not None:
            merged = torch.empty_like(merged).index_copy_(0, self._to_device(order.tokens), merged)
        nothing = merged.new_empty(0, num_rows, merged.shape[-1])
        return EncodedImage(merged, torch.stack(deepstack) if deepstack else nothing)

    def _positions(self, order: PatchOrder, rows: int, columns: int) -> Tensor:
        """Return the learned positions, stretched over rows x columns patches: [T, hidden_size]."""
        side = self.config.positions_per_side
        assert self.pos_embed is not None and side is not None
        top, bottom, down = grid_taps(order.rows, rows, side)
        left, right, across = grid_taps(order.columns, columns, side)
        total = torch.zeros(len(top), self.config.hidden_size, device=self._device)
        for row, row_weight in ((top, 1 - down), (bottom, down)):
            for column, column_weight in ((left, 1 - across), (right, across)):
                weights = torch.from_numpy(row_weight * column_weight).to(self._device)
                total += self.pos_embed(self._to_device(row * side + column)) * weights.unsqueeze(1)
        return total.to(self._dtype)


def make_norm(context: LayerContext, config: VisionConfig, size: int) -> RMSNorm | LayerNorm:
    """Return a norm of the blocks' kind, of vectors of `size` numbers."""
    if config.is_rms:
        return RMSNorm(context, size, config.norm_eps)
    return LayerNorm(context, size, config.norm_eps, has_bias=True)
