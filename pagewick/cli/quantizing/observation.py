"""Observation: sums of the squares of what a model's weights are multiplied by, while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pagewick.layers.experts import ResidentExperts
from pagewick.layers.linear import Linear
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage
from pagewick.weights.gguf.architectures import GgufArchitecture
from pagewick.weights.gguf.naming import gguf_name
from pagewick.weights.loader import build_routes


class Observation:
    """Observes a model from now on, until `close`. Steps must have too many tokens to be recorded (engine/graph.py).

    architecture: gives weights their names in GGUF files. The vocabulary head is not observed.
    """

    def __init__(self, model: nn.Module, architecture: GgufArchitecture) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        names: dict[int, list[str]] = {}
        for name, route in build_routes(model).items():
            place = gguf_name(name, architecture)
            if place is not None and route.leaf == "weight":
                names.setdefault(id(route.module), []).append(place[0])
        self._hooks = [
            module.register_forward_pre_hook(self._hook(names[id(module)]))
            for module in model.modules()
            if isinstance(module, Linear) and id(module) in names
        ]
        self._stores: list[tuple[ResidentExperts, ExpertStorage, ExpertStorage]] = []
        for module in model.modules():
            store = getattr(module, "store", None)
            if isinstance(store, ResidentExperts):
                self._observe_experts(store, dict.fromkeys(names[id(module)]))

    @property
    def sums(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The sums of squares [experts, columns] and the number of tokens [experts] of each weight."""
        return {name: (sums, self._counts[name]) for name, sums in self._sums.items()}

    def close(self) -> None:
        """Observe the model no longer."""
        for hook in self._hooks:
            hook.remove()
        for store, gate_up, down in self._stores:
            store.gate_up, store.down = gate_up, down

    def add(self, names: Iterable[str], x: Tensor, experts: Tensor | None = None, num_experts: int = 1) -> None:
        """Count rows x [n, columns]. experts: [n], the expert of each."""
        squares = x.flatten(0, -2).float().square().cpu()
        ids = torch.zeros(len(squares), dtype=torch.int64) if experts is None else experts.cpu().long()
        for name in names:
            if name not in self._sums:
                self._sums[name] = torch.zeros(num_experts, squares.shape[1], dtype=torch.float64)
                self._counts[name] = torch.zeros(num_experts, dtype=torch.int64)
            self._sums[name].index_add_(0, ids, squares.double())
            self._counts[name] += torch.bincount(ids, minlength=num_experts)

    def _hook(self, names: list[str]) -> Any:
        return lambda module, arguments: self.add(names, arguments[0])

    def _observe_experts(self, store: ResidentExperts, names: Iterable[str]) -> None:
        self._stores.append((store, store.gate_up, store.down))
        down = [name for name in names if "ffn_down" in name]
        store.gate_up = _ObservedExperts(self, store.gate_up, [name for name in names if name not in down])
        store.down = _ObservedExperts(self, store.down, down)


class _ObservedExperts(ExpertStorage):
    """Experts that compute one operation after the other, as ExpertStorage does, so that all inputs are seen."""

    def __init__(self, observation: Observation, inner: ExpertStorage, names: list[str]) -> None:
        super().__init__(inner.num_experts, inner.share, inner.formats)
        self._observation, self._inner, self._names = observation, inner, names

    def linear(self, x: Tensor, expert_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
        choices = expert_ids.flatten()
        rows = x if len(x) == len(choices) else x.repeat_interleave(expert_ids.shape[1], dim=0)
        self._observation.add(self._names, rows, choices, self.num_experts)
        return self._inner.linear(x, expert_ids, out=out)

    def expected(self, expert: int, part: str | None) -> Iterable[str]:
        return self._inner.expected(expert, part)

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self._inner.load(expert, part, name, tensor)

    def tensors(self, expert: int) -> Any:
        return self._inner.tensors(expert)

    def in_host_memory(self, count: int) -> ExpertMemory:
        return self._inner.in_host_memory(count)
