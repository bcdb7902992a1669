"""Experts of which some live in host memory: they change places with others when tokens go to them.

An expert is in one of the slots on the device, or in one of the rows of host memory; one row more is there than experts
need, through which two change places. Ranks choose the same experts, so their slots hold the same ones at any time.
T: tokens; E: experts; A: experts of a token; H: hidden_size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ConfigError
from pagewick.kernels import SharedOutput
from pagewick.layers.moe_config import MoeConfig
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is in `slot` goes to row `saved_to` of host memory, then what is in row `loaded_from` into the slot."""

    slot: int
    saved_to: int
    loaded_from: int


class Residency:
    """Which expert is where: experts 0 .. num_slots - 1 begin on the device. Numbers only; nothing is moved here."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self._num_slots = num_slots
        # Least recently used first.
        self._slots = OrderedDict((expert, expert) for expert in range(num_slots))
        self._rows = {expert: expert - num_slots for expert in range(num_slots, num_experts)}
        self._spare_row = num_experts - num_slots

    def slot_of(self, expert: int) -> int | None:
        """None: it is in host memory."""
        return self._slots.get(expert)

    def row_of(self, expert: int) -> int:
        """Where in host memory it is. Raises KeyError if it is on the device."""
        return self._rows[expert]

    def waves(self, needed: Collection[int]) -> Iterator[list[int]]:
        """The experts, in groups that have room on the device; those that are there come first."""
        ordered = sorted(needed, key=lambda expert: (expert not in self._slots, expert))
        for first in range(0, len(ordered), self._num_slots):
            yield ordered[first : first + self._num_slots]

    def admit(self, wave: Sequence[int]) -> list[Exchange]:
        """What brings these experts to the device, in place of those that were not used for longest."""
        staying = frozenset(wave)
        victims = iter([expert for expert in self._slots if expert not in staying])
        exchanges = []
        for expert in wave:
            if expert not in self._slots:
                victim = next(victims)
                exchange = Exchange(self._slots.pop(victim), self._spare_row, self._rows.pop(expert))
                self._slots[expert] = exchange.slot
                self._rows[victim], self._spare_row = exchange.saved_to, exchange.loaded_from
                exchanges.append(exchange)
            self._slots.move_to_end(expert)
        return exchanges


class OffloadedExperts(nn.Module):
    """A layer's experts, of which those that gate_up and down have no room for are in host memory.

    gate_up, down: the slots on the device, with what a token is multiplied with first, and then.
    num_hits, num_copies: how often an expert that a step needed was on the device, and was copied there.
    Raises ConfigError if host memory is not there.
    """

    def __init__(self, config: MoeConfig, gate_up: ExpertStorage, down: ExpertStorage) -> None:
        super().__init__()
        self._config = config
        self.gate_up, self.down = gate_up, down
        self._residency = Residency(config.num_experts, gate_up.num_experts)
        # Not a tuple of modules: parameters are what is on the device.
        self._host = [self._host_memory(storage) for storage in (gate_up, down)]
        self.num_hits = self.num_copies = 0

    @property
    def bytes_per_expert(self) -> int:
        """What a copy of an expert to the device moves; as much goes back to host memory."""
        return self.gate_up.bytes_per_expert + self.down.bytes_per_expert

    @property
    def num_offloaded(self) -> int:
        """Experts in host memory."""
        return self._config.num_experts - self.gate_up.num_experts

    @property
    def host_bytes(self) -> int:
        """Host memory set aside, in bytes."""
        return (self.num_offloaded + 1) * self.bytes_per_expert

    def place_of(self, expert: int) -> tuple[Sequence[ExpertMemory], int]:
        """Where an expert is now: the memories of gate_up and of down, and its number in them."""
        slot = self._residency.slot_of(expert)
        if slot is not None:
            return (self.gate_up, self.down), slot
        return self._host, self._residency.row_of(expert)

    def finish(self) -> None:
        """Raises ConfigError if experts have another layout in host memory, from where they could not be copied."""
        for storage, host in zip((self.gate_up, self.down), self._host, strict=True):
            storage.finish()
            host.finish()
            if _layout(storage) != _layout(host):
                raise ConfigError(
                    f"experts held by {storage.formats} have another layout in host memory than on the device; "
                    "leave out --num-experts-offload-per-rank"
                )

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        router_bias: Tensor | None,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        """As kernels.fused_moe, with the same bits: a choice's products are the same wherever the others are made."""
        expert_ids, weights = kernels.route(logits, self._config.routing, router_bias)
        needed = set(expert_ids.flatten().tolist())
        # Not native, so that such a step is never recorded: another one needs other experts.
        choices = expert_ids.flatten().to(torch.int64)
        products = x.new_empty(len(choices), x.shape[1])
        for wave in self._residency.waves(needed):
            self._bring(wave)
            slots = self._slots_of(wave, x.device)[choices]
            if len(wave) == len(needed):
                products = self._products(x, slots.view(expert_ids.shape))
                break
            here = (slots >= 0).nonzero().squeeze(1)
            products[here] = self._products(x[here // expert_ids.shape[1]], slots[here].unsqueeze(1))
        return kernels.combine(products, weights, None if shared is None else SharedOutput(shared, shared_gate))

    def _products(self, x: Tensor, slots: Tensor) -> Tensor:
        """Of each choice, what its expert gives: [number of choices, H]."""
        activated = kernels.gated_activation(self.gate_up.linear(x, slots), self._config.activation)
        return self.down.linear(activated, slots)

    def _bring(self, wave: Sequence[int]) -> None:
        """Copy what is not on the device. Copies of a CUDA device follow each other, and its products follow them."""
        exchanges = self._residency.admit(wave)
        self.num_copies += len(exchanges)
        self.num_hits += len(wave) - len(exchanges)
        for exchange in exchanges:
            for host, storage in zip(self._host, (self.gate_up, self.down), strict=True):
                _exchange(storage.tensors(exchange.slot), host, exchange)

    def _slots_of(self, wave: Sequence[int], device: torch.device) -> Tensor:
        """[E] int32: an expert's slot, -1 if it is not of the wave."""
        slots = [-1] * self._config.num_experts
        for expert in wave:
            slot = self._residency.slot_of(expert)
            assert slot is not None, "it was admitted"
            slots[expert] = slot
        return torch.tensor(slots, dtype=torch.int32, device=device)

    def _host_memory(self, storage: ExpertStorage) -> ExpertMemory:
        try:
            return storage.in_host_memory(self.num_offloaded + 1)
        except RuntimeError as error:
            raise ConfigError(
                f"there are no {self.host_bytes} bytes of host memory for {self.num_offloaded} experts of a layer; "
                "lower --num-experts-offload-per-rank"
            ) from error


def _layout(memory: ExpertMemory) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in memory.tensors(0)]


def _exchange(slot: Sequence[Tensor], host: ExpertMemory, exchange: Exchange) -> None:
    saved, loaded = host.tensors(exchange.saved_to), host.tensors(exchange.loaded_from)
    for here, save_to, load_from in zip(slot, saved, loaded, strict=True):
        save_to.copy_(here, non_blocking=here.is_cuda)
        here.copy_(load_from, non_blocking=here.is_cuda)
