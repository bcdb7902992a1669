"""What layers are given: LayerContext when they are built, LayerBatch with every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pagewick.attention.backend import AttentionBackend
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.method import LinearMethod
from pagewick.quantization.share import Share
from pagewick.quantization.weight import Weight


class LayerBatch(Protocol):
    """What every layer may know of the step: to which of its B sequences the rows belong that the layer is given.

    cu_seqlens_q: [B + 1] int32; the rows of sequence i are cu_seqlens_q[i] to cu_seqlens_q[i + 1].
    """

    @property
    def cu_seqlens_q(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Some of a batch's rows, in its order, such as those whose logits are wanted: a LayerBatch.

    num_rows: how many of each sequence of the batch, which may be none. device: the batch's.
    """

    num_rows: Sequence[int]
    device: torch.device

    @property
    def cu_seqlens_q(self) -> Tensor:
        """Made when a layer asks for it, which few do."""
        ends = accumulate(self.num_rows, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Passed down through a model's constructors, which need not know what it holds.

    dtype: of weights and activations. backend: decides how the KV cache is stored. max_model_len: tokens of the longest
    sequence.
    choose_method: how the weight of a checkpoint name (without `.weight`) is held.
    tp_rank, tp_size: which share of each layer is this rank's, and how many shares there are.
    num_experts_offload_per_rank: times tp_size, so many experts of a layer are in host memory.
    """

    dtype: torch.dtype
    device: torch.device
    collectives: Collectives
    backend: AttentionBackend
    choose_method: Callable[[str], LinearMethod]
    max_model_len: int
    num_experts_offload_per_rank: int = 0

    @property
    def tp_rank(self) -> int:
        return self.collectives.tp_rank

    @property
    def tp_size(self) -> int:
        return self.collectives.tp_size

    def make_weight(
        self, prefix: str, share: Share, *, is_multiplied: bool = True, has_float32_sums: bool = False
    ) -> Weight:
        """Room for a layer's weight; the options are those of StorageSpec.

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
