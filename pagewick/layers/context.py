"""The arguments that all layers share: LayerContext when they are built, LayerBatch in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pagewick.attention.backend import AttentionBackend, AttentionBatch
from pagewick.layers.config import padded_rank
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.method import LinearMethod
from pagewick.quantization.share import Share
from pagewick.quantization.weight import Weight


class LayerBatch(Protocol):
    """The sequences to which the rows of a layer's input belong.

    cu_seqlens_q: [B + 1] int32; sequence i of B has the rows from cu_seqlens_q[i] up to cu_seqlens_q[i + 1].
    adapter_ids: the LoRA adapter of each row's sequence, as in LoraLayer.add_to; None: no sequence has one.
    """

    @property
    def cu_seqlens_q(self) -> Tensor: ...

    @property
    def adapter_ids(self) -> Tensor | None: ...


class BlockBatch(LayerBatch, AttentionBatch, Protocol):
    """The part of a batch that a layer of the decoder reads."""


class TokenBatch(BlockBatch, Protocol):
    """A batch for layers that read more of tokens than hidden states: ids [T], positions [P, T]; P is 1 or 3."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A LayerBatch of some of a batch's rows, in the same order, such as those whose logits are needed.

    num_rows: number of rows of each sequence of the batch; may be 0. device: the batch's. adapter_ids: None, since the
    vocabulary head, the only layer that gets such rows, has no adapters.
    """

    num_rows: Sequence[int]
    device: torch.device
    adapter_ids: Tensor | None = None

    @property
    def cu_seqlens_q(self) -> Tensor:
        """The boundaries of the sequences; computed on demand, because few layers need them."""
        ends = accumulate(self.num_rows, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """Room for adapters on every rank: their number, and the largest rank that one of them may have."""

    num_adapters: int
    max_rank: int

    @property
    def padded_rank(self) -> int:
        return padded_rank(self.max_rank)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Passed through a model's constructors, which need not know its contents.

    dtype: data type of weights and activations. backend: stores the KV cache. max_model_len: tokens of the longest
    sequence.
    choose_method: returns the LinearMethod of a weight, given its checkpoint name without `.weight`.
    tp_rank, tp_size: this rank's share of each layer, and the number of shares.
    num_experts_offload_per_rank: experts of each layer in host memory, divided by tp_size.
    lora: room for adapters of linear layers; None: there are none.
    """

    dtype: torch.dtype
    device: torch.device
    collectives: Collectives
    backend: AttentionBackend
    choose_method: Callable[[str], LinearMethod]
    max_model_len: int
    num_experts_offload_per_rank: int = 0
    lora: LoraRoom | None = None

    @property
    def tp_rank(self) -> int:
        return self.collectives.tp_rank

    @property
    def tp_size(self) -> int:
        return self.collectives.tp_size

    def elsewhere(self) -> LayerContext:
        """Return the context of layers that another rank holds: they have names and shapes here, and no memory."""
        return replace(self, device=torch.device("meta"), num_experts_offload_per_rank=0)

    def zero_row(self, size: int) -> Tensor:
        """Return zeros [1, size] of the activations' dtype."""
        return torch.zeros(1, size, dtype=self.dtype, device=self.device)

    def make_weight(
        self, prefix: str, share: Share, *, is_multiplied: bool = True, has_float32_sums: bool = False
    ) -> Weight:
        """Make a layer's weight, not yet loaded; the options are those of StorageSpec.

        prefix: the layer's checkpoint name, or, if the share's parts have names, that of the module that holds them.
        """
        names = [prefix if part.name is None else f"{prefix}.{part.name}" for part in share.parts]
        return Weight(
            share,
            [self.choose_method(name) for name in names],
            self.dtype,
            self.device,
            is_multiplied=is_multiplied,
            has_float32_sums=has_float32_sums,
        )
