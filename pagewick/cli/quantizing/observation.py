"""Observation: sums of the squares of what a model's weights are multiplied by, while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.calibration.observation import InputObservation, Names
from pagewick.cli.quantizing.hybrid import file_architecture, linear_layers, names_in_files
from pagewick.cli.quantizing.text_names import text_name
from pagewick.cli.quantizing.value_heads import moved_columns
from pagewick.kernels.matrix import PerHeadLinear
from pagewick.layers.latent_attention import LatentProjection
from pagewick.models.config import ModelConfig
from pagewick.weights.gguf.naming import gguf_name
from pagewick.weights.loader import build_routes

_OUTPUT: Final = ".ssm_out.weight"
_FUSED: Final = ".ssm_in.weight"
# kv_b_proj of latent attention, and its two parts in files.
_BOTH, _KEYS, _VALUES = ".attn_kv_b.", ".attn_k_b.", ".attn_v_b."
_SEPARATE: Final = (".attn_qkv.weight", ".attn_gate.weight")


class Observation:
    """Observes a model from now on, until `close`. Steps must have too many tokens to be recorded (engine/graph/).

    config: that of the model's text part by itself. Weights without a name in GGUF files are not observed. Raises
    ModelLoadError for a model that has no form in them.
    """

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        _, architecture = file_architecture(config)
        # Outputs of linear attention have another order in files.
        self._columns = moved_columns(config)
        self._is_fused = "attn_gate" in architecture.layer
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._of_heads: dict[str, tuple[Tensor, Tensor]] = {}
        routes = build_routes(model)
        linear = linear_layers(config)
        places = {
            name: [
                gguf_name(part, architecture, linear, config.num_layers)
                for part in names_in_files(text_name(name), config)
            ]
            for name in routes
        }
        # The first tensor in a file stands for all parts of a weight.
        self._parts = {found[0][0]: [place[0] for place in found if place] for found in places.values() if found[0]}
        self._names = {name: found[0][0] for name, found in places.items() if found[0] is not None}
        self._inputs = InputObservation(model, routes, self._add)
        self._latents: list[LatentProjection] = []
        for name, route in routes.items():
            if isinstance(route.module, LatentProjection) and name in self._names:
                self._observe_heads(route.module, self._names[name])

    def close(self) -> None:
        """Observe the model no longer."""
        self._inputs.close()
        for projection in self._latents:
            for part in ("queries", "values"):
                setattr(projection, part, getattr(projection, part).inner)

    def _observe_heads(self, projection: LatentProjection, name: str) -> None:
        """Observe both products of kv_b_proj with each head, which are tensors of their own in files."""
        self._latents.append(projection)
        for part, stored in (("queries", _KEYS), ("values", _VALUES)):
            product = _ObservedHeads(getattr(projection, part), name.replace(_BOTH, stored), self._of_heads)
            setattr(projection, part, product)

    @property
    def sums(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The sums of squares [experts, columns] and the number of tokens [experts] of each weight."""
        of_weights = {
            name: (self._in_order(observed, sums), self._counts[observed])
            for observed, sums in self._sums.items()
            for name in self._names_in_files(observed)
        }
        return {**of_weights, **self._of_heads}

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

    def _names_in_files(self, name: str) -> list[str]:
        """Return the tensors that hold an observed weight; several for a fused projection of the checkpoint."""
        if self._is_fused and name.endswith(_FUSED):
            return [name.replace(_FUSED, part) for part in _SEPARATE]
        return self._parts[name]


class _ObservedHeads:
    """A product of each head with a matrix of its own that adds up the squares of its rows.

    sums: gets the sums [heads, columns] and the numbers of tokens [heads] under `name`.
    """

    def __init__(self, inner: PerHeadLinear, name: str, sums: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.inner, self._name, self._sums = inner, name, sums

    def linear(self, x: Tensor) -> Tensor:
        """As PerHeadLinear's."""
        squares = x.float().square().cpu().double().sum(0)
        before, count = self._sums.get(self._name, (torch.zeros_like(squares), torch.zeros(len(squares)).long()))
        self._sums[self._name] = before + squares, count + len(x)
        return self.inner.linear(x)
