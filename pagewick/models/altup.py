"""The block with AltUp (config.Block): layers that compute with one of several residual streams and correct all.

T: tokens of a batch; H: hidden_size; N: streams beside the active one; P: LayerInputsConfig.size.
"""

from __future__ import annotations

from torch import Tensor

from pagewick.layers.altup import AltUp, Laurel
from pagewick.layers.context import BlockBatch, LayerContext
from pagewick.layers.elementwise import add, scale
from pagewick.layers.rotary import Angles
from pagewick.models.blocks import Block
from pagewick.models.config import ModelConfig
from pagewick.models.layer_inputs import LayerInput
from pagewick.models.parts import LayerConfig


class AltUpBlock(Block):
    """A sandwich over the active stream, with a learned residual connection beside attention."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(context, prefix, config, layer)
        assert config.altup is not None and config.layer_inputs is not None, "models with such blocks have both"
        size, eps, altup = config.hidden_size, config.norm.eps, config.altup
        self.altup = AltUp(context, f"{prefix}.altup", size, altup.num_streams, eps)
        self.laurel = Laurel(context, f"{prefix}.laurel", size, altup.laurel_rank, eps)
        self.layer_input = LayerInput(context, f"{prefix}.layer_input", config, config.layer_inputs)

    def forward(
        self, active: Tensor, others: Tensor, angles: Angles | None, batch: BlockBatch, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        """active: [T, H]; others: [T, N, H]; own: the layer's input [T, P]. Return the streams behind the layer."""
        active, others = self.altup.predict(active, others, batch)
        normed = self.input_layernorm(active)
        attended = self.post_attention_layernorm(self.mixer(normed, angles, batch))
        hidden_states = scale(add(add(active, attended), self.laurel(normed, batch)), 2.0**-0.5)
        fed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_states), batch))
        active, others = self.altup.correct(active, others, add(hidden_states, fed), batch)
        added = self.layer_input(self.altup.correct_output_scale(active), own, batch)
        return active, add(others, added.unsqueeze(1))
