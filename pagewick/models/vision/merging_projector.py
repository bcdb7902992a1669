"""The projector of encoders whose patches are merged: LFM2-VL, LFM3-VL, Idefics3, InternVL and Command A Vision."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import Activation
from pagewick.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from pagewick.layers.norm import LayerNorm
from pagewick.models.vision.encoder import VisionMLP
from pagewick.models.vision.merging_config import MergingConfig


class GatedProjection(nn.Module):
    """Merged patches [N, merged_size] -> [N, out_hidden_size] through `inner` numbers: activation(gate) * x.

    The file has x and gate as one tensor, linear_1.
    """

    def __init__(self, context: LayerContext, prefix: str, config: MergingConfig, inner: int) -> None:
        super().__init__()
        bias = config.projector_bias
        sizes = {"x": inner, "gate": inner}
        self.inputs = MergedColumnParallelLinear(
            context, prefix, config.merged_size, sizes, bias=bias, fused_name="linear_1", is_reversed=True
        )
        self.act = Activation(config.projector_activation, is_gated=True)
        self.linear_fc2 = RowParallelLinear(context, f"{prefix}.linear_fc2", inner, config.out_hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.act(self.inputs(x)))  # type: ignore[no-any-return]


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
        elif config.is_projector_gated:
            self.projection = GatedProjection(context, f"{prefix}.projection", config, config.projector_size)
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
