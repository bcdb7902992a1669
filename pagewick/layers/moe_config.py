"""MoeConfig: the numbers that describe a layer with experts."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.errors import ConfigError
from pagewick.expert_routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A feed-forward layer in which every token uses a few of `num_experts` experts, and the shared one if any.

    intermediate_size: size of one expert; experts are gated and have no biases.
    routing: how experts are chosen. Router logits are sums in float32 that are not rounded before they are compared, as
    in DeepSeek's own code; that of Mixtral and Qwen rounds them to the model's dtype first.
    activation: a name in kernels.reference.ACTIVATIONS, for all experts.
    has_router_bias: a number for each expert is added to its score for the choice only (e_score_correction_bias).
    shared_intermediate_size: size of the expert that every token uses; None: there is none.
    has_shared_gate: the output of the shared expert is multiplied by the sigmoid of a gate's output (Qwen2-MoE).
    Raises ValueError if the numbers contradict each other.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    activation: str = "silu"
    has_router_bias: bool = False
    shared_intermediate_size: int | None = None
    has_shared_gate: bool = False

    def __post_init__(self) -> None:
        self.routing.check(self.num_experts)
        if self.has_shared_gate and self.shared_intermediate_size is None:
            raise ValueError("there is no shared expert for the shared gate")

    def num_offloaded(self, per_rank: int, num_ranks: int) -> int:
        """Return how many experts are in host memory with --num-experts-offload-per-rank `per_rank`.

        Raises ConfigError if fewer would be left on the device than a token uses.
        """
        offloaded, top_k = per_rank * num_ranks, self.routing.top_k
        if self.num_experts - offloaded >= top_k:
            return offloaded
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        raise ConfigError(
            f"--num-experts-offload-per-rank {per_rank} on {ranks} moves {offloaded} of {self.num_experts} experts to "
            f"host memory, and {top_k} must stay, as many as a token uses; give at most "
            f"{(self.num_experts - top_k) // num_ranks}"
        )
