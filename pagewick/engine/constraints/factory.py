"""KnownConstraints: makes the TokenConstraint of a sequence from EngineRequest.constraint, as Phases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pagewick.engine.constraints.thinking_budget import ThinkingBudget, ThinkingBudgetSpec
from pagewick.engine.sequence import TokenConstraint
from pagewick.errors import InvalidRequestError


class Phase(TokenConstraint, Protocol):
    """Restricts the tokens of one part of a sequence."""

    @property
    def is_over(self) -> bool:
        """Whether the phase ended with the tokens accepted so far."""
        ...


class Phases:
    """A TokenConstraint: each phase begins with the token after the last one of the phase before.

    After the last phase every token is allowed.
    """

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._phases = list(phases)
        self._drop_finished()

    def allowed_mask(self) -> bytes | None:
        """Return the mask of the current phase."""
        return self._phases[0].allowed_mask() if self._phases else None

    def accept(self, token_id: int) -> None:
        if self._phases:
            self._phases[0].accept(token_id)
            self._drop_finished()

    def _drop_finished(self) -> None:
        while self._phases and self._phases[0].is_over:
            del self._phases[0]


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
