"""Metadata: a GGUF file's key-values and shapes, as the readers of its configuration need them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.header import GgufArray

ReadNumbers = Callable[[str], Sequence[float]]
"""Name of a small tensor -> its numbers."""
# Keys whose values are texts; all others have numbers.
_TEXTS: Final = frozenset({"rope.scaling.type", "hidden_activation"})
# The limit for the layers in a config.json.
_MOST_LAYERS: Final = 1000


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

        Raises ModelLoadError if the layers differ, which no supported architecture does, and for a value of another
        type than the key has.
        """
        value = self.values.get(f"{self.kind}.{key}", default)
        if isinstance(value, GgufArray):
            raise self.wrong(f"{self.kind}.{key}", "a list, and must be a number")
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise self.wrong(f"{self.kind}.{key}", "different in each layer, which is not supported")
            value = value[0]
        self._check(key, [] if value is default else [value])
        return value

    def num_layers(self) -> tuple[int, int]:
        """Return the number of layers, and of those of them that predict later tokens. Raises ModelLoadError."""
        layers, later = self.get("block_count"), self.get("nextn_predict_layers", 0)
        for key, number, least, most in (
            ("block_count", layers, 1, _MOST_LAYERS),
            ("nextn_predict_layers", later, 0, _MOST_LAYERS),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
                raise self.wrong(
                    f"{self.kind}.{key}", f"{number!r:.80}, and must be a whole number from {least} to {most}"
                )
        if later >= layers:
            raise self.wrong(f"{self.kind}.nextn_predict_layers", f"{later}, and must be below block_count ({layers})")
        return layers, later

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
            value = [value] * num_layers
        if len(value) < num_layers:
            raise self.wrong(f"{self.kind}.{key}", f"a list of {len(value)}, and must have one for each layer")
        self._check(key, value[:num_layers])
        return value[:num_layers]

    def _check(self, key: str, values: Sequence[Any]) -> None:
        """Raise ModelLoadError unless these are texts, if the key has texts, and numbers otherwise."""
        for value in values:
            if key in _TEXTS:
                if not isinstance(value, str):
                    raise self.wrong(f"{self.kind}.{key}", f"{value!r:.80}, and must be a text")
            elif not isinstance(value, int | float) or math.isnan(value):
                raise self.wrong(f"{self.kind}.{key}", f"{value!r:.80}, and must be a number")

    def wrong(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {key} is {problem}\n  use another file of this model")
