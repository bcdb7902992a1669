"""The shortcut block (config.Block): experts in every other layer, whose output the next layer adds."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pagewick.layers.attention import AttentionBatch
from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import add
from pagewick.layers.moe import MoeLayer
from pagewick.layers.rotary import Angles
from pagewick.models.blocks import Block, add_and_norm
from pagewick.models.config import ModelConfig
from pagewick.models.parts import LayerConfig


class Shortcut:
    """Keeps the output of a layer's experts until the next layer has taken it."""

    def __init__(self) -> None:
        self._output: Tensor | None = None

    def put(self, output: Tensor) -> None:
        self._output = output

    def take(self) -> Tensor:
        assert self._output is not None, "a layer with experts comes first"
        output, self._output = self._output, None
        return output


class ShortcutBlock(Block):
    """A sequential block with experts beside its MLP, or one that adds what those before it have made."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(context, prefix, config, layer)
        self.mixture: MoeLayer | None = None
        if layer.experts is not None:
            self.mixture = MoeLayer(context, f"{prefix}.mixture", config.hidden_size, layer.experts)
        self.shortcut = Shortcut()

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, angles: Angles | None, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        normed, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        normed, residual = self.post_attention_layernorm.add_and_norm(self.mixer(normed, angles, batch), residual)
        fed: Tensor = self.mlp(normed, batch)
        if self.mixture is None:
            return add(fed, self.shortcut.take()), residual
        self.shortcut.put(self.mixture(normed, batch))
        return fed, residual


def share_shortcuts(blocks: Iterable[nn.Module]) -> None:
    """Let each shortcut block without experts take the output of those in the block before it."""
    before: ShortcutBlock | None = None
    for block in blocks:
        if isinstance(block, ShortcutBlock):
            if block.mixture is None:
                assert before is not None, "the first layer has experts"
                block.shortcut = before.shortcut
            before = block
