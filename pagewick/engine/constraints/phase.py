"""Phase: a constraint that ends at some token. Phases: several of them, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pagewick.engine.sequence import TokenConstraint


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
