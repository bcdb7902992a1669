"""The extended block (config.Block): experts beside the MLP, an input of the layer's own, and a factor at its end.

T: tokens of a batch; P: LayerInputsConfig.size.
"""

from __future__ import annotations

from torch import Tensor

from pagewick.layers.attention import AttentionBatch
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import OutputScale, add
from pagewick.layers.moe import MoeLayer
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.rotary import Angles
from pagewick.models.blocks import Block, add_and_norm, make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.layer_inputs import LayerInput
from pagewick.models.parts import NORMS_OF_EXPERTS, LayerConfig


class ExtendedBlock(Block):
    """A sandwich with more in it."""

    post_feedforward_layernorm_1: RMSNorm | LayerNorm
    pre_feedforward_layernorm_2: RMSNorm | LayerNorm
    post_feedforward_layernorm_2: RMSNorm | LayerNorm

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(context, prefix, config, layer)
        self.mixture: MoeLayer | None = None
        if layer.experts is not None:
            self.mixture = MoeLayer(context, f"{prefix}.mixture", config.hidden_size, layer.experts)
            for name in NORMS_OF_EXPERTS:
                self.add_module(name, make_norm(context, config))
        self.layer_input: LayerInput | None = None
        if config.layer_inputs is not None:
            self.layer_input = LayerInput(context, f"{prefix}.layer_input", config, config.layer_inputs)
        self.layer_scalar = OutputScale(context)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        angles: Angles | None,
        batch: AttentionBatch,
        own: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """own: the layer's input [T, P], if the model has such inputs. Nothing is left to be added."""
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        attended = self.post_attention_layernorm(self.mixer(normed, angles, batch))
        normed, residual = self.pre_feedforward_layernorm.add_and_norm(attended, residual)
        fed = self.mlp(normed, batch)
        if self.mixture is not None:
            mixed = self.mixture(self.pre_feedforward_layernorm_2(residual), batch, router_input=residual)
            fed = add(self.post_feedforward_layernorm_1(fed), self.post_feedforward_layernorm_2(mixed))
        hidden_states = add(self.post_feedforward_layernorm(fed), residual)
        if self.layer_input is not None:
            assert own is not None, "the model makes an input for each layer"
            hidden_states = add(hidden_states, self.layer_input(hidden_states, own, batch))
        return self.layer_scalar(hidden_states), None
