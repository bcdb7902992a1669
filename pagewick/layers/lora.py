"""LoRA adapters of linear layers: a row x gets B (A x) in addition, with the factors A and B of its sequence's adapter.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (https://arxiv.org/abs/2106.09685). The factor
alpha / r of the paper is a part of B here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewick.kernels import add_low_rank
from pagewick.kernels.matrix import Experts
from pagewick.layers.context import LoraRoom
from pagewick.quantization.share import Share

LoraFactors = tuple[Tensor, Tensor]
"""The whole factors A [r, in_features] and B [out_features, r] of a weight of a checkpoint; B is scaled."""


class LoraLayer:
    """The factors of all adapters for one linear layer, this rank's share of them.

    share: the layer's. Each part of a fused layer has factors of its own. They lie in one A of all parts, one above the
    other, and one B that is 0 outside the blocks on its diagonal: two products serve all parts. is_elsewhere: whether
    another rank holds the layer.
    """

    def __init__(self, share: Share, room: LoraRoom, dtype: torch.dtype, device: torch.device) -> None:
        self._share, self._rank = share, room.padded_rank
        width = self._rank * len(share.parts)
        # The last adapter, which stays 0, is that of sequences without one.
        count = room.num_adapters + 1
        self._down = Experts.empty(count, width, share.num_columns, dtype, device)
        self._up = Experts.empty(count, share.num_rows, width, dtype, device)
        if device.type != "cpu":
            self._down.data.zero_()
            self._up.data.zero_()
        # A rank may have no share of a layer.
        self.is_elsewhere = device.type == "meta"
        self._has_share = bool(share.num_rows and share.num_columns)
        self._used: set[int] = set()

    @property
    def num_numbers(self) -> int:
        """Numbers in the room for all adapters, that for none included."""
        return sum(one.num_experts * one.num_rows * one.num_columns for one in (self._down, self._up))

    @property
    def is_used(self) -> bool:
        """Whether any adapter changes this layer."""
        return bool(self._used)

    def load(self, adapter: int, factors: Mapping[str | None, LoraFactors]) -> None:
        """Store the factors of an adapter, by part; parts without factors, and layers without any, do not change.

        adapter: its number, below room.num_adapters. The factors' shapes are those of the parts, and their rank is at
        most room.max_rank.
        """
        if not factors and adapter not in self._used:
            return
        first, last = self._share.columns
        down = torch.zeros(self._down.num_rows, last - first)
        up = torch.zeros(self._up.num_rows, self._up.num_columns)
        row = 0
        for number, part in enumerate(self._share.parts):
            if (given := factors.get(part.name)) is not None:
                (a, b), begin = given, number * self._rank
                down[begin : begin + len(a)] = a[:, first:last]
                kept = torch.cat([b[start:stop] for start, stop in part.ranges])
                up[row : row + part.num_kept, begin : begin + len(a)] = kept
            row += part.num_kept
        self._down.load(adapter, down, 0)
        self._up.load(adapter, up, 0)
        self._used = self._used | {adapter} if factors else self._used - {adapter}

    def add_to(self, y: Tensor, x: Tensor, adapter_ids: Tensor) -> Tensor:
        """Return y [T, out_features] with the adapters' changes for x [T, in_features].

        adapter_ids: [T] int32, the number of each row's adapter; room.num_adapters for a row without one, which keeps
        its values.
        """
        return add_low_rank(y, x, self._down, self._up, adapter_ids) if self._used and self._has_share else y
