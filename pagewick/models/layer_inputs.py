"""Inputs of each layer's own, made from tokens and their embeddings, and how a layer adds them to hidden states.

T: tokens of a batch; H: hidden_size; P: LayerInputsConfig.size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import Activation, add, multiply, scale
from pagewick.layers.embedding import VocabParallelEmbedding
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import RMSNorm
from pagewick.models.blocks import make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.parts import LayerInputsConfig


class LayerInputs(nn.Module):
    """Token ids [T] and their embeddings [T, H] -> [num_layers, T, P]: for each layer, half of it from each.

    is_image, [T] bool: where it is true, the token's id does not matter, and all have the row image_row of the table;
    None: there are no images.
    """

    def __init__(self, context: LayerContext, model: ModelConfig, config: LayerInputsConfig) -> None:
        super().__init__()
        prefix, size, width = "model.layer_inputs", model.hidden_size, model.num_layers * config.size
        self.embed_tokens = VocabParallelEmbedding(
            context, f"{prefix}.embed_tokens", config.num_ids(model.vocab_size), width, num_stored=config.vocab_size
        )
        self.projection = ReplicatedLinear(context, f"{prefix}.projection", size, width)
        self.norm = RMSNorm(context, config.size, config.eps)
        self._size, self._image_row = config.size, config.image_row
        self._projection_scale = float(size) ** -0.5
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
