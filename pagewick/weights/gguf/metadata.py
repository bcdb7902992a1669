"""Metadata: a GGUF file's key-values and shapes, as the readers of its configuration need them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.header import GgufArray

ReadNumbers = Callable[[str], Sequence[float]]
"""Name of a small tensor -> its numbers."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's key-values, and the shapes of its tensors by name; shapes are outermost first."""

    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    where: str

    @property
    def kind(self) -> str:
        """general.architecture. Raises ModelLoadError if there is none."""
        kind = self.values.get("general.architecture")
        if not isinstance(kind, str):
            raise self.wrong("general.architecture", "missing, and must name the model's architecture")
        return kind

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of this architecture; one value for each layer counts once if all are equal.

        Raises ModelLoadError if the layers differ, which no supported architecture does.
        """
        value = self.values.get(f"{self.kind}.{key}", default)
        if isinstance(value, GgufArray):
            raise self.wrong(f"{self.kind}.{key}", "a list, and must be a number")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.wrong(f"{self.kind}.{key}", "different in each layer, which is not supported")
            return value[0]
        return value

    def of_layers(self, key: str, num_layers: int) -> list[Any] | None:
        """Return the value of a key for each of the first layers, the same for all if there is one; None: missing.

        Raises ModelLoadError if there are fewer, or far more than layers can be.
        """
        value = self.values.get(f"{self.kind}.{key}")
        if value is None:
            return None
        if isinstance(value, GgufArray):
            raise self.wrong(f"{self.kind}.{key}", f"a list of {value.length}, and must have one for each layer")
        if not isinstance(value, list):
            return [value] * num_layers
        if len(value) < num_layers:
            raise self.wrong(f"{self.kind}.{key}", f"a list of {len(value)}, and must have one for each layer")
        return value[:num_layers]

    def wrong(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {key} is {problem}\n  use another file of this model")
