"""The extended block (config.Block): experts beside the MLP, an input of the layer's own, and a factor at its end.

LayerInputs makes the inputs of all layers from tokens and their embeddings. T: tokens of a batch; H: hidden_size;
P: LayerInputsConfig.size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from pagewick.layers.attention import AttentionBatch
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import Activation, OutputScale, add, multiply, scale
from pagewick.layers.embedding import VocabParallelEmbedding
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.moe import MoeLayer
from pagewick.layers.norm import LayerNorm, RMSNorm
from pagewick.layers.rotary import Angles
from pagewick.models.blocks import BLOCKS, Block, add_and_norm, make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.parts import NORMS_OF_EXPERTS, LayerConfig, LayerInputsConfig


class LayerInputs(nn.Module):
    """Token ids [T] and their embeddings [T, H] -> [num_layers, T, P]: for each layer, half of it from each.

    is_image, [T] bool: where it is true, the token's id does not matter, and all have the row image_row of the table;
    None: there are no images.
    """

    def __init__(self, context: LayerContext, config: LayerInputsConfig, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        prefix, width = "model.layer_inputs", num_layers * config.size
        self.embed_tokens = VocabParallelEmbedding(context, f"{prefix}.embed_tokens", config.vocab_size, width)
        self.projection = ReplicatedLinear(context, f"{prefix}.projection", hidden_size, width)
        self.norm = RMSNorm(context, config.size, config.eps)
        self._size, self._image_row = config.size, config.image_row
        self._projection_scale = float(hidden_size) ** -0.5
        self._embedding_scale = float(torch.tensor(config.size**0.5, dtype=context.dtype))

    def forward(self, token_ids: Tensor, embedded: Tensor, batch: LayerBatch, is_image: Tensor | None = None) -> Tensor:
        if is_image is not None:
            token_ids = token_ids.masked_fill(is_image, self._image_row)
        looked_up = scale(self.embed_tokens(token_ids), self._embedding_scale)
        projected = scale(self.projection(embedded, batch), self._projection_scale)
        normed: Tensor = self.norm(projected.view(len(embedded), -1, self._size)).flatten(-2)
        return scale(add(normed, looked_up), 2.0**-0.5).view(len(embedded), -1, self._size).transpose(0, 1)


class LayerInput(nn.Module):
    """Hidden states [T, H] and a layer's input [T, P] -> what is added to the hidden states."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, inputs: LayerInputsConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.gate_proj = ReplicatedLinear(context, f"{prefix}.gate_proj", size, inputs.size)
        self.projection = ReplicatedLinear(context, f"{prefix}.projection", inputs.size, size)
        self.norm = make_norm(context, config)
        self.act_fn = Activation(inputs.activation, is_gated=False)

    def forward(self, hidden_states: Tensor, own: Tensor, batch: LayerBatch) -> Tensor:
        gated = multiply(self.act_fn(self.gate_proj(hidden_states, batch)), own)
        return self.norm(self.projection(gated, batch))  # type: ignore[no-any-return]


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


ALL_BLOCKS: Final[dict[str, type[Block]]] = {**BLOCKS, "extended": ExtendedBlock}
