"""Experts of any format, and how a layer's storage of experts is chosen. Letters as in expert_storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ConfigError
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage
from pagewick.quantization.method import LinearMethod, StorageSpec
from pagewick.quantization.share import Share
from pagewick.quantization.weight import Weight


class SeparateExperts(ExpertStorage):
    """One Weight for each expert, multiplied one after the other. Works for all formats.

    The bits of a row may depend on how many rows its expert gets, unless the method promises more.
    """

    def __init__(
        self, num_experts: int, share: Share, methods: Sequence[LinearMethod], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_experts, share, _names(methods))
        self._methods, self._dtype = methods, dtype
        self._weights = [Weight(share, methods, dtype, device) for _ in range(num_experts)]
        self.weights = nn.ModuleList(self._weights)

    def expected(self, expert: int, part: str | None) -> Iterable[str]:
        return [name for owner, name in self._weights[0].expected() if owner == part]

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self._weights[expert].load(part, name, tensor)

    def finish(self) -> None:
        for weight in self._weights:
            weight.finish()

    def tensors(self, expert: int) -> Sequence[Tensor]:
        return list(self._weights[expert].parameters())

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        choices = expert_ids.flatten()
        rows = x if len(x) == len(choices) else x.repeat_interleave(expert_ids.shape[1], dim=0)
        out = x.new_empty(len(choices), self.share.num_rows) if out is None else out
        for expert in sorted(set(choices.tolist())):
            is_of_expert = choices == expert
            own = None if bias is None else bias[expert]
            out[is_of_expert] = self._weights[expert].linear(rows[is_of_expert], own)
        return out

    def in_host_memory(self, count: int) -> SeparateExperts:
        return SeparateExperts(count, self.share, self._methods, self._dtype, torch.device("cpu"))


class MemoryOfParts(ExpertMemory):
    """Memory for experts whose parts lie apart. memories: by part, in their order; several parts may have the same."""

    def __init__(self, memories: Mapping[str | None, ExpertMemory]) -> None:
        self.memories = memories
        self._each = list(dict.fromkeys(memories.values()))

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self.memories[part].load(expert, part, name, tensor)

    def finish(self) -> None:
        for memory in self._each:
            memory.finish()

    def tensors(self, expert: int) -> Sequence[Tensor]:
        return [tensor for memory in self._each for tensor in memory.tensors(expert)]


class StackedExperts(MemoryOfParts, ExpertStorage):
    """Experts whose parts have different formats. storages: of neighbouring parts with one format, from top to bottom.

    Each storage is a product of its own, so that a row has the bits that the storages give its parts.
    """

    def __init__(self, share: Share, storages: Sequence[ExpertStorage]) -> None:
        formats = _names(storage.formats for storage in storages)
        ExpertStorage.__init__(self, storages[0].num_experts, share, formats)
        self._storages = {part.name: storage for storage in storages for part in storage.share.parts}
        MemoryOfParts.__init__(self, self._storages)
        self.storages = nn.ModuleList(storages)

    def expected(self, expert: int, part: str | None) -> Iterable[str]:
        return self._storages[part].expected(expert, part)

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = kernels.empty_result((expert_ids.numel(), self.share.num_rows), x.dtype, x.device)
        start = 0
        for storage in dict.fromkeys(self._storages.values()):
            stop = start + storage.share.num_rows
            of_parts = None if bias is None else bias[:, start:stop].contiguous()
            storage.linear(x, expert_ids, of_parts, out=out[:, start:stop])
            start = stop
        return out

    def in_host_memory(self, count: int) -> MemoryOfParts:
        found = {storage: storage.in_host_memory(count) for storage in self._storages.values()}
        return MemoryOfParts({part: found[storage] for part, storage in self._storages.items()})


class MixedExperts(ExpertStorage):
    """Experts of different formats, as in the first files of Mixtral. storages: the experts of each format, by number.

    A step's choices are divided by format, so that it cannot be recorded. Such experts cannot be moved to host memory.
    """

    def __init__(self, share: Share, storages: Sequence[tuple[Sequence[int], ExpertStorage]]) -> None:
        places = {expert: (storage, place) for ids, storage in storages for place, expert in enumerate(ids)}
        super().__init__(len(places), share, _names(storage.formats for _, storage in storages))
        self._places = places
        self.storages = nn.ModuleList(storage for _, storage in storages)
        self._storages = storages

    def expected(self, expert: int, part: str | None) -> Iterable[str]:
        storage, place = self._places[expert]
        return storage.expected(place, part)

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        storage, place = self._places[expert]
        storage.load(place, part, name, tensor)

    def finish(self) -> None:
        for _, storage in self._storages:
            storage.finish()

    def tensors(self, expert: int) -> Sequence[Tensor]:
        storage, place = self._places[expert]
        return storage.tensors(place)

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        choices = expert_ids.flatten()
        choices_per_row = len(choices) // max(1, len(x))
        out = x.new_empty(len(choices), self.share.num_rows) if out is None else out
        for ids, storage in self._storages:
            # Places of the experts of this format; -1 for the others.
            places = choices.new_full((self.num_experts,), -1)
            places[list(ids)] = torch.arange(len(ids), dtype=choices.dtype, device=choices.device)
            of_choices = places[choices]
            found = (of_choices >= 0).nonzero().squeeze(1)
            if len(found):
                own = None if bias is None else bias[list(ids)]
                out[found] = storage.linear(x[found // choices_per_row], of_choices[found].unsqueeze(1), own)
        return out

    def in_host_memory(self, count: int) -> ExpertMemory:
        raise ConfigError(
            f"the experts of a layer have different formats ({self.formats}), so that they cannot trade places; "
            "leave out --num-experts-offload-per-rank"
        )


def make_experts(
    num_on_device: int,
    share: Share,
    methods: Sequence[tuple[LinearMethod, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertStorage:
    """Make the storage of a weight of the experts that are on the device.

    methods: for each expert of the layer, one for each part of the share.
    """
    experts_of: dict[tuple[LinearMethod, ...], list[int]] = {}
    for expert, of_expert in enumerate(methods):
        experts_of.setdefault(of_expert, []).append(expert)
    if len(experts_of) == 1:
        return _experts_alike(num_on_device, share, methods[0], dtype, device)
    return MixedExperts(
        share, [(ids, _experts_alike(len(ids), share, kind, dtype, device)) for kind, ids in experts_of.items()]
    )


def _experts_alike(
    num_experts: int, share: Share, methods: Sequence[LinearMethod], dtype: torch.dtype, device: torch.device
) -> ExpertStorage:
    """Make the storage of experts that have the same formats. methods: one for each part of the share."""
    storages = []
    for method, pairs in groupby(zip(methods, share.parts, strict=True), key=lambda pair: pair[0]):
        parts = tuple(part for _, part in pairs)
        of_parts = Share(parts, share.in_features, share.columns)
        kept = tuple((part.name, part.num_kept) for part in parts)
        spec = StorageSpec(kept, share.num_columns, dtype, device, first_column=share.columns[0])
        together = method.create_experts(num_experts, of_parts, spec)
        storages.append(together or SeparateExperts(num_experts, of_parts, [method] * len(parts), dtype, device))
    return storages[0] if len(storages) == 1 else StackedExperts(share, storages)


def _names(formats: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, formats)))
