"""Experts, some of which are in host memory. When tokens need one of these, it trades places with another expert.

An expert is in one of the slots on the device, or in one of the rows of host memory. One row is spare, so that two
experts can trade places. All ranks choose the same experts, so their slots hold the same ones at any time.
T: tokens; E: experts; A: experts of a token; H: size of the experts' inputs and outputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ConfigError
from pagewick.kernels.copies import CopyStream, CudaCopyStream
from pagewick.kernels.options import MoeBiases, SharedOutput
from pagewick.kernels.reference_moe import weighed
from pagewick.layers.config import MoeConfig
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage


class Exchange(NamedTuple):
    """Two copies: from `slot` to row `saved_to` of host memory, then from row `loaded_from` to `slot`."""

    slot: int
    saved_to: int
    loaded_from: int


class Residency:
    """Keeps account of where each expert is, and moves nothing. Experts 0 .. num_slots - 1 begin on the device."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self._num_slots = num_slots
        # Least recently used first.
        self._slots = OrderedDict((expert, expert) for expert in range(num_slots))
        self._rows = {expert: expert - num_slots for expert in range(num_slots, num_experts)}
        self._spare_row = num_experts - num_slots

    def slot_of(self, expert: int) -> int | None:
        """Return the expert's slot on the device; None if it is in host memory."""
        return self._slots.get(expert)

    @property
    def experts_in_slots(self) -> list[int]:
        """The expert in each slot."""
        return sorted(self._slots, key=self._slots.__getitem__)

    def row_of(self, expert: int) -> int:
        """Return the expert's row in host memory. Raises KeyError if it is on the device."""
        return self._rows[expert]

    def waves(self, needed: Collection[int]) -> Iterator[list[int]]:
        """Divide the experts into groups that fit on the device; those already on it come first."""
        ordered = sorted(needed, key=lambda expert: (expert not in self._slots, expert))
        for first in range(0, len(ordered), self._num_slots):
            yield ordered[first : first + self._num_slots]

    def admit(self, wave: Sequence[int]) -> list[Exchange]:
        """Return the exchanges that bring these experts to the device, in place of the least recently used ones."""
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
    """A layer's experts; those that do not fit into gate_up and down are in host memory.

    gate_up, down: the slots on the device, with the weights of the first and of the second product.
    num_hits, num_copies: how often an expert that a step needed was on the device already, or was copied there.
    Raises ConfigError if there is too little host memory.
    """

    def __init__(self, config: MoeConfig, gate_up: ExpertStorage, down: ExpertStorage) -> None:
        super().__init__()
        self._config = config
        self.gate_up, self.down = gate_up, down
        self._residency = Residency(config.num_experts, gate_up.num_experts)
        try:
            # A list, because the parameters of this module are only those on the device.
            self._host = [storage.in_host_memory(self.num_offloaded + 1) for storage in (gate_up, down)]
        except RuntimeError as error:
            raise ConfigError(
                f"there are no {self.host_bytes} bytes of host memory for {self.num_offloaded} experts of a layer; "
                "lower --num-experts-offload-per-rank"
            ) from error
        device = gate_up.tensors(0)[0].device
        self._stream: CopyStream | None = CudaCopyStream(device) if device.type == "cuda" else None
        self.num_hits = self.num_copies = 0

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that are copied to the device for an expert; the same number is copied back to host memory."""
        return self.gate_up.bytes_per_expert + self.down.bytes_per_expert

    @property
    def num_offloaded(self) -> int:
        """Number of experts in host memory."""
        return self._config.num_experts - self.gate_up.num_experts

    @property
    def host_bytes(self) -> int:
        """Size of the reserved host memory in bytes."""
        return (self.num_offloaded + 1) * self.bytes_per_expert

    def place_of(self, expert: int) -> tuple[Sequence[ExpertMemory], int]:
        """Return where an expert is now: the memories of gate_up and of down, and its number in them."""
        slot = self._residency.slot_of(expert)
        if slot is not None:
            return (self.gate_up, self.down), slot
        return self._host, self._residency.row_of(expert)

    def finish(self) -> None:
        """Finish all storages. Raises ConfigError if an expert has another layout in host memory than on the device."""
        for storage, host in zip((self.gate_up, self.down), self._host, strict=True):
            storage.finish()
            host.finish()
            on_device, in_host = ([(t.shape, t.dtype) for t in memory.tensors(0)] for memory in (storage, host))
            if on_device != in_host:
                raise ConfigError(
                    f"experts held by {storage.formats} have another layout in host memory than on the device; "
                    "leave out --num-experts-offload-per-rank"
                )

    def forward(self, x: Tensor, logits: Tensor, biases: MoeBiases, shared: SharedOutput | None) -> Tensor:
        """Compute kernels.fused_moe, with the same bits: a product does not depend on those computed beside it."""
        expert_ids, weights = kernels.route(logits, self._config.routing, biases.router, biases.scales)
        inputs, weights = weighed(x, weights, self._config.routing)
        needed = set(expert_ids.flatten().tolist())
        # torch's own operation, so that such a step is never recorded: another step needs other experts.
        choices = expert_ids.flatten().to(torch.int64)
        products = x.new_empty(len(choices), x.shape[1])
        for wave in self._residency.waves(needed):
            for experts in self._arriving(wave):
                slots = self._slots_of(experts, x.device)[choices]
                of_slots = self._biases_of_slots(biases)
                if len(experts) == len(needed):
                    products = self._products(inputs, slots.view(expert_ids.shape), of_slots)
                    break
                here = (slots >= 0).nonzero().squeeze(1)
                rows = here if len(inputs) == len(choices) else here // expert_ids.shape[1]
                products[here] = self._products(inputs[rows], slots[here].unsqueeze(1), of_slots)
        return kernels.combine(products, weights, shared)

    def _products(self, x: Tensor, slots: Tensor, biases: MoeBiases) -> Tensor:
        """Return the output of each choice's expert: [number of choices, H]. biases: those of the slots."""
        activate = kernels.gated_activation if self._config.is_gated else kernels.activation
        activated = activate(self.gate_up.linear(x, slots, biases.gate_up), self._config.activation)
        return self.down.linear(activated, slots, biases.down)

    def _biases_of_slots(self, biases: MoeBiases) -> MoeBiases:
        """Return the biases of the experts that are on the device, in the order of their slots."""
        if biases.gate_up is None and biases.down is None:
            return biases
        experts = torch.tensor(self._residency.experts_in_slots, device=self.gate_up.tensors(0)[0].device)
        gate_up, down = (None if bias is None else bias[experts] for bias in (biases.gate_up, biases.down))
        return MoeBiases(gate_up=gate_up, down=down)

    def _arriving(self, wave: Sequence[int]) -> Iterator[Sequence[int]]:
        """Begin to copy the missing experts to the device; yield the others, and then those that were missing.

        A GPU copies in a stream of its own, so that it computes with the experts that are there meanwhile. A CPU copies
        at once, and gets all experts together.
        """
        there = [expert for expert in wave if self._residency.slot_of(expert) is not None]
        exchanges = self._residency.admit(wave)
        self.num_copies += len(exchanges)
        self.num_hits += len(there)
        if self._stream is None or not exchanges:
            self._copy(exchanges, lambda target, source: target.copy_(source))
            yield wave
            return
        # Products of an earlier step may still read the slots.
        self._stream.wait_for_current()
        self._copy(exchanges, self._stream.copy)
        copied = self._stream.mark()
        if there:
            yield there
        copied.wait_on_device()
        yield [expert for expert in wave if expert not in there]

    def _copy(self, exchanges: Sequence[Exchange], copy: Callable[[Tensor, Tensor], object]) -> None:
        """Call copy(target, source) for all tensors that trade places, in order."""
        for exchange in exchanges:
            for host, storage in zip(self._host, (self.gate_up, self.down), strict=True):
                saved, loaded = host.tensors(exchange.saved_to), host.tensors(exchange.loaded_from)
                for here, save_to, load_from in zip(storage.tensors(exchange.slot), saved, loaded, strict=True):
                    copy(save_to, here)
                    copy(here, load_from)

    def _slots_of(self, experts: Sequence[int], device: torch.device) -> Tensor:
        """Return the slot of each of these experts, which have been admitted: [E] int32, -1 for the others."""
        slots = [-1] * self._config.num_experts
        for expert in experts:
            slot = self._residency.slot_of(expert)
            assert slot is not None, "it was admitted"
            slots[expert] = slot
        return torch.tensor(slots, dtype=torch.int32, device=device)
