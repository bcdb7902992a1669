"""The gated_streams block (config.Block): layers over several residual streams, of which each part reads a gated mean.

T: tokens of a batch; S: streams, side by side; H: hidden_size.
"""

from __future__ import annotations

from torch import Tensor

from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.elementwise import add
from pagewick.layers.gated_streams import GatedConnection
from pagewick.layers.ngrams import NgramLayer
from pagewick.layers.rotary import Angles
from pagewick.models.blocks import Block
from pagewick.models.config import ModelConfig
from pagewick.models.parts import LayerConfig


class GatedStreamsBlock(Block):
    """Attention and MLP, between gated connections in place of norms and residual additions.

    A layer may add what it knows of n-grams to the streams first.
    """

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(context, prefix, config, layer)
        assert config.gated_streams is not None, "models with such blocks have streams"
        self.ple: NgramLayer | None = None
        if layer.ngrams is not None:
            self.ple = NgramLayer(context, f"{prefix}.ple", layer.ngrams)
        self.attn_hyper_connection, self.mlp_hyper_connection = (
            GatedConnection(context, f"{prefix}.{part}_hyper_connection", config.hidden_size, config.gated_streams)
            for part in ("attn", "mlp")
        )

    def forward(self, streams: Tensor, residual: None, angles: Angles | None, batch: TokenBatch) -> tuple[Tensor, None]:
        """streams: [T, S * H]. Nothing is left to be added."""
        if self.ple is not None:
            streams = add(streams, self.ple(streams, batch))
        read, logits = self.attn_hyper_connection.read(streams, batch)
        streams = self.attn_hyper_connection.write(streams, self.mixer(read, angles, batch), logits)
        read, logits = self.mlp_hyper_connection.read(streams, batch)
        return self.mlp_hyper_connection.write(streams, self.mlp(read, batch), logits), None
