"""The projector of encoders whose patches are merged: LFM2-VL, Idefics3, SmolVLM, InternVL and LFM3-VL."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import LayerNorm
from pagewick.models.vision.config import MergingConfig
from pagewick.models.vision.encoder import VisionMLP


class MergingProjector(nn.Module):
    """Patches [T, hidden_size] -> [N, out_hidden_size]: each square of patches, side by side, projected."""

    def __init__(self, context: LayerContext, prefix: str, config: MergingConfig) -> None:
        super().__init__()
        size, out_size, eps = config.merged_size, config.out_hidden_size, config.projector_eps
        normed_size = size if config.is_norm_merged else config.hidden_size
        self.norm = None if eps is None else LayerNorm(context, normed_size, eps, has_bias=True)
        self.projection: nn.Module
        if config.projector_size is None:
            self.projection = ReplicatedLinear(context, f"{prefix}.projection", size, out_size)
        else:
            self.projection = VisionMLP(
                context,
                f"{prefix}.projection",
                size,
                config.projector_size,
                out_size,
                activation=config.projector_activation,
                inputs=("linear_1",),
                bias=config.projector_bias,
            )
        self._shapes = (-1, normed_size), (-1, size)

    def forward(self, x: Tensor) -> Tensor:
        before, after = self._shapes
        normed = x if self.norm is None else self.norm(x.view(before))
        return self.projection(normed.view(after))  # type: ignore[no-any-return]
