"""KnownConstraints: makes the TokenConstraint of a sequence from EngineRequest.constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pagewick.engine.constraints.thinking_budget import ThinkingBudget, ThinkingBudgetSpec
from pagewick.engine.messages import EngineStats
from pagewick.engine.sequence import TokenConstraint
from pagewick.errors import InvalidRequestError


class GrammarConstraints(Protocol):
    """Makes constraints of the type "grammar" for an engine, which knows nothing of text."""

    def constraint(self, spec: object, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenConstraint:
        """Make one. Raises InvalidRequestError."""
        ...

    def count_into(self, stats: EngineStats) -> None:
        """Set the totals of grammars."""
        ...


class AllOf:
    """A TokenConstraint that allows what all of its parts allow."""

    def __init__(self, parts: Sequence[TokenConstraint]) -> None:
        self._parts = parts

    @property
    def is_complete(self) -> bool:
        return any(part.is_complete for part in self._parts)

    def allowed_mask(self) -> bytes | None:
        masks = [mask for part in self._parts if (mask := part.allowed_mask()) is not None]
        if not masks:
            return None
        common = int.from_bytes(masks[0], "little")
        for mask in masks[1:]:
            common &= int.from_bytes(mask, "little")
        return common.to_bytes(len(masks[0]), "little")

    def accept(self, token_id: int) -> None:
        for part in self._parts:
            part.accept(token_id)


@dataclass(frozen=True, slots=True)
class KnownConstraints:
    """Makes the constraints that the engine knows, for a vocabulary of `vocab_size` tokens.

    A request's `constraint` is plain data, or a list of them that apply together. The field `type` names its kind:
    "thinking_budget" is a ThinkingBudgetSpec; `grammars` reads "grammar".
    """

    vocab_size: int
    eos_token_ids: Sequence[int] = ()
    grammars: GrammarConstraints | None = None

    def __call__(self, constraint: object) -> TokenConstraint:
        """Make a constraint. Raises InvalidRequestError if the data describes none."""
        parts = [self._part(part) for part in (constraint if isinstance(constraint, list) else [constraint])]
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _part(self, part: object) -> TokenConstraint:
        if self.grammars is not None and isinstance(part, Mapping) and part.get("type") == "grammar":
            return self.grammars.constraint(part, self.vocab_size, self.eos_token_ids)
        try:
            spec = msgspec.convert(part, ThinkingBudgetSpec)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"this is not a constraint: {error}", param="constraint") from None
        if (problem := spec.problem(self.vocab_size)) is not None:
            raise InvalidRequestError(f"this is not a constraint: {problem}", param="constraint")
        return ThinkingBudget(spec, self.vocab_size)
