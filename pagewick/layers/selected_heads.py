"""Attention in which each KV head's queries see a selection of blocks of their own.

T: tokens of a batch; D: head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch, GroupBatch
from pagewick.kernels.options import HeadOptions, SelectedKeys
from pagewick.layers.attention import Attention
from pagewick.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class SelectedBatch:
    """An AttentionBatch in which each token is a sequence, whose blocks are those that it sees."""

    cu_seqlens_q: Tensor
    context_lens: Tensor
    groups: Sequence[GroupBatch]
    key_ends: None = None
    window_key_ends: None = None

    @classmethod
    def of(cls, batch: AttentionBatch, group: int, selected: SelectedKeys) -> SelectedBatch:
        groups = list(batch.groups)
        groups[group] = GroupBatch(groups[group].slot_mapping, selected.slots)
        return cls(selected.starts, selected.counts, groups)


class SelectedHeads(nn.Module):
    """Queries, keys and values of this rank's heads -> [T, num_heads, D]. Each KV head has a cache of its own."""

    def __init__(
        self, context: LayerContext, num_heads: int, num_kv_heads: int, head_dim: int, softmax_scale: float
    ) -> None:
        super().__init__()
        shared = num_heads // num_kv_heads
        self._each = [Attention(context, shared, 1, head_dim, softmax_scale) for _ in range(num_kv_heads)]
        self.heads = nn.ModuleList(self._each)
        ids = torch.arange(num_heads + 2 * num_kv_heads)
        queries, keys, values = torch.split(ids, [num_heads, num_kv_heads, num_kv_heads])
        self._columns = []
        for head in range(num_kv_heads):
            mine = torch.cat(
                (queries[head * shared : (head + 1) * shared], keys[head : head + 1], values[head : head + 1])
            )
            self._columns.append((mine[:, None] * head_dim + torch.arange(head_dim)).flatten().to(context.device))

    @property
    def group(self) -> int:
        """The cache group of keys and values."""
        return self._each[0].group

    def forward_fused(
        self, qkv: Tensor, batch: AttentionBatch, options: HeadOptions, selected: Sequence[SelectedKeys]
    ) -> Tensor:
        """Do what Attention.forward_fused does, where a token sees what is selected for the KV head of its queries."""
        found = [
            attention.forward_fused(
                kernels.gather_columns(qkv, columns), SelectedBatch.of(batch, self.group, chosen), options
            )
            for attention, columns, chosen in zip(self._each, self._columns, selected, strict=True)
        ]
        return torch.cat(found, dim=1)
