"""Effort: how long the pieces of a step may take on the slowest machine that anybody would use. No tensors here.

Between two marks of progress lies a layer, or the choice of all tokens. What they compute is known; who watches the
engine must not take a large piece on a slow machine for a hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewick.engine.batch import SlotWork

# Floating-point operations per second. A processor core that is old, in a type that it has to emulate; a small GPU.
_SLOWEST_CORE = 1e9
_SLOWEST_DEVICE = {"cuda": 5e12, "mps": 1e12}


@dataclass(frozen=True, slots=True)
class Allowance:
    """What Progress.expect is told."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Effort:
    """One rank's share of a model.

    layer_size, head_size: parameters of its largest layer and of its vocabulary head. attention_width: query heads
    times head_dim. num_ranks: others, which may be on other machines, work while this one waits.
    """

    layer_size: int
    head_size: int
    attention_width: int
    num_layers: int
    device: str
    num_ranks: int

    def of_forward(self, works: Sequence[SlotWork], *, has_logits: bool) -> Allowance:
        """For the longest piece of a forward pass: a layer, or the logits, if it goes so far."""
        layers = self.of_layers(works)
        if not has_logits:
            return layers
        rest = self.of_sampling(works)
        return Allowance(max(layers.seconds, rest.seconds), max(layers.cpu_seconds, rest.cpu_seconds))

    def of_layers(self, works: Sequence[SlotWork]) -> Allowance:
        """For one layer, or on a GPU, which is waited for at the end only, for all of them."""
        num_tokens = sum(work.num_tokens for work in works)
        num_scores = sum(work.num_tokens * (work.start + work.num_tokens) for work in works)
        return self.of_tokens(num_tokens, num_scores)

    def of_tokens(self, num_tokens: int, num_scores: int = 0) -> Allowance:
        """The same for so many tokens, which look at `num_scores` cached ones, each counted for itself."""
        operations = 2.0 * self.layer_size * num_tokens + 4.0 * self.attention_width * num_scores
        return self._allowance(operations, self.num_layers)

    def of_sampling(self, works: Sequence[SlotWork]) -> Allowance:
        """For the logits of all rows and what is made of them; on a GPU the layers may have to be waited for first."""
        num_rows = sum(len(work.prompt_targets) + work.num_draft_tokens + work.is_sampled for work in works)
        allowance = self._allowance(2.0 * self.head_size * num_rows, 1)
        waited_s = 0.0 if self.device == "cpu" else self.of_layers(works).seconds
        return Allowance(waited_s + allowance.seconds, allowance.cpu_seconds)

    def _allowance(self, operations: float, num_layers: int) -> Allowance:
        if self.device == "cpu":
            cpu_seconds = operations / _SLOWEST_CORE
            return Allowance(cpu_seconds if self.num_ranks > 1 else 0.0, cpu_seconds)
        return Allowance(operations * num_layers / _SLOWEST_DEVICE.get(self.device, 1e12), 0.0)
