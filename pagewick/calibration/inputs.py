"""InputSums: an observer that sums the inputs of the weights of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pagewick.calibration.layer import Enough
from pagewick.calibration.observation import Names
from pagewick.quantization.calibrated.inputs import InputSum


class InputSums:
    """An observer (observation.Seen) of the weights with these names, which ends each batch when it has seen all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = {name: InputSum() for name in names}
        self._awaited = set(names)

    def __getitem__(self, name: str) -> InputSum:
        return self._sums[name]

    def pop(self, name: str) -> InputSum:
        """Return a sum and forget it, so that its memory can be freed."""
        return self._sums.pop(name)

    def __call__(self, names: Names, rows: Tensor, experts: Tensor | None) -> None:
        for expert, together in enumerate(names):
            for name in self._sums.keys() & set(together):
                of_expert = rows if experts is None else rows[experts == expert]
                if len(of_expert):
                    self._sums[name].add(of_expert)
                self._awaited.discard(name)
        if not self._awaited:
            self._awaited = set(self._sums)
            raise Enough
