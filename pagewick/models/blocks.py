"""The decoder's layers: attention, MLP, and the ways in which they follow each other (config.Block).

A block takes hidden states and a residual that has not been added to them yet, and returns such a pair: each addition
is fused into the norm that follows it. T: tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.layers.attention import (
    Attention,
    AttentionBatch,
    BorrowedAttention,
    HeadOptions,
    HeadSinks,
    Rotation,
)
from pagewick.layers.config import MlaConfig
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.distance_bias import DistanceBias
from pagewick.layers.elementwise import Activation, add, scale, sigmoid_gate
from pagewick.layers.gated_delta import GatedDeltaNet
from pagewick.layers.latent_attention import LatentAttention
from pagewick.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from pagewick.layers.moe import MoeLayer
from pagewick.layers.norm import (
    HeadNorm,
    HeadNorms,
    JointHeadNorm,
    LayerNorm,
    RMSNorm,
    norm_jointly,
    plain_head_norm,
)
from pagewick.layers.rotary import Angles
from pagewick.models.config import ModelConfig
from pagewick.models.parts import NORMS_OF_BLOCK, AttentionConfig, HeadNormConfig, LayerConfig, MlpConfig


def make_norm(context: LayerContext, config: ModelConfig) -> RMSNorm | LayerNorm:
    """The model's kind of norm over hidden states."""
    norm = config.norm
    if norm.kind == "layer":
        return LayerNorm(context, config.hidden_size, norm.eps, has_bias=norm.has_bias)
    return RMSNorm(context, config.hidden_size, norm.eps, offset=norm.offset)


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
            has_gates=config.has_gate,
        )
        self.o_proj = RowParallelLinear(
            context, f"{prefix}.o_proj", config.num_heads * head_dim, hidden_size, bias=config.o_bias, multiple=head_dim
        )
        self.q_norm: HeadNorm | JointHeadNorm | None = None
        self.k_norm: HeadNorm | JointHeadNorm | None = None
        ours, has_keys = self.qkv_proj, layer.lender is None
        if config.head_norm is not None:
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
        self._collectives = context.collectives
        self._row_sizes = [head_dim * heads for heads in (ours.num_heads, ours.num_kv_heads, ours.num_kv_heads)]
        self.sinks = HeadSinks(context, ours.heads, config.num_heads) if config.has_sinks else None
        self._is_interleaved = layer.rope is not None and layer.rope.interleaved
        # Not a submodule: it is the model's.
        self._distances: tuple[DistanceBias, ...] = ()
        self._head_dim, self._softmax_scale = head_dim, config.softmax_scale
        self.attn: Attention | BorrowedAttention = BorrowedAttention()
        if not has_keys:
            return
        self.attn = Attention(
            context,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            config.softmax_scale,
            window=layer.window,
            logit_soft_cap=config.logit_soft_cap,
            sinks=None if self.sinks is None else self.sinks.weight,
            sees_images_whole=config.sees_images_whole,
            sees_all=config.sees_all,
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

    def forward(self, hidden_states: Tensor, angles: Angles | None, batch: AttentionBatch) -> Tensor:
        heads = HeadOptions(
            rotation=None if angles is None else Rotation(angles.cos, angles.sin, self._is_interleaved),
            q_norm=self.q_norm.kernel if isinstance(self.q_norm, HeadNorm) else None,
            k_norm=self.k_norm.kernel if isinstance(self.k_norm, HeadNorm) else None,
            v_norm=self._v_norm,
            q_scales=None if angles is None else angles.q_scales,
        )
        qkv: Tensor = self.qkv_proj(hidden_states, batch)
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
        else:
            attended = self.attn.forward_fused(qkv, batch, heads).flatten(1)
        if gates is not None:
            attended = sigmoid_gate(attended, gates)
        return self.o_proj(attended, batch)  # type: ignore[no-any-return]


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
        context, head_dim, config.eps, offset=config.offset, is_layer_norm=is_layer_norm, has_bias=config.has_bias
    )


class DecoderMLP(nn.Module):
    """Feed-forward, gated or not: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MlpConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            context,
            prefix,
            hidden_size,
            dict.fromkeys(config.input_projections, inner),
            bias=config.bias,
            fused_name="gate_up_proj" if config.is_fused else None,
        )
        self.down_proj = RowParallelLinear(context, f"{prefix}.down_proj", inner, hidden_size, bias=config.bias)
        self.act_fn = Activation(config.activation, is_gated=config.is_gated)

    def forward(self, hidden_states: Tensor, batch: LayerBatch | None) -> Tensor:
        activated = self.act_fn(self.gate_up_proj(hidden_states, batch))
        return self.down_proj(activated, batch)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention, MLP and the norms around them. layer: what differs from layer to layer."""

    input_layernorm: RMSNorm | LayerNorm
    post_attention_layernorm: RMSNorm | LayerNorm
    pre_feedforward_layernorm: RMSNorm | LayerNorm
    post_feedforward_layernorm: RMSNorm | LayerNorm

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        mixer: nn.Module
        if isinstance(layer.attention, AttentionConfig):
            mixer = DecoderAttention(context, f"{prefix}.self_attn", size, layer.attention, layer)
        elif isinstance(layer.attention, MlaConfig):
            mixer = LatentAttention(context, f"{prefix}.self_attn", size, layer.attention)
        else:
            mixer = GatedDeltaNet(context, f"{prefix}.linear_attn", size, layer.attention)
        self._mixer_name = "linear_attn" if isinstance(mixer, GatedDeltaNet) else "self_attn"
        self.add_module(self._mixer_name, mixer)
        self.mlp: nn.Module
        if isinstance(layer.mlp, MlpConfig):
            self.mlp = DecoderMLP(context, f"{prefix}.mlp", size, layer.mlp)
        else:
            self.mlp = MoeLayer(context, f"{prefix}.mlp", size, layer.mlp)
        for name in NORMS_OF_BLOCK[config.block]:
            self.add_module(name, make_norm(context, config) if name in layer.norms(config.block) else nn.Identity())
        self._residual_scale = config.residual_scale

    @property
    def mixer(self) -> nn.Module:
        """The part in which tokens see each other: attention of some kind."""
        found: nn.Module = getattr(self, self._mixer_name)
        return found

    def scaled(self, x: Tensor) -> Tensor:
        """Scale the output of attention or MLP before it is added."""
        return x if self._residual_scale == 1.0 else scale(x, self._residual_scale)


class SequentialBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        attended = self.scaled(self.mixer(normed, angles, batch))
        normed, residual = self.post_attention_layernorm.add_and_norm(attended, residual)
        return self.scaled(self.mlp(normed, batch)), residual


class ParallelBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        return self.scaled(add(self.mixer(normed, angles, batch), self.mlp(normed, batch))), residual


class SandwichBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        attended = self.scaled(self.post_attention_layernorm(self.mixer(normed, angles, batch)))
        normed, residual = self.pre_feedforward_layernorm.add_and_norm(attended, residual)
        return self.scaled(self.post_feedforward_layernorm(self.mlp(normed, batch))), residual


class PostNormBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        whole = hidden_states if residual is None else add(hidden_states, residual)
        whole = add(self.scaled(self.post_attention_layernorm(self.mixer(whole, angles, batch))), whole)
        return self.scaled(self.post_feedforward_layernorm(self.mlp(whole, batch))), whole


class PostLNBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None]:
        assert residual is None, "a layer of this kind returns none"
        attended = self.scaled(self.mixer(hidden_states, angles, batch))
        normed, _ = self.post_attention_layernorm.add_and_norm(attended, hidden_states)
        output, _ = self.post_feedforward_layernorm.add_and_norm(self.scaled(self.mlp(normed, batch)), normed)
        return output, None


def add_and_norm(norm: RMSNorm | LayerNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (normed, x + residual); the first layer has no residual yet."""
    return (norm(x), x) if residual is None else norm.add_and_norm(x, residual)


BLOCKS: Final[dict[str, type[Block]]] = {
    "sequential": SequentialBlock,
    "parallel": ParallelBlock,
    "sandwich": SandwichBlock,
    "post_norm": PostNormBlock,
    "post_ln": PostLNBlock,
}
