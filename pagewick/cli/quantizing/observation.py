"""Observation: sums of the squares of what a model's weights are multiplied by, while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.calibration.observation import InputObservation, Names
from pagewick.weights.gguf.architecture import GgufArchitecture
from pagewick.weights.gguf.naming import gguf_name
from pagewick.weights.loader import build_routes

_OUTPUT: Final = ".ssm_out.weight"
_FUSED: Final = ".ssm_in.weight"
_SEPARATE: Final = (".attn_qkv.weight", ".attn_gate.weight")


class Observation:
    """Observes a model from now on, until `close`. Steps must have too many tokens to be recorded (engine/graph/).

    architecture: gives weights their names in GGUF files. Others are not observed, such as the vocabulary head.
    columns: of outputs of linear attention, in the order of such files; None: the model's own.
    """

    def __init__(self, model: nn.Module, architecture: GgufArchitecture, columns: Tensor | None = None) -> None:
        self._columns = columns
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        routes = build_routes(model)
        places = {name: gguf_name(name, architecture) for name in routes}
        self._names = {name: place[0] for name, place in places.items() if place is not None}
        self.close = InputObservation(model, routes, self._add).close

    @property
    def sums(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The sums of squares [experts, columns] and the number of tokens [experts] of each weight."""
        return {
            name: (self._in_order(observed, sums), self._counts[observed])
            for observed, sums in self._sums.items()
            for name in _names_in_files(observed)
        }

    def _in_order(self, name: str, sums: Tensor) -> Tensor:
        return sums if self._columns is None or not name.endswith(_OUTPUT) else sums[:, self._columns]

    def _add(self, names: Names, x: Tensor, experts: Tensor | None) -> None:
        squares = x.float().square().cpu().double()
        ids = torch.zeros(len(squares), dtype=torch.int64) if experts is None else experts.cpu().long()
        for name in {self._names[name]: None for of_expert in names for name in of_expert if name in self._names}:
            if name not in self._sums:
                self._sums[name] = torch.zeros(len(names), squares.shape[1], dtype=torch.float64)
                self._counts[name] = torch.zeros(len(names), dtype=torch.int64)
            self._sums[name].index_add_(0, ids, squares)
            self._counts[name] += torch.bincount(ids, minlength=len(names))


def _names_in_files(name: str) -> list[str]:
    """Return the tensors that hold a weight of the checkpoint; several for a fused projection of linear attention."""
    return [name.replace(_FUSED, part) for part in _SEPARATE] if name.endswith(_FUSED) else [name]
