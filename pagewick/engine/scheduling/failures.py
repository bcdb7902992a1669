"""Why a choice fails, in words for its client."""

from __future__ import annotations

from typing import NamedTuple

from pagewick.engine.batch import SlotResult
from pagewick.errors import InvalidRequestError


class Failure(NamedTuple):
    """A message, and the name of its class in pagewick.errors."""

    message: str
    kind: str = "EngineError"


def constraint_failure(error: Exception) -> Failure:
    """Return the failure of a choice whose constraint raised an exception."""
    if isinstance(error, InvalidRequestError):
        return Failure(str(error), InvalidRequestError.__name__)
    return Failure(f"the constraint of this request failed: {error}")


def result_failure(result: SlotResult) -> Failure | None:
    """Return the failure that a result reports, if any."""
    return None if result.error is None else Failure(result.error, result.error_kind)
