"""MtpConfig: a layer with which a model predicts further tokens, which serve as draft tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagewick.models.parts import LayerConfig

PATH = "model.mtp"
"""The decoder's name of the layer and of what is around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Multi-token prediction, as in DeepSeek-V3 (arXiv:2412.19437, section 2.2), with one layer.

    Let h be a token's hidden states behind the model's last norm, and e the embedding of the token after it. The logits
    of the token after these two are head(y), with y = norm(layer(fc [norm_e(e), norm_h(h)])) and the model's own head.
    The prediction after that reads y in place of h, since the model has not computed that token.

    like: the number of the model's layer that it is like. own: the layer, if it is like none of these. names: (ours,
    theirs), parts of the names of its tensors.
    """

    like: int = -1
    own: LayerConfig | None = None
    names: tuple[tuple[str, str], ...]

    def layer(self, layers: Sequence[LayerConfig]) -> LayerConfig:
        """Return the layer of a model with these. It has an indexer of its own, even where these share theirs."""
        layer = layers[self.like] if self.own is None else self.own
        if layer.latent is None or layer.latent.indexer is None:
            return layer
        indexer = replace(layer.latent.indexer, is_shared=False)
        return replace(layer, attention=replace(layer.latent, indexer=indexer))
