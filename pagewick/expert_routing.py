"""Routing: the parameters by which a mixture-of-experts layer selects experts; kernels.route applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Parameters for selecting experts from E logits per token.

    scoring: a token's scores are the softmax of its logits, or the sigmoid of each. near: the weight of a choice is its
        softmax among the experts that are not chosen before it and that are near it (Phi-3.5-MoE); there are no groups.
    margin: of near. Logit b is near a greater one, a, unless (a - b) / max(|b|, a) is above it.
    renormalize: divide a token's weights by their sum. epsilon: added to this sum.
    num_groups, top_k_groups: divide the experts into num_groups groups of neighbours and select only from the best
        top_k_groups.
    group_score: a group's score is that of its best expert (DeepSeek-V2), or the sum of its best two (DeepSeek-V3).
    scaling: a factor of every weight, applied last.
    weighs_inputs: an expert's inputs are multiplied by its weight, not its outputs (Llama 4).
    Raises ValueError for inconsistent values.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "near"] = "softmax"
    margin: float = 0.0
    renormalize: bool = False
    epsilon: float = 1e-20
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: Literal["max", "sum_of_two"] = "max"
    scaling: float = 1.0
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(f"top_k_groups must be 1 .. num_groups ({self.num_groups}), not {self.top_k_groups}")
        if self.scoring == "near" and self.num_groups > 1:
            raise ValueError("experts that are compared with those near them have no groups")

    def check(self, num_experts: int) -> None:
        """Raises ValueError if these parameters do not fit a layer with `num_experts` experts."""
        size, rest = divmod(num_experts, self.num_groups)
        if rest:
            raise ValueError(f"{num_experts} experts do not make {self.num_groups} equal groups")
        if self.top_k > size * self.top_k_groups:
            raise ValueError(f"top_k {self.top_k} experts are not in {self.top_k_groups} groups of {size}")
        if self.group_score == "sum_of_two" and size < 2:
            raise ValueError("groups of one expert have no best two")
