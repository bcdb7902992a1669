"""The same weight of every expert of a layer, and the whole layer's arithmetic with two of them.

T: tokens; A: experts of a token; E: experts; H: hidden_size. A choice is one of a token's experts; see
kernels/reference_moe.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ConfigError
from pagewick.expert_routing import Routing
from pagewick.kernels import MoeBiases, SharedOutput
from pagewick.kernels.options import NO_BIASES
from pagewick.quantization.method import LinearMethod, StorageSpec
from pagewick.quantization.share import Share
from pagewick.quantization.weight import Weight

# Pinned memory comes in powers of two: of a piece for so many tensors or more, little is left over.
_MIN_TENSORS_PER_PIECE = 8


class MoeOptions(TypedDict, total=False):
    """Options of kernels.fused_moe."""

    activation: str
    biases: MoeBiases
    shared: SharedOutput | None


class ExpertMemory(Protocol):
    """Where weights of experts lie that are loaded and moved there, but perhaps not multiplied."""

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        """Keep this rank's share of one expert's checkpoint tensor. Raises ModelLoadError if it does not fit."""
        ...

    def finish(self) -> None:
        """Once, after everything is loaded."""
        ...

    def tensors(self, expert: int) -> Sequence[Tensor]:
        """All that is stored of an expert, to be copied to another place of the same layout."""
        ...


class ExpertStorage(nn.Module, ABC):
    """A weight of each of num_experts experts, all of the same sizes and formats, as an ExpertMemory.

    share: a rank's share of the weight of one expert. methods: of the parts of the share.
    """

    def __init__(self, num_experts: int, share: Share, methods: Sequence[LinearMethod]) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.share = share
        self.methods = tuple(methods)

    @property
    def bytes_per_expert(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors(0))

    @abstractmethod
    def expected(self, part: str | None) -> Iterable[str]:
        """The leaves of the checkpoint tensors of a part, for each expert."""

    @abstractmethod
    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        """As ExpertMemory.load."""

    def finish(self) -> None:
        """As ExpertMemory.finish. Default: nothing."""

    @abstractmethod
    def tensors(self, expert: int) -> Sequence[Tensor]:
        """As ExpertMemory.tensors."""

    @abstractmethod
    def linear(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """The product of each choice with its expert's weight: [T * A, out_features].

        x: [T, in_features], or [T * A, in_features] with a row for each choice; expert_ids: [T, A] int32.
        """

    @abstractmethod
    def in_host_memory(self, count: int) -> ExpertMemory:
        """Room for `count` experts in host memory, laid out as here. Raises RuntimeError if there is not so much."""

    def fused_moe(
        self, down: ExpertStorage, x: Tensor, logits: Tensor, routing: Routing, **options: Unpack[MoeOptions]
    ) -> Tensor:
        """A layer whose first product is this one and whose second one is `down`, as kernels.fused_moe: [T, H].

        Default: one operation after the other.
        """
        expert_ids, weights = kernels.route(logits, routing, options.get("biases", NO_BIASES).router)
        activated = kernels.gated_activation(self.linear(x, expert_ids), options.get("activation", "silu"))
        return kernels.combine(down.linear(activated, expert_ids), weights, options.get("shared"))


class SeparateExperts(ExpertStorage):
    """For all formats, and parts of different formats: a Weight for each expert, multiplied one after the other.

    Bits of a row are as good as the method's: they may depend on how many rows an expert gets.
    """

    def __init__(
        self,
        num_experts: int,
        share: Share,
        methods: Sequence[LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_experts, share, methods)
        self._dtype = dtype
        self.weights = nn.ModuleList(Weight(share, methods, dtype, device) for _ in range(num_experts))

    def expected(self, part: str | None) -> Iterable[str]:
        return [name for owner, name in self._weight(0).expected() if owner == part]

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self._weight(expert).load(part, name, tensor)

    def finish(self) -> None:
        for expert in range(self.num_experts):
            self._weight(expert).finish()

    def tensors(self, expert: int) -> Sequence[Tensor]:
        return list(self.weights[expert].parameters())

    def linear(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        choices = expert_ids.flatten()
        rows = x if len(x) == len(choices) else x.repeat_interleave(expert_ids.shape[1], dim=0)
        out = x.new_empty(len(choices), self.share.num_rows)
        for expert in sorted(set(choices.tolist())):
            is_of_expert = choices == expert
            out[is_of_expert] = self._weight(expert).linear(rows[is_of_expert])
        return out

    def in_host_memory(self, count: int) -> SeparateExperts:
        return SeparateExperts(count, self.share, self.methods, self._dtype, torch.device("cpu"))

    def _weight(self, expert: int) -> Weight:
        weight = self.weights[expert]
        assert isinstance(weight, Weight)
        return weight


def make_experts(
    num_experts: int, share: Share, methods: Sequence[LinearMethod], dtype: torch.dtype, device: torch.device
) -> ExpertStorage:
    """Room for a weight of each expert; methods: of the parts of the share, the same for every expert."""
    if len(set(methods)) == 1:
        parts = tuple((part.name, part.num_kept) for part in share.parts)
        spec = StorageSpec(parts, share.num_columns, dtype, device)
        together = methods[0].create_experts(num_experts, share, spec)
        if together is not None:
            return together
    return SeparateExperts(num_experts, share, methods, dtype, device)


def common_method(prefix: str, methods: Iterable[LinearMethod]) -> LinearMethod:
    """The method of all experts of a layer. Raises ConfigError if they differ.

    prefix: the checkpoint name of the module that holds the experts.
    """
    found = dict.fromkeys(methods)
    if len(found) > 1:
        raise ConfigError(
            f"{prefix}: the same weight has different formats in different experts ({', '.join(map(str, found))}), "
            "which is not supported; use a checkpoint that stores all experts of a layer alike"
        )
    return next(iter(found))


def host_tensors(count: int, shape: torch.Size, dtype: torch.dtype, *, is_pinned: bool) -> list[Tensor]:
    """`count` tensors of a shape in host memory. Raises RuntimeError if there is not so much."""
    num_bytes = max(1, shape.numel() * dtype.itemsize)
    per_piece = (1 << (_MIN_TENSORS_PER_PIECE * num_bytes - 1).bit_length()) // num_bytes
    found: list[Tensor] = []
    for first in range(0, count, per_piece):
        size = min(per_piece, count - first)
        found += torch.empty((size, *shape), dtype=dtype, pin_memory=is_pinned).unbind()
    return found
