"""InputObservation: reports the rows that the weights of a model's linear layers are multiplied by, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.experts import ExpertWeights, ResidentExperts
from pagewick.layers.latent_attention import LatentAttention
from pagewick.layers.linear import Linear
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage
from pagewick.weights.loader import Route

# For each expert, or for the only one, the weights that are multiplied by the same rows.
Names = Sequence[Sequence[str]]
Seen = Callable[[Names, Tensor, Tensor | None], None]


class InputObservation:
    """Observes a model from now on, until `close`. Steps must have too many tokens to be recorded.

    routes: names of the model's weights, and where they are loaded (weights.loader.build_routes). seen: is called in
    every product with the names of its weights, the rows [n, columns] and, if there are experts, the expert of each
    row, [n]. Routers and the vocabulary head are not observed.
    """

    def __init__(self, model: nn.Module, routes: Mapping[str, Route], seen: Seen) -> None:
        self._hooks: list[Any] = []
        self._stores: list[tuple[ResidentExperts, ExpertStorage, ExpertStorage]] = []
        owned: dict[int, list[tuple[str, str | None]]] = {}
        for name, route in routes.items():
            if route.leaf == "weight":
                owned.setdefault(id(route.module), []).append((name, route.part))
        for module in model.modules():
            mine = owned.get(id(module), ())
            if isinstance(module, Linear):
                self._observe_linear(module, [name for name, _ in mine], seen)
            elif isinstance(module, LatentAttention):
                self._observe_latents(module, [name for name, _ in owned[id(module.kv_b_proj)]], seen)
            elif isinstance(module, ExpertWeights) and isinstance(module.store, ResidentExperts):
                self._observe_experts(module, module.store, mine, seen)

    def close(self) -> None:
        """Observe the model no longer."""
        for hook in self._hooks:
            hook.remove()
        for store, gate_up, down in self._stores:
            store.gate_up, store.down = gate_up, down

    def _observe_linear(self, module: Linear, names: list[str], seen: Seen) -> None:
        def before(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen([names], arguments[0].flatten(0, -2), None)

        if names:
            self._hooks.append(module.register_forward_pre_hook(before))

    def _observe_latents(self, module: LatentAttention, names: list[str], seen: Seen) -> None:
        """The kernels that store latents also normalise them, so that kv_b_proj's rows are computed here again."""
        norm = module.kv_a_layernorm

        def after(_: nn.Module, arguments: object, result: Tensor) -> None:
            latents = result[..., : len(norm.weight)].contiguous()
            seen([names], kernels.rms_norm(latents, norm.weight, norm.eps, norm.offset), None)

        self._hooks.append(module.kv_a_proj_with_mqa.register_forward_hook(after))

    def _observe_experts(
        self, module: ExpertWeights, store: ResidentExperts, names: Iterable[tuple[str, str | None]], seen: Seen
    ) -> None:
        of_product: tuple[dict[int, list[str]], dict[int, list[str]]] = {}, {}
        for name, part in names:
            expert, index = module.product_of(part)
            of_product[index].setdefault(expert, []).append(name)
        gate_up, down = ([of_expert[expert] for expert in sorted(of_expert)] for of_expert in of_product)
        self._stores.append((store, store.gate_up, store.down))
        store.gate_up = _ObservedExperts(store.gate_up, gate_up, seen)
        store.down = _ObservedExperts(store.down, down, seen)


class _ObservedExperts(ExpertStorage):
    """Experts that compute one operation after the other, as ExpertStorage does, so that all inputs are seen."""

    def __init__(self, inner: ExpertStorage, names: Names, seen: Seen) -> None:
        super().__init__(inner.num_experts, inner.share, inner.formats)
        self._inner, self._names, self._seen = inner, names, seen

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        choices = expert_ids.flatten()
        rows = x if len(x) == len(choices) else x.repeat_interleave(expert_ids.shape[1], dim=0)
        self._seen(self._names, rows, choices)
        return self._inner.linear(x, expert_ids, bias, out=out)

    def expected(self, expert: int, part: str | None) -> Iterable[str]:
        return self._inner.expected(expert, part)

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self._inner.load(expert, part, name, tensor)

    def tensors(self, expert: int) -> Any:
        return self._inner.tensors(expert)

    def in_host_memory(self, count: int) -> ExpertMemory:
        return self._inner.in_host_memory(count)
