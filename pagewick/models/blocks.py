"""The decoder's layers: attention, MLP, and the ways in which they follow each other (config.Block).

A block takes hidden states and a residual that has not been added to them yet, and returns such a pair: each addition
is fused into the norm that follows it. T: tokens of a batch.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from pagewick.layers.attention import AttentionBatch
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import Activation, Xielu, add, scale
from pagewick.layers.gated_norm import GatedNorm
from pagewick.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from pagewick.layers.mamba import MambaMixer
from pagewick.layers.moe import MoeLayer
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.rotary import Angles
from pagewick.layers.sparse_activation import SparseActivation
from pagewick.models.config import ModelConfig
from pagewick.models.image_attention import ImageAttention
from pagewick.models.mixers import MIXER_NAMES, DecoderAttention, make_mixer
from pagewick.models.parts import NORMS_OF_BLOCK, XIELU, LayerConfig, MlpConfig


def make_norm(context: LayerContext, config: ModelConfig) -> RMSNorm | LayerNorm:
    """The model's kind of norm over hidden states."""
    norm, size = config.norm, config.hidden_size
    if norm.kind == "layer":
        return LayerNorm(
            context, size, norm.eps, has_bias=norm.has_bias, offset=norm.offset, has_weight=norm.has_weight
        )
    return RMSNorm(context, size, norm.eps, offset=norm.offset, has_weight=norm.has_weight)


def _norm_of(context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> nn.Module:
    """The norm of a layer whose name is the last part of prefix; one that the layer lacks changes nothing."""
    name = prefix.rpartition(".")[2]
    if name not in layer.norms(config.block):
        return nn.Identity()
    if name in layer.gated_norms:
        assert config.norm.gate_rank is not None, "the model says the rank of gates"
        return GatedNorm(context, prefix, config.hidden_size, config.norm.eps, config.norm.gate_rank)
    return make_norm(context, config)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else scale(x, factor)


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
        self.act_fn = make_activation(context, config)
        self._scales = config.in_scale, config.out_scale

    def forward(self, hidden_states: Tensor, batch: LayerBatch | None) -> Tensor:
        before, after = self._scales
        activated = self.act_fn(self.gate_up_proj(scaled(hidden_states, before), batch))
        return scaled(self.down_proj(activated, batch), after)


def make_activation(context: LayerContext, config: MlpConfig) -> Activation | SparseActivation | Xielu:
    if config.sparsity:
        assert config.is_gated, "the gates are what is sparse"
        return SparseActivation(context, config.activation, config.sparsity, config.intermediate_size)
    if config.activation == XIELU:
        assert not config.is_gated, "it is no gate"
        return Xielu(context)
    return Activation(config.activation, is_gated=config.is_gated)


class Block(nn.Module):
    """One layer: attention, MLP and the norms around them. layer: what differs from layer to layer."""

    input_layernorm: RMSNorm | LayerNorm | GatedNorm
    post_attention_layernorm: RMSNorm | LayerNorm | GatedNorm
    pre_feedforward_layernorm: RMSNorm | LayerNorm
    post_feedforward_layernorm: RMSNorm | LayerNorm
    post_image_layernorm: RMSNorm | LayerNorm

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self._mixer_name = ""
        if layer.attention is not None:
            self._mixer_name = MIXER_NAMES[type(layer.attention)]
            self.add_module(self._mixer_name, make_mixer(context, f"{prefix}.{self._mixer_name}", size, layer))
        self._beside_scales = 1.0, 1.0
        if layer.beside is not None:
            self._beside_scales = layer.beside.attention_scale, layer.beside.scale
            self.mamba = MambaMixer(context, f"{prefix}.mamba", size, layer.beside.mamba)
        self._has_beside = layer.beside is not None
        self.mlp: nn.Module = nn.Identity()
        if isinstance(layer.mlp, MlpConfig):
            self.mlp = DecoderMLP(context, f"{prefix}.mlp", size, layer.mlp)
        elif layer.mlp is not None:
            self.mlp = MoeLayer(context, f"{prefix}.mlp", size, layer.mlp)
        self._has_mlp = layer.mlp is not None
        for name in NORMS_OF_BLOCK[layer.block or config.block]:
            self.add_module(name, _norm_of(context, f"{prefix}.{name}", config, layer))
        self._residual_scale = config.residual_scale

    @property
    def has_mixer(self) -> bool:
        return bool(self._mixer_name)

    @property
    def mixer(self) -> nn.Module:
        """The part in which tokens see each other: attention of some kind."""
        found: nn.Module = getattr(self, self._mixer_name)
        return found

    def mixed(self, hidden_states: Tensor, angles: Angles | None, batch: AttentionBatch) -> Tensor:
        """Return the output of the mixer, and of Mamba beside it if there is any."""
        output: Tensor = self.mixer(hidden_states, angles, batch)
        if not self._has_beside:
            return output
        of_attention, of_mamba = self._beside_scales
        return add(scaled(output, of_attention), scaled(self.mamba(hidden_states, angles, batch), of_mamba))

    def scaled(self, x: Tensor) -> Tensor:
        """Scale the output of attention or MLP before it is added."""
        return scaled(x, self._residual_scale)


class SequentialBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        if self.has_mixer:
            normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
            hidden_states = self.scaled(self.mixed(normed, angles, batch))
            if not self._has_mlp:
                return hidden_states, residual
        normed, residual = add_and_norm(self.post_attention_layernorm, hidden_states, residual)
        return self.scaled(self.mlp(normed, batch)), residual


class ParallelBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        return self.scaled(add(self.mixer(normed, angles, batch), self.mlp(normed, batch))), residual


class ParallelNormsBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        attended = self.mixer(normed, angles, batch)
        return self.scaled(add(attended, self.mlp(self.post_attention_layernorm(residual), batch))), residual


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


class PostMlpBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        attended = self.scaled(self.mixer(normed, angles, batch))
        normed, residual = self.post_attention_layernorm.add_and_norm(attended, residual)
        return self.scaled(self.post_feedforward_layernorm(self.mlp(normed, batch))), residual


class PostLNBlock(Block):
    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None]:
        assert residual is None, "a layer of this kind returns none"
        attended = self.scaled(self.mixer(hidden_states, angles, batch))
        normed, _ = self.post_attention_layernorm.add_and_norm(attended, hidden_states)
        output, _ = self.post_feedforward_layernorm.add_and_norm(self.scaled(self.mlp(normed, batch)), normed)
        return output, None


class CaptioningBlock(Block):
    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(context, prefix, config, layer)
        assert isinstance(self.mixer, DecoderAttention), "a text attends to itself, too"
        self.image_attn = ImageAttention(context, f"{prefix}.image_attn", config.hidden_size, layer, self.mixer)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None]:
        assert residual is None, "a layer of this kind returns none"
        normed, _ = self.post_attention_layernorm.add_and_norm(self.mixer(hidden_states, angles, batch), hidden_states)
        normed, _ = self.post_image_layernorm.add_and_norm(self.image_attn(normed, batch), normed)
        output, _ = self.post_feedforward_layernorm.add_and_norm(self.mlp(normed, batch), normed)
        return output, None


def add_and_norm(norm: RMSNorm | LayerNorm | GatedNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (normed, x + residual); the first layer has no residual yet."""
    return (norm(x), x) if residual is None else norm.add_and_norm(x, residual)


BLOCKS: Final[dict[str, type[Block]]] = {
    "sequential": SequentialBlock,
    "parallel": ParallelBlock,
    "parallel_norms": ParallelNormsBlock,
    "sandwich": SandwichBlock,
    "post_norm": PostNormBlock,
    "post_mlp": PostMlpBlock,
    "post_ln": PostLNBlock,
    "captioning": CaptioningBlock,
}
