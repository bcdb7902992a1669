"""The parts of layers in which tokens see each other: attention of all kinds, and layers that keep a state.

T: tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.layers.attention import (
    Attention,
    BorrowedAttention,
    HeadOptions,
    HeadSinks,
    Rotation,
)
from pagewick.layers.block_index import BlockIndex
from pagewick.layers.channel_scan import ChannelScan
from pagewick.layers.compressed_config import WindowConfig
from pagewick.layers.config import MlaConfig
from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.distance_bias import DistanceBias
from pagewick.layers.elementwise import Activation, limit, multiply, scale, sigmoid_gate
from pagewick.layers.gated_delta import GatedDeltaNet
from pagewick.layers.head_blocks import HeadBlockIndexer
from pagewick.layers.head_gates import HeadGates
from pagewick.layers.image_attention import TextAttention
from pagewick.layers.latent_attention import LatentAttention
from pagewick.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from pagewick.layers.mamba import MambaMixer
from pagewick.layers.narrow_values import NarrowValues
from pagewick.layers.norm import (
    HeadNorm,
    HeadNorms,
    JointHeadNorm,
    norm_jointly,
    plain_head_norm,
)
from pagewick.layers.rotary import Angles
from pagewick.layers.short_convolution import ShortConvolution
from pagewick.layers.state import StateLayer
from pagewick.layers.state_config import ChannelScanConfig, ConvolutionConfig, DeltaConfig, MambaConfig, StateConfig
from pagewick.layers.window_attention import WindowAttention
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig

# Where some checkpoints keep constant scales for the KV cache, and for what: keys (0), values (1).
_KV_SCALES: dict[str, tuple[int, ...]] = {
    "kv_scale": (0, 1), "k_scale": (0,), "attn.k_scale": (0,), "k_proj.k_scale": (0,), "v_scale": (1,),
    "attn.v_scale": (1,), "v_proj.v_scale": (1,), "k_proj.output_scale": (0,), "v_proj.output_scale": (1,),
}  # fmt: skip


class DecoderAttention(nn.Module):
    """Self-attention: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, config: AttentionConfig, layer: LayerConfig
    ) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            context,
            prefix,
            hidden_size,
            head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.qkv_bias,
            layout=config.layout,
            value_dim=config.value_dim,
            has_gates=config.has_gate,
        )
        size = config.output_dim
        self.o_proj = RowParallelLinear(
            context, f"{prefix}.o_proj", config.num_heads * size, hidden_size, bias=config.o_bias, multiple=size
        )
        self.g_proj: ColumnParallelLinear | None = None
        if config.has_head_gates:
            num_heads = self.qkv_proj.num_heads
            self.g_proj = HeadGates(context, f"{prefix}.g_proj", hidden_size, config.num_heads, num_heads, head_dim)
        elif config.has_number_gates:
            self.g_proj = ColumnParallelLinear(
                context, f"{prefix}.g_proj", hidden_size, config.num_heads * head_dim, multiple=head_dim
            )
        self._softplus = Activation("softplus", is_gated=False) if config.has_softplus_gates else None
        self.q_norm: HeadNorm | JointHeadNorm | None = None
        self.k_norm: HeadNorm | JointHeadNorm | None = None
        ours, has_keys = self.qkv_proj, layer.lender is None
        # It applies to queries and keys, if their norm has no weight.
        self._plain_norm = None
        if config.head_norm is not None and not config.head_norm.has_weight:
            is_later = config.head_norm.is_after_rotation
            self._plain_norm = plain_head_norm(context, head_dim, config.head_norm.eps, is_after_rotation=is_later)
        elif config.head_norm is not None:
            earlier = ours.earlier_kv_heads
            self.q_norm = _head_norm(context, head_dim, config.head_norm, ours.heads, config.num_heads)
            if has_keys:
                self.k_norm = _head_norm(
                    context, head_dim, config.head_norm, ours.kv_heads, config.num_kv_heads, earlier
                )
        self._v_norm = None
        if config.has_value_norm and has_keys:
            assert config.head_norm is not None, "its eps is that of values"
            self._v_norm = plain_head_norm(context, head_dim, config.head_norm.eps)
        self._narrow: NarrowValues | None = None
        if size != head_dim:
            self._narrow = NarrowValues(context, ours.num_heads, ours.num_kv_heads, head_dim, size)
        self._value_scale, self._qkv_limit = config.value_scale, config.qkv_limit
        self._row_sizes = [head_dim * heads for heads in (ours.num_heads, ours.num_kv_heads, ours.num_kv_heads)]
        self.sinks = HeadSinks(context, ours.heads, config.num_heads) if config.has_sinks else None
        self._rotates, self._is_interleaved = layer.rope is not None, layer.rope is not None and layer.rope.interleaved
        # Not a submodule: it is the model's.
        self._distances: tuple[DistanceBias, ...] = ()
        self._collectives, self._head_dim, self._softmax_scale = context.collectives, head_dim, config.softmax_scale
        self.indexer = _index_of_blocks(context, prefix, hidden_size, config, layer, ours.kv_heads)
        self.attn: Attention | BorrowedAttention = BorrowedAttention()
        if not has_keys:
            return
        self.attn = _attention_of(layer)(
            context,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            config.softmax_scale,
            window=layer.window,
            is_chunked=layer.is_chunked,
            logit_soft_cap=config.logit_soft_cap,
            sinks=None if self.sinks is None else self.sinks.weight,
            sees_images_whole=config.sees_images_whole,
            sees_all=config.sees_all,
            is_selective=self.indexer is not None,
        )

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ()

    def optional_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, name) for name in _KV_SCALES if isinstance(self.attn, Attention))

    def borrow_from(self, lender: DecoderAttention) -> None:
        """Attend to the keys and values of an earlier layer. Called once, if this one has none."""
        assert isinstance(self.attn, BorrowedAttention) and isinstance(lender.attn, Attention)
        self.attn.borrow_from(lender.attn)

    def use_distances(self, bias: DistanceBias) -> None:
        """Add numbers for distances to the scores. Called once, in encoders without rotation and norms of heads."""
        self._distances = (bias,)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        if tensor.numel() != 1:
            raise ModelLoadError(f"its shape is {list(tensor.shape)}, and it must be one number")
        assert isinstance(self.attn, Attention), "others list no scales"
        for which in _KV_SCALES[name]:
            self.attn.kv_scales[which] = tensor.item()

    def forward(self, hidden_states: Tensor, angles: Angles | None, batch: TokenBatch) -> Tensor:
        rotation = None
        if angles is not None and self._rotates:
            rotation = Rotation(angles.cos, angles.sin, self._is_interleaved)
        heads = HeadOptions(
            rotation=rotation,
            q_norm=self.q_norm.kernel if isinstance(self.q_norm, HeadNorm) else self._plain_norm,
            k_norm=self.k_norm.kernel if isinstance(self.k_norm, HeadNorm) else self._plain_norm,
            v_norm=self._v_norm,
            q_scales=None if angles is None else angles.q_scales,
        )
        qkv: Tensor = self.qkv_proj(hidden_states, batch)
        if self._qkv_limit is not None:
            qkv = limit(qkv, self._qkv_limit)
        if self._narrow is not None:
            qkv = self._narrow.widened(qkv)
        gates: Tensor | None = None
        if num_gates := self.qkv_proj.num_gates:
            gates, qkv = qkv[:, :num_gates], qkv[:, num_gates:]
        if isinstance(self.q_norm, JointHeadNorm) and isinstance(self.k_norm, JointHeadNorm):
            q, k, _ = torch.split(qkv, self._row_sizes, dim=-1)
            norm_jointly((self.q_norm, self.k_norm), (q, k), self._collectives)
        if self._distances:
            parts = torch.split(qkv, self._row_sizes, dim=-1)
            q, k, v = (part.view(len(part), -1, self._head_dim) for part in parts)
            attended = self._distances[0].attend(q, k, v, batch, self._softmax_scale).flatten(1)
        elif self.indexer is not None:
            assert isinstance(self.attn, Attention) and rotation is not None, "its keys rotate"
            selected = self.indexer(hidden_states, rotation, batch)
            attended = self.attn.forward_selected(qkv, batch, heads, selected, self.indexer.ratio).flatten(1)
        else:
            attended = self.attn.forward_fused(qkv, batch, heads).flatten(1)
        if self._narrow is not None:
            attended = self._narrow.narrowed(attended)
        if self._value_scale != 1.0:
            # Outputs are sums of values.
            attended = scale(attended, self._value_scale)
        # engine/step_memory.py counts on it that their memory is free for the gates.
        del qkv
        if self.g_proj is not None:
            gates = self.g_proj(hidden_states, batch)
        if gates is not None and self._softplus is not None:
            gates = self._softplus(gates)
            attended = multiply(attended, gates)
        elif gates is not None:
            attended = sigmoid_gate(attended, gates)
        return self.o_proj(attended, batch)  # type: ignore[no-any-return]


def _attention_of(layer: LayerConfig) -> Callable[..., Attention]:
    if layer.image is None:
        return Attention
    return partial(TextAttention, num_image_tokens=layer.image.num_tokens, num_image_rows=layer.image.num_rows)


def _index_of_blocks(
    context: LayerContext,
    prefix: str,
    hidden_size: int,
    config: AttentionConfig,
    layer: LayerConfig,
    kv_heads: list[int],
) -> BlockIndex | HeadBlockIndexer | None:
    """Return what selects the blocks of tokens that each token sees, if anything does. kv_heads: ids of this rank's."""
    name = f"{prefix}.indexer"
    if config.head_blocks is not None:
        return HeadBlockIndexer(context, name, hidden_size, config.head_blocks, kv_heads, config.num_kv_heads)
    if config.block_index is None:
        return None
    assert layer.rope is not None, "its keys rotate"
    return BlockIndex(context, name, hidden_size, config.block_index, layer.rope)


def _head_norm(
    context: LayerContext,
    head_dim: int,
    config: HeadNormConfig,
    heads: list[int],
    total_num_heads: int,
    earlier: Collection[int] = (),
) -> HeadNorm | JointHeadNorm:
    if config.is_joint:
        return JointHeadNorm(
            context, head_dim, config.eps, heads=heads, total_num_heads=total_num_heads, earlier=earlier
        )
    is_layer_norm = config.kind == "layer"
    if config.is_per_head:
        return HeadNorms(
            context,
            head_dim,
            config.eps,
            heads=heads,
            total_num_heads=total_num_heads,
            is_layer_norm=is_layer_norm,
            is_matrix=config.is_matrix,
        )
    return HeadNorm(
        context,
        head_dim,
        config.eps,
        offset=config.offset,
        is_layer_norm=is_layer_norm,
        has_bias=config.has_bias,
        is_after_rotation=config.is_after_rotation,
    )


def lend(lender: nn.Module | None, borrower: nn.Module | None) -> None:
    """Let a layer attend to what an earlier one of its kind keeps of each token."""
    if isinstance(borrower, LatentAttention) and isinstance(lender, LatentAttention):
        borrower.borrow_from(lender)
    else:
        assert isinstance(borrower, DecoderAttention) and isinstance(lender, DecoderAttention)
        borrower.borrow_from(lender)


def share_indexers(mixers: Iterable[nn.Module | None]) -> None:
    """Let layers without an indexer, where others have one, see what the nearest before them selects."""
    indexer = None
    for mixer in mixers:
        if isinstance(mixer, LatentAttention):
            indexer = mixer.indexer or indexer
            if mixer.is_selective and mixer.indexer is None:
                assert indexer is not None, "the first layer has an indexer"
                mixer.select_as(indexer.lent)


# The name of a layer's part in which tokens see each other.
MIXER_NAMES: Final[dict[type, str]] = {
    AttentionConfig: "self_attn",
    MlaConfig: "self_attn",
    WindowConfig: "self_attn",
    DeltaConfig: "linear_attn",
    MambaConfig: "mamba",
    ConvolutionConfig: "short_conv",
    ChannelScanConfig: "mamba",
}


def make_mixer(context: LayerContext, prefix: str, hidden_size: int, layer: LayerConfig) -> nn.Module:
    attention = layer.attention
    if isinstance(attention, AttentionConfig):
        return DecoderAttention(context, prefix, hidden_size, attention, layer)
    if isinstance(attention, MlaConfig):
        return LatentAttention(context, prefix, hidden_size, attention)
    if isinstance(attention, WindowConfig):
        assert layer.rope is not None, "its keys rotate"
        return WindowAttention(context, prefix, hidden_size, attention, layer.rope)
    assert attention is not None, "a layer without attention has no such part"
    return _make_state_layer(context, prefix, hidden_size, attention)


def _make_state_layer(context: LayerContext, prefix: str, hidden_size: int, config: StateConfig) -> StateLayer:
    if isinstance(config, DeltaConfig):
        return GatedDeltaNet(context, prefix, hidden_size, config)
    if isinstance(config, MambaConfig):
        return MambaMixer(context, prefix, hidden_size, config)
    if isinstance(config, ChannelScanConfig):
        return ChannelScan(context, prefix, hidden_size, config)
    return ShortConvolution(context, prefix, hidden_size, config)
