"""The tensors of a layer's experts, of its router and of the expert that all tokens share. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagewick.models.state_tensors import Named
from pagewick.models.tensor_sizes import Role, Size, whole

if TYPE_CHECKING:
    from pagewick.layers.config import MoeConfig


def expert_tensors(config: MoeConfig, hidden: Size, cut: Callable[[int], Size]) -> Iterator[Named]:
    """Yield the name behind the layer's, the role and the sizes of each tensor.

    hidden: the size of hidden states. cut: returns a dimension of a given size that the ranks share.
    """
    experts = whole(config.num_experts + config.num_identities)
    yield "gate.weight", "router", (experts, hidden)
    if config.router_norm_eps is not None:
        yield "router_norm.weight", "norm", (hidden,)
    if config.has_expert_scales:
        yield "expert_scales.weight", "router", (experts,)
    if config.has_logit_bias:
        yield "gate.bias", "router", (experts,)
    if config.has_expert_table:
        yield "expert_table.weight", "table", (whole(config.vocab_size), whole(config.routing.top_k))
    if config.has_router_bias:
        yield (
            "gate.e_score_correction_bias",
            "router",
            (whole(1), experts) if config.is_router_bias_matrix else (experts,),
        )
    width, inner = hidden, cut(config.intermediate_size)
    if config.latent_size is not None:
        width = whole(config.latent_size)
        # Every token needs them whole, as it does the shared expert.
        yield "fc1_latent_proj.weight", "shared_expert", (width, hidden)
        yield "fc2_latent_proj.weight", "shared_expert", (hidden, width)
    for expert in range(config.num_experts):
        owner, has_bias = f"experts.{expert}", config.has_expert_biases
        for name in config.input_projections:
            yield from _linear(f"{owner}.{name}", "expert", inner, width, has_bias=has_bias)
        yield from _linear(f"{owner}.down_proj", "expert", width, inner, has_bias=has_bias)
    if config.shared_intermediate_size is not None:
        inner, names = cut(config.shared_intermediate_size), config.input_projections
        rows = {"gate_up_proj": inner.times(len(names))} if config.is_shared_fused else dict.fromkeys(names, inner)
        for name, size in rows.items():
            yield f"shared_expert.{name}.weight", "shared_expert", (size, hidden)
        yield "shared_expert.down_proj.weight", "shared_expert", (hidden, inner)
    if config.has_shared_gate:
        yield "shared_expert_gate.weight", "router", (whole(1), hidden)


def _linear(path: str, role: Role, rows: Size, columns: Size, *, has_bias: bool) -> Iterator[Named]:
    yield f"{path}.weight", role, (rows, columns)
    if has_bias:
        yield f"{path}.bias", role, (rows,)
