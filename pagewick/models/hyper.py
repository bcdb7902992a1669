"""The hyper block (config.Block): layers over several residual streams, which each of their parts mixes.

T: tokens of a batch; S: streams; H: hidden_size.
"""

from __future__ import annotations

from torch import Tensor

from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.hyper import HyperConnection
from pagewick.layers.moe import MoeLayer
from pagewick.layers.rotary import Angles
from pagewick.models.blocks import Block
from pagewick.models.config import ModelConfig
from pagewick.models.parts import LayerConfig


class HyperBlock(Block):
    """A sequential block in which hyper-connections stand in the place of residual additions."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(context, prefix, config, layer)
        assert config.hyper is not None, "models with such blocks have streams"
        self.attn_hc = HyperConnection(context, config.hidden_size, config.hyper)
        self.ffn_hc = HyperConnection(context, config.hidden_size, config.hyper)

    def forward(self, streams: Tensor, residual: None, angles: Angles | None, batch: TokenBatch) -> tuple[Tensor, None]:
        """streams: [T, S, H]. Nothing is left to be added."""
        read, weights = self.attn_hc.read(streams)
        streams = self.attn_hc.write(streams, self.mixer(self.input_layernorm(read), angles, batch), weights)
        read, weights = self.ffn_hc.read(streams)
        normed = self.post_attention_layernorm(read)
        is_mixture = isinstance(self.mlp, MoeLayer)
        fed = self.mlp(normed, batch, token_ids=batch.input_ids) if is_mixture else self.mlp(normed, batch)
        return self.ffn_hc.write(streams, fed, weights), None
