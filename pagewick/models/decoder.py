"""The LLaMA-family decoder: embedding, blocks of attention and gated MLP, norm, vocabulary head.

Module names are checkpoint names. A family differs by the fields of DecoderConfig; it never appears here by name.
T: tokens of all sequences of a batch, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from pagewick.layers.activation import SiluAndMul
from pagewick.layers.attention import Attention, AttentionBatch
from pagewick.layers.context import LayerContext
from pagewick.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from pagewick.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from pagewick.layers.norm import RMSNorm
from pagewick.layers.rotary import CosSin, RotaryEmbedding
from pagewick.models.config import ModelConfig


class DecoderBatch(AttentionBatch, Protocol):
    """input_ids: [T]. positions: [P, T], P = 1 unless the rotary embedding has several axes."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What may differ between families, besides the numbers in ModelConfig.

    qk_norm: queries and keys are normalised per head before the rotation.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class DecoderAttention(nn.Module):
    """Self-attention: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, model: ModelConfig, config: DecoderConfig) -> None:
        super().__init__()
        head_dim, hidden_size = model.head_dim, model.hidden_size
        self.qkv_proj = QKVParallelLinear(
            context, prefix, hidden_size, head_dim, model.num_heads, model.num_kv_heads, bias=config.qkv_bias
        )
        self.o_proj = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            model.num_heads * head_dim,
            hidden_size,
            bias=config.o_bias,
            multiple=head_dim,
        )
        self.q_norm = RMSNorm(context, head_dim, model.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(context, head_dim, model.rms_norm_eps) if config.qk_norm else None
        self._norm_eps = model.rms_norm_eps
        self.attn = Attention(
            context, self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, softmax_scale=head_dim**-0.5
        )

    def forward(self, hidden_states: Tensor, cos_sin: CosSin, batch: AttentionBatch) -> Tensor:
        cos, sin = cos_sin
        attended: Tensor = self.attn.forward_fused(
            self.qkv_proj(hidden_states),
            batch,
            cos=cos,
            sin=sin,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            norm_eps=self._norm_eps,
        )
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]


class DecoderMLP(nn.Module):
    """Gated feed-forward: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, prefix: str, model: ModelConfig, config: DecoderConfig) -> None:
        super().__init__()
        inner, hidden_size = model.intermediate_size, model.hidden_size
        self.gate_up_proj = MergedColumnParallelLinear(
            context, prefix, hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias
        )
        self.down_proj = RowParallelLinear(context, f"{prefix}.down_proj", inner, hidden_size, bias=config.mlp_bias)
        self.act_fn = SiluAndMul()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden_states)))  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    """norm, attention, add; norm, MLP, add. The additions are fused into the norms that follow them."""

    def __init__(self, context: LayerContext, prefix: str, model: ModelConfig, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(context, model.hidden_size, model.rms_norm_eps)
        self.self_attn = DecoderAttention(context, f"{prefix}.self_attn", model, config)
        self.post_attention_layernorm = RMSNorm(context, model.hidden_size, model.rms_norm_eps)
        self.mlp = DecoderMLP(context, f"{prefix}.mlp", model, config)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, cos_sin: CosSin, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            normed, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        attended = self.self_attn(normed, cos_sin, batch)
        normed, residual = self.post_attention_layernorm.add_and_norm(attended, residual)
        return self.mlp(normed), residual


class DecoderStack(nn.Module):
    """Token ids to normalised hidden states: [T] -> [T, hidden_size]."""

    def __init__(self, context: LayerContext, model: ModelConfig, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            context, model.vocab_size, model.hidden_size, is_head=model.tie_word_embeddings
        )
        self.rotary = RotaryEmbedding(context, model.rope, model.head_dim)
        self.layers = nn.ModuleList(
            DecoderBlock(context, f"model.layers.{layer_idx}", model, config) for layer_idx in range(model.num_layers)
        )
        self.norm = RMSNorm(context, model.hidden_size, model.rms_norm_eps)

    def forward(self, batch: DecoderBatch) -> Tensor:
        hidden_states = self.embed_tokens(batch.input_ids)
        cos_sin = self.rotary(batch.positions[0])
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, cos_sin, batch)
        assert residual is not None, "a model has at least one layer"
        normed, _ = self.norm.add_and_norm(hidden_states, residual)
        return normed


class Decoder(nn.Module):
    """A causal language model. Subclasses say what differs, by `decoder_config`."""

    def __init__(self, context: LayerContext, model: ModelConfig) -> None:
        super().__init__()
        # Checkpoint tensors that are not wanted: old ones hold what is computed here.
        self.ignored_weights: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
        self.model = DecoderStack(context, model, self.decoder_config(model))
        self.lm_head: VocabParallelHead | None = None
        if not model.tie_word_embeddings:
            self.lm_head = VocabParallelHead(context, "lm_head", model.hidden_size, model.vocab_size)
        else:
            self.ignored_weights += (r"lm_head\.weight",)

    @classmethod
    def decoder_config(cls, model: ModelConfig) -> DecoderConfig:
        return DecoderConfig()

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Hidden states [T, hidden_size] of every token of the batch."""
        return self.model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [N, vocab_size] in float32 for the rows [N, hidden_size] that are wanted."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden_states)
