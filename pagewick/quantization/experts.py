"""Experts of any format, and how a layer's storage of experts is chosen. Letters as in expert_storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pagewick.errors import ConfigError
from pagewick.quantization.expert_storage import ExpertStorage
from pagewick.quantization.method import LinearMethod, StorageSpec
from pagewick.quantization.share import Share
from pagewick.quantization.weight import Weight


class SeparateExperts(ExpertStorage):
    """One Weight for each expert, multiplied one after the other. Works for all formats, also mixed ones.

    The bits of a row may depend on how many rows its expert gets, unless the method promises more.
    """

    def __init__(
        self, num_experts: int, share: Share, methods: Sequence[LinearMethod], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_experts, share, ", ".join(map(str, dict.fromkeys(methods))))
        self._methods, self._dtype = methods, dtype
        self._weights = [Weight(share, methods, dtype, device) for _ in range(num_experts)]
        self.weights = nn.ModuleList(self._weights)

    def expected(self, part: str | None) -> Iterable[str]:
        return [name for owner, name in self._weights[0].expected() if owner == part]

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self._weights[expert].load(part, name, tensor)

    def finish(self) -> None:
        for weight in self._weights:
            weight.finish()

    def tensors(self, expert: int) -> Sequence[Tensor]:
        return list(self._weights[expert].parameters())

    def linear(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        choices = expert_ids.flatten()
        rows = x if len(x) == len(choices) else x.repeat_interleave(expert_ids.shape[1], dim=0)
        out = x.new_empty(len(choices), self.share.num_rows)
        for expert in sorted(set(choices.tolist())):
            is_of_expert = choices == expert
            out[is_of_expert] = self._weights[expert].linear(rows[is_of_expert])
        return out

    def in_host_memory(self, count: int) -> SeparateExperts:
        return SeparateExperts(count, self.share, self._methods, self._dtype, torch.device("cpu"))


def make_experts(
    num_experts: int, share: Share, methods: Sequence[LinearMethod], dtype: torch.dtype, device: torch.device
) -> ExpertStorage:
    """Make the storage of a weight of every expert. methods: one for each part of the share."""
    if len(set(methods)) == 1:
        parts = tuple((part.name, part.num_kept) for part in share.parts)
        spec = StorageSpec(parts, share.num_columns, dtype, device)
        together = methods[0].create_experts(num_experts, share, spec)
        if together is not None:
            return together
    return SeparateExperts(num_experts, share, methods, dtype, device)


def common_method(prefix: str, methods: Iterable[LinearMethod]) -> LinearMethod:
    """Return the one method of all experts of a layer. Raises ConfigError if they differ.

    prefix: the checkpoint name of the module that holds the experts.
    """
    found = dict.fromkeys(methods)
    if len(found) > 1:
        raise ConfigError(
            f"{prefix}: the same weight has different formats in different experts ({', '.join(map(str, found))}), "
            "which is not supported; use a checkpoint that stores all experts of a layer alike"
        )
    return next(iter(found))
