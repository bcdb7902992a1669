"""MtpPredictor: a model's own layer that predicts the token after the next one (multi-token prediction)."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick.layers.context import LayerContext, TokenBatch
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import RMSNorm, normed_side_by_side
from pagewick.layers.rotary import QueryScales, RotaryEmbedding, rotary_of
from pagewick.models.blocks import BLOCKS, make_norm
from pagewick.models.config import ModelConfig
from pagewick.models.mtp_config import PATH, MtpConfig


class MtpPredictor(nn.Module):
    """Predicts from the hidden states of tokens and the embeddings of those after them; see MtpConfig for the formula.

    Its layer has a KV cache, as the model's layers have. The keys and values of a token depend on the next token, too.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, mtp: MtpConfig) -> None:
        super().__init__()
        size = config.hidden_size
        assert config.norm.kind != "layer", "the models that have such a layer have RMS norms"
        self.embedding_norm = RMSNorm(context, size, config.norm.eps, offset=config.norm.offset)
        self.hidden_norm = RMSNorm(context, size, config.norm.eps, offset=config.norm.offset)
        self.fc = ReplicatedLinear(context, f"{PATH}.fc", 2 * size, size)
        layer = mtp.layer(config.layers)
        self.layer = BLOCKS[layer.block or config.block](context, f"{PATH}.layer", config, layer)
        self.norm = make_norm(context, config)
        self.rotary: nn.Module = rotary_of(context, layer.rope, layer.query_scale) or nn.Identity()

    def forward(self, embedded: Tensor, hidden_states: Tensor, batch: TokenBatch) -> Tensor:
        """Return hidden states [T, hidden_size], from which the model's head makes the logits of predicted tokens.

        embedded: the embeddings [T, hidden_size] of the tokens after those of the batch. hidden_states: of the tokens
        of the batch [T, hidden_size], behind the model's last norm, or what this returned for the tokens before them.
        """
        both = normed_side_by_side((self.embedding_norm, embedded), (self.hidden_norm, hidden_states))
        positions = batch.positions[0] if len(batch.positions) == 1 else batch.positions
        rotary = self.rotary
        angles = rotary.angles(positions) if isinstance(rotary, RotaryEmbedding | QueryScales) else None
        output, residual = self.layer(self.fc(both), None, angles, batch)
        normed, _ = self.norm.add_and_norm(output, residual)
        return normed
