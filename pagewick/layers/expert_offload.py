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
from pagewick.kernels import Experts
from pagewick.kernels.matrix import Matrix
from pagewick.layers.context import LayerContext
from pagewick.layers.moe_config import MoeConfig

# Pinned memory comes in powers of two: of a piece for so many rows or more, little is left over.
_MIN_ROWS_PER_PIECE = 8


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
    """A layer's experts, of which num_experts_offload_per_rank times the number of ranks are in host memory.

    num_rows, num_columns: of this rank's share of an expert's second product; the first one has 2 * num_columns rows.
    num_hits, num_copies: how often an expert that a step needed was on the device, and was copied there.
    Raises ConfigError if fewer experts were left on the device than a token uses, or host memory is not there.
    """

    def __init__(self, context: LayerContext, config: MoeConfig, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self._config = config
        num_offloaded = config.num_offloaded(context.num_experts_offload_per_rank, context.tp_size)
        num_slots = config.num_experts - num_offloaded
        self._residency = Residency(config.num_experts, num_slots)
        self.gate_up = Experts.empty(num_slots, 2 * num_columns, num_rows, context.dtype, context.device)
        self.down = Experts.empty(num_slots, num_rows, num_columns, context.dtype, context.device)
        self.gate_up_weight = nn.Parameter(self.gate_up.data, requires_grad=False)
        self.down_weight = nn.Parameter(self.down.data, requires_grad=False)
        # Of gate_up and of down, the rows of host memory in the same layout.
        self._host = [
            _host_rows(num_offloaded + 1, experts.data[0].shape, context) for experts in (self.gate_up, self.down)
        ]
        self.num_hits = self.num_copies = 0

    @property
    def bytes_per_expert(self) -> int:
        """What a copy of an expert to the device moves; as much goes back to host memory."""
        return self.gate_up.data[0].nbytes + self.down.data[0].nbytes

    @property
    def num_offloaded(self) -> int:
        """Experts in host memory."""
        return self._config.num_experts - self.gate_up.num_experts

    @property
    def host_bytes(self) -> int:
        """Host memory set aside, in bytes."""
        return (self.num_offloaded + 1) * self.bytes_per_expert

    @property
    def num_uncounted_parameters(self) -> int:
        """Those in host memory, less what packed weights on the device are padded with."""
        size = self.gate_up.num_rows * self.gate_up.num_columns + self.down.num_rows * self.down.num_columns
        return self._config.num_experts * size - self.gate_up.data.numel() - self.down.data.numel()

    def matrices(self, expert: int) -> tuple[Matrix, Matrix]:
        """gate_up and down of an expert, where they are now."""
        slot = self._residency.slot_of(expert)
        if slot is not None:
            return self.gate_up.matrix(slot), self.down.matrix(slot)
        row = self._residency.row_of(expert)
        gate_up, down = (
            Matrix(rows[row], experts.num_rows, experts.num_columns, experts.is_packed)
            for rows, experts in zip(self._host, (self.gate_up, self.down), strict=True)
        )
        return gate_up, down

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
        return kernels.combine(products, weights, shared, shared_gate)

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
            for rows, experts in zip(self._host, (self.gate_up, self.down), strict=True):
                slot = experts.data[exchange.slot]
                rows[exchange.saved_to].copy_(slot, non_blocking=slot.is_cuda)
                slot.copy_(rows[exchange.loaded_from], non_blocking=slot.is_cuda)

    def _slots_of(self, wave: Sequence[int], device: torch.device) -> Tensor:
        """[E] int32: an expert's slot, -1 if it is not of the wave."""
        slots = [-1] * self._config.num_experts
        for expert in wave:
            slot = self._residency.slot_of(expert)
            assert slot is not None, "it was admitted"
            slots[expert] = slot
        return torch.tensor(slots, dtype=torch.int32, device=device)


def _host_rows(count: int, shape: torch.Size, context: LayerContext) -> list[Tensor]:
    """`count` tensors of a shape in host memory, pinned beside a CUDA device. Raises ConfigError if it is not there."""
    is_pinned = context.device.type == "cuda"
    row_bytes = max(1, shape.numel() * context.dtype.itemsize)
    per_piece = (1 << (_MIN_ROWS_PER_PIECE * row_bytes - 1).bit_length()) // row_bytes
    rows: list[Tensor] = []
    try:
        for first in range(0, count, per_piece):
            size = min(per_piece, count - first)
            rows += torch.empty((size, *shape), dtype=context.dtype, pin_memory=is_pinned).unbind()
    except RuntimeError as error:
        kind = "pinned host memory" if is_pinned else "host memory"
        raise ConfigError(
            f"there are no {count * row_bytes} bytes of {kind} for {count - 1} experts of a layer; lower "
            "--num-experts-offload-per-rank"
        ) from error
    return rows
