"""Captions of images: attention of a text to its image in each layer, and the layer ahead of a tied head.

The source of the formulas are the classes BlipText* of transformers. I: tokens of images in a batch; T: all of its
tokens.
"""

from __future__ import annotations

from torch import Tensor, nn

from pagewick.layers.attention import AttentionBatch
from pagewick.layers.context import BlockBatch, LayerContext
from pagewick.layers.elementwise import Activation
from pagewick.layers.image_attention import TextAttention
from pagewick.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.models.mixers import DecoderAttention
from pagewick.models.parts import AttentionConfig, LayerConfig


class ImageAttention(nn.Module):
    """Attention of tokens of text to the image of their sequence: [N, hidden_size] -> [N, hidden_size].

    `store` comes first. own: the layer's attention of the text to itself, which has the cache.
    """

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, layer: LayerConfig, own: DecoderAttention
    ) -> None:
        super().__init__()
        config, image = layer.attention, layer.image
        assert isinstance(config, AttentionConfig) and image is not None, "the layer says so"
        assert config.num_heads == config.num_kv_heads, "each head has keys of its own"
        assert isinstance(own.attn, TextAttention), "its cache holds those of images, too"
        size, width = config.head_dim, config.num_heads * config.head_dim
        heads = config.num_heads, config.num_kv_heads
        self.q_proj = QKVParallelLinear(context, prefix, hidden_size, size, *heads, bias=True, layout="queries")
        self.kv_proj = MergedColumnParallelLinear(
            context, prefix, image.row_size, {"k_proj": width, "v_proj": width}, bias=True
        )
        self.o_proj = RowParallelLinear(context, f"{prefix}.o_proj", width, hidden_size, bias=True, multiple=size)
        # Not a submodule: it is the layer's.
        self._attention = (own.attn,)
        self._head_dim = size

    def store(self, rows: Tensor, is_image: Tensor, batch: AttentionBatch) -> None:
        """Store the keys and values of rows [I, row_size], those of the tokens for which is_image [T] is true."""
        k, v = self.kv_proj(rows).view(len(rows), 2, -1, self._head_dim).unbind(1)
        (attention,) = self._attention
        attention.store_image(k, v, batch.groups[attention.group].slot_mapping[is_image])

    def forward(self, hidden_states: Tensor, batch: BlockBatch) -> Tensor:
        attended = self._attention[0].forward_image(self.q_proj(hidden_states, batch), batch)
        return self.o_proj(attended.flatten(1), batch)  # type: ignore[no-any-return]


class HeadTransform(nn.Module):
    """The layer ahead of a tied head, norm(activation(W h + b)): [N, hidden_size] -> [N, hidden_size]."""

    def __init__(self, context: LayerContext, hidden_size: int, activation: str, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(context, "head_transform.dense", hidden_size, hidden_size, bias=True)
        self.act = Activation(activation, is_gated=False)
        self.norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(hidden_states)))  # type: ignore[no-any-return]
