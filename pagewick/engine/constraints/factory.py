"""KnownConstraints: makes the TokenConstraint of a sequence from EngineRequest.constraint."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pagewick.engine.constraints.phase import Phases
from pagewick.engine.constraints.thinking_budget import ThinkingBudget, ThinkingBudgetSpec
from pagewick.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class KnownConstraints:
    """Makes the constraints that the engine knows, for a vocabulary of `vocab_size` tokens.

    A request's `constraint` is plain data: one phase, or a list of them in their order. The field `type` names its
    kind; "thinking_budget" is a ThinkingBudgetSpec.
    """

    vocab_size: int

    def __call__(self, constraint: object) -> Phases:
        """Make a constraint. Raises InvalidRequestError if the data describes none."""
        parts = constraint if isinstance(constraint, list) else [constraint]
        return Phases([self._phase(part) for part in parts])

    def _phase(self, part: object) -> ThinkingBudget:
        try:
            spec = msgspec.convert(part, ThinkingBudgetSpec)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"this is not a constraint: {error}", param="constraint") from None
        if (problem := spec.problem(self.vocab_size)) is not None:
            raise InvalidRequestError(f"this is not a constraint: {problem}", param="constraint")
        return ThinkingBudget(spec, self.vocab_size)
