"""Routing: how a layer with experts chooses among them. Plain numbers; kernels.route does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a layer chooses experts, from E logits a token.

    scoring: a token's scores are the softmax of its logits, or the sigmoid of each.
    renormalize: the weights of a token are divided by their sum.
    num_groups, top_k_groups: experts are chosen only from the best top_k_groups of num_groups groups of neighbours.
    group_score: a group is as good as its best expert (DeepSeek-V2), or as the sum of its best two (DeepSeek-V3).
    scaling: a factor of every weight, applied last.
    Raises ValueError for what contradicts itself.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: Literal["max", "sum_of_two"] = "max"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(f"top_k_groups must be 1 .. num_groups ({self.num_groups}), not {self.top_k_groups}")

    def check(self, num_experts: int) -> None:
        """Raises ValueError if so many experts cannot be chosen from like this."""
        size, rest = divmod(num_experts, self.num_groups)
        if rest:
            raise ValueError(f"{num_experts} experts do not make {self.num_groups} equal groups")
        if self.top_k > size * self.top_k_groups:
            raise ValueError(f"top_k {self.top_k} experts are not in {self.top_k_groups} groups of {size}")
        if self.group_score == "sum_of_two" and size < 2:
            raise ValueError("groups of one expert have no best two")
