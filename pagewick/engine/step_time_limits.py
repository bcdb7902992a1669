"""StepTimeLimits: how long the parts of a step may take on the slowest machine that is in use. No tensors here.

Between two marks of progress the engine computes a layer, or chooses all tokens. Their amount of work is known, so the
watchdog need not take a large part on a slow machine for a hang.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.engine.batch import StepPlan

# Floating-point operations per second of an old processor core, in a type that it has to emulate, and of a small GPU.
_SLOWEST_CORE = 1e9
_SLOWEST_DEVICE = {"cuda": 5e12, "mps": 1e12}
# Time to compile kernels for a GPU, with the processor: a layer may be the first to need a dozen of them.
_COMPILING_S = 60.0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The arguments of Progress.expect."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimeLimits:
    """Time limits for one rank's share of a model.

    layer_size, head_size: parameters of its largest layer and of its vocabulary head. attention_width: query heads
    times head_dim. num_ranks: with several ranks this one also waits for the others, which may be on other machines.
    is_staged: whether it waits for ranks that hold other layers, and so for all layers at once.
    """

    layer_size: int
    head_size: int
    attention_width: int
    num_layers: int
    device: str
    num_ranks: int
    is_staged: bool = False

    def of_forward(self, plan: StepPlan, logits: TimeLimit | None) -> TimeLimit:
        """Return the limit for the longest part of a forward pass: a layer, or the logits if it computes them.

        logits: the limit of_sampling, if the forward pass computes logits.
        """
        layers = self._of_layers(plan)
        if logits is None:
            return layers
        return TimeLimit(max(layers.seconds, logits.seconds), max(layers.cpu_seconds, logits.cpu_seconds))

    def of_tokens(self, num_tokens: int, num_scores: int = 0) -> TimeLimit:
        """Return the limit for one layer and `num_tokens` tokens, with `num_scores` attention scores in total.

        On a GPU, which the host waits for only at the end, and with stages it is the limit for all layers.
        """
        operations = 2.0 * self.layer_size * num_tokens + 4.0 * self.attention_width * num_scores
        return self._limit(operations, self.num_layers)

    def of_sampling(self, plan: StepPlan) -> TimeLimit:
        """Return the limit for the logits of all rows and for sampling; on a GPU the layers may be waited for first."""
        num_rows = len(plan.streams.slots)
        num_rows += sum(len(work.prompt_targets) + work.num_draft_tokens + work.is_sampled for work in plan.work)
        limit = self._limit(2.0 * self.head_size * num_rows, 1)
        waited_s = 0.0 if self.device == "cpu" and not self.is_staged else self._of_layers(plan).seconds
        return TimeLimit(waited_s + limit.seconds, limit.cpu_seconds)

    def _of_layers(self, plan: StepPlan) -> TimeLimit:
        streams, works = plan.streams, plan.work
        num_tokens = len(streams.slots) + sum(work.num_tokens for work in works)
        num_scores = len(streams.slots) + sum(streams.starts)
        num_scores += sum(work.num_tokens * (work.start + work.num_tokens) for work in works)
        return self.of_tokens(num_tokens, num_scores)

    def _limit(self, operations: float, num_layers: int) -> TimeLimit:
        if self.device == "cpu":
            cpu_seconds = operations / _SLOWEST_CORE
            waited_s = cpu_seconds * num_layers if self.is_staged else cpu_seconds
            return TimeLimit(waited_s if self.num_ranks > 1 else 0.0, cpu_seconds)
        computing_s = operations * num_layers / _SLOWEST_DEVICE.get(self.device, 1e12)
        compiling_s = _COMPILING_S if self.device == "cuda" else 0.0
        return TimeLimit(computing_s + compiling_s, compiling_s)
