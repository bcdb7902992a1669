"""ExpertStorage: one weight of every expert of a layer, and the layer's arithmetic with two of these.

T: tokens; A: experts of a token; E: experts; H: size of their inputs and outputs. A choice is one of a token's experts;
see kernels/reference_moe.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.expert_routing import Routing
from pagewick.kernels.options import NO_BIASES, Identities, MoeBiases, SharedOutput
from pagewick.kernels.reference_moe import products_or_inputs, weighed, with_weights
from pagewick.quantization.share import Share

# Pinned memory is allocated in powers of two; a piece for at least this number of tensors wastes little of it.
_MIN_TENSORS_PER_PIECE = 8


class MoeOptions(TypedDict, total=False):
    """Options of kernels.fused_moe."""

    activation: str
    biases: MoeBiases
    shared: SharedOutput | None
    identities: Identities | None


class ExpertMemory(ABC):
    """Memory for the weights of experts, which are loaded into it and moved, but perhaps not multiplied there."""

    @abstractmethod
    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        """Keep this rank's share of one expert's checkpoint tensor. Raises ModelLoadError if it does not fit."""

    @abstractmethod
    def tensors(self, expert: int) -> Sequence[Tensor]:
        """Return the tensors that store an expert, to be copied to another place of the same layout."""

    def finish(self) -> None:  # noqa: B027 - most formats have nothing to do
        """Called once, after everything is loaded. Default: do nothing."""


class ExpertStorage(nn.Module, ExpertMemory):
    """A weight of each of num_experts experts, all of the same sizes.

    share: a rank's share of the weight of one expert. formats: names of the formats of its parts, for messages.
    """

    def __init__(self, num_experts: int, share: Share, formats: str) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.share = share
        self.formats = formats

    @property
    def bytes_per_expert(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors(0))

    @abstractmethod
    def expected(self, expert: int, part: str | None) -> Iterable[str]:
        """Return the leaves of an expert's checkpoint tensors for a part."""

    @abstractmethod
    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return the product of each choice with its expert's weight, plus its bias: [T * A, out_features].

        x: [T, in_features], or [T * A, in_features] with a row for each choice; expert_ids: [T, A] int32. bias:
        [num_experts, out_features]. out: a tensor to write the result to; its rows may lie apart.
        """

    @abstractmethod
    def in_host_memory(self, count: int) -> ExpertMemory:
        """Allocate host memory for `count` experts, in the same layout. Raises RuntimeError if there is too little."""

    def fused_moe(
        self, down: ExpertStorage, x: Tensor, logits: Tensor, routing: Routing, **options: Unpack[MoeOptions]
    ) -> Tensor:
        """Compute kernels.fused_moe, [T, H], with this weight for the first product and `down` for the second.

        Default: one operation after the other.
        """
        biases = options.get("biases", NO_BIASES)
        identities = options.get("identities")
        chosen_ids, weights = kernels.route(logits, routing, biases.router, biases.scales)
        expert_ids = with_weights(chosen_ids, identities, self.num_experts)
        x, weights = weighed(x, weights, routing)
        first = self.linear(x, expert_ids, biases.gate_up)
        is_gated = self.share.num_rows == 2 * down.share.num_columns
        activate = kernels.gated_activation if is_gated else kernels.activation
        activated = activate(first, options.get("activation", "silu"))
        products = down.linear(activated, expert_ids, biases.down)
        products = products_or_inputs(products, chosen_ids, identities, self.num_experts)
        return kernels.combine(products, weights, options.get("shared"))


def host_tensors(count: int, shape: torch.Size, dtype: torch.dtype, *, is_pinned: bool) -> list[Tensor]:
    """Allocate `count` tensors of a shape in host memory. Raises RuntimeError if there is too little."""
    num_bytes = max(1, shape.numel() * dtype.itemsize)
    per_piece = (1 << (_MIN_TENSORS_PER_PIECE * num_bytes - 1).bit_length()) // num_bytes
    found: list[Tensor] = []
    for first in range(0, count, per_piece):
        size = min(per_piece, count - first)
        found += torch.empty((size, *shape), dtype=dtype, pin_memory=is_pinned).unbind()
    return found
