"""LayerContext: what every layer of one model on one rank is built with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagewick.attention.backend import AttentionBackend
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.method import LinearMethod


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Passed down through a model's constructors, which need not know what it holds.

    dtype, cache_dtype: of weights and activations; of the KV cache. max_model_len: tokens of the longest sequence.
    choose_method: how the linear layer of a checkpoint name (without `.weight`) holds its weight.
    tp_rank, tp_size: which share of each layer is this rank's, and how many shares there are.
    num_experts_offload_per_rank: times tp_size, so many experts of a layer are in host memory.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
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
