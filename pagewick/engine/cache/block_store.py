"""BlockStore: moves the contents of KV blocks between the pool on the device, host memory and disk, as a plan says.

L: layers of a cache group. B: bytes of a block in one layer. In host memory and on disk, a block consists of its L
layers one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.batch import Tier, Transfer
from pagewick.engine.cache.disk_store import DiskStore
from pagewick.engine.device_copies import upload
from pagewick.engine.progress import Progress
from pagewick.engine.streams import stream_of
from pagewick.errors import ConfigError

# Upper limit for a batch, and so for temporary copies, unless a single block is larger.
_MAX_BATCH_BYTES = 64 * 2**20
# Rows of host memory [L * B].
_Rows = Tensor | list[Tensor]
# Seconds that a disk, or a network file system, may take for a single block.
DISK_ALLOWED_S = 60.0


class BlockStore:
    """The blocks of one rank in all tiers.

    caches: [group][layer], each [number of blocks, B] uint8, all on `device`. A group may have no layers here, if other
    ranks have them; its blocks are empty. num_host_blocks: per group. Host memory is pinned for a CUDA device, else
    committed when a block is first used. Raises ConfigError if there is too little.
    progress: is marked at every block of a disk and every other batch.
    """

    def __init__(
        self,
        caches: Sequence[Sequence[Tensor]],
        num_host_blocks: Sequence[int],
        disk: DiskStore | None,
        progress: Progress | None = None,
        device: torch.device | None = None,
    ) -> None:
        """device: None: that of the caches, of which there is at least one."""
        self._caches = [list(layers) for layers in caches]
        self._device = device or caches[0][0].device
        self._is_cuda = self._device.type == "cuda"
        self._stream = stream_of(self._device)
        # Many small copies to another device are slow: the layers of a block are first put together there.
        self._is_staged = self._device.type != "cpu"
        self._block_bytes = [sum(cache.shape[1] for cache in layers) for layers in self._caches]
        self._disk = disk
        self._progress = progress or Progress.private()
        self._host = [self._host_memory(num_blocks, group) for group, num_blocks in enumerate(num_host_blocks)]

    @property
    def host_bytes(self) -> int:
        """Host memory set aside for blocks, in bytes."""
        return sum(len(memory) * size for memory, size in zip(self._host, self._block_bytes, strict=False))

    def run(self, transfers: Sequence[Transfer]) -> list[bytes]:
        """Do the transfers, with the outcome of doing one after the other; a GPU may do them later, before any step.

        Return the keys that could not be read from disk, each once. The contents of their destinations are undefined.
        """
        unreadable: dict[bytes, None] = {}
        for batch in batches(transfers, [max(1, _MAX_BATCH_BYTES // max(1, size)) for size in self._block_bytes]):
            uses_disk = Tier.DISK in (batch[0].source_tier, batch[0].destination_tier)
            self._progress.expect(DISK_ALLOWED_S if uses_disk else 0.0)
            unreadable |= dict.fromkeys(self._move(batch))
        self._progress.expect()
        return list(unreadable)

    def publish(self) -> None:
        """Wait until other servers can read what was written to the disk that they share."""
        assert self._disk is not None, "only servers that share a disk publish blocks"
        self._progress.expect(DISK_ALLOWED_S)
        self._disk.publish()
        self._progress.expect()

    def close(self) -> None:
        """Close the disk store, which writes everything still queued, and release host memory."""
        if self._disk is not None:
            self._disk.close()
        self._host = []

    def _move(self, batch: list[Transfer]) -> list[bytes]:
        """Do transfers of one kind: read all their sources, then write. Return the keys that could not be read."""
        group, source_tier, destination_tier = batch[0].group, batch[0].source_tier, batch[0].destination_tier
        sources = [transfer.source for transfer in batch]
        destinations = [transfer.destination for transfer in batch]
        for tier, numbers in ((source_tier, sources), (destination_tier, destinations)):
            if tier != Tier.DISK and self._caches[group]:  # there, blocks have keys and no numbers
                memory = self._caches[group][0] if tier == Tier.DEVICE else self._host[group]
                # An index below 0 would silently be taken from the end.
                assert all(0 <= number < len(memory) for number in numbers), (group, tier, numbers)
        if source_tier == destination_tier == Tier.DISK:
            self._delete(batch)
            return []
        if source_tier == destination_tier == Tier.DEVICE:
            self._copy(group, sources, destinations)
            return []
        if source_tier == destination_tier:
            raise ValueError(f"no block goes from tier {source_tier} to tier {destination_tier}")
        # Contents pass through rows of host memory: those of the host tier if it is at one end, else temporary ones.
        rows: Sequence[int] = sources if source_tier == Tier.HOST else destinations
        memory = self._host[group]
        if Tier.HOST not in (source_tier, destination_tier):
            rows, memory = range(len(batch)), self._host_memory(len(batch), group)
        unreadable: list[bytes] = []
        if source_tier == Tier.DEVICE:
            self._save(group, sources, memory, rows)
        elif source_tier == Tier.DISK:
            unreadable = self._read(batch, memory, rows)
        if destination_tier == Tier.DEVICE:
            self._load(group, memory, rows, destinations)
        elif destination_tier == Tier.DISK:
            self._write(batch, memory, rows)
        return unreadable

    def _copy(self, group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        caches = self._caches[group]
        if self._is_staged and caches:
            content = kernels.gather_blocks(self._index(sources), caches)
            kernels.scatter_blocks(self._index(destinations), caches, content)
            return
        for cache in caches:
            for source, destination in zip(sources, destinations, strict=True):
                cache[destination].copy_(cache[source])

    def _save(self, group: int, blocks: Sequence[int], memory: _Rows, rows: Sequence[int]) -> None:
        """Copy blocks of the pool into rows of host memory, [number of rows, L * B]."""
        if not self._caches[group]:
            return
        if not self._is_staged:
            for row, block in zip(rows, blocks, strict=True):
                for part, cache in zip(self._layers_of(group, memory[row]), self._caches[group], strict=True):
                    part.copy_(cache[block])
            return
        staged = kernels.gather_blocks(self._index(blocks), self._caches[group])
        for row, content in zip(rows, staged, strict=True):
            memory[row].copy_(content, non_blocking=self._is_cuda)

    def _load(self, group: int, memory: _Rows, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy rows of host memory, [number of rows, L * B], into blocks of the pool."""
        if not self._caches[group]:
            return
        if not self._is_staged:
            for row, block in zip(rows, blocks, strict=True):
                for part, cache in zip(self._layers_of(group, memory[row]), self._caches[group], strict=True):
                    cache[block].copy_(part)
            return
        staged = torch.empty(len(rows), self._block_bytes[group], dtype=torch.uint8, device=self._device)
        for row, content in zip(rows, staged, strict=True):
            content.copy_(memory[row], non_blocking=self._is_cuda)
        kernels.scatter_blocks(self._index(blocks), self._caches[group], staged)

    def _write(self, batch: Sequence[Transfer], memory: _Rows, rows: Sequence[int]) -> None:
        assert self._disk is not None
        self._wait()
        for row, transfer in zip(rows, batch, strict=True):
            self._progress.mark()
            self._disk.write(transfer.group, transfer.key, memory[row].numpy().data)

    def _delete(self, batch: Sequence[Transfer]) -> None:
        assert self._disk is not None
        for transfer in batch:
            self._progress.mark()
            self._disk.delete(transfer.group, transfer.key)

    def _read(self, batch: Sequence[Transfer], memory: _Rows, rows: Sequence[int]) -> list[bytes]:
        """Read blocks into rows of host memory; return the keys of those that failed."""
        assert self._disk is not None
        self._wait()
        unreadable = []
        for row, transfer in zip(rows, batch, strict=True):
            self._progress.mark()
            if not self._disk.read_into(transfer.group, transfer.key, memory[row].numpy().data):
                unreadable.append(transfer.key)
        return unreadable

    def _layers_of(self, group: int, content: Tensor) -> tuple[Tensor, ...]:
        """[..., L * B] -> L views [..., B]."""
        widths = [cache.shape[1] for cache in self._caches[group]]
        return tuple(part for part in torch.split(content, widths, dim=-1))

    def _index(self, numbers: Sequence[int]) -> Tensor:
        (index,) = upload([np.array(numbers, np.int64)], self._device)
        return index

    def _host_memory(self, num_blocks: int, group: int) -> _Rows:
        """Allocate [num_blocks, L * B] on the CPU, not initialised."""
        num_bytes = self._block_bytes[group]
        try:
            if self._is_cuda and num_bytes:
                return _pinned_rows(num_blocks, num_bytes)
            return torch.empty(num_blocks, num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            kind = "pinned host memory" if self._is_cuda else "host memory"
            raise ConfigError(
                f"there are no {num_blocks * num_bytes} bytes of {kind} for {num_blocks} KV blocks; lower --swap-space"
            ) from error

    def _wait(self) -> None:
        """Wait for copies from or to host memory that the device has not done yet, before the host uses that memory."""
        if self._stream is not None:
            self._stream.record_event().synchronize()


def _pinned_rows(num_rows: int, num_bytes: int) -> list[Tensor]:
    """Allocate rows of pinned memory, [num_bytes] uint8 each, not initialised.

    PyTorch takes a power of two for each allocation, up to twice as much as it is asked for. So there are several: each
    but the last nearly is a power of two, and the last has at most an eighth of the rows.
    """
    rows: list[Tensor] = []
    while missing := num_rows - len(rows):
        largest = 1 << ((missing * num_bytes).bit_length() - 1)
        count = max(1, largest // num_bytes) if 8 * missing > num_rows else missing
        rows += torch.empty(count, num_bytes, dtype=torch.uint8, pin_memory=True).unbind()
    return rows


def batches(transfers: Sequence[Transfer], limits: Sequence[int]) -> Iterator[list[Transfer]]:
    """Yield runs in which all sources may be read before any destination is written.

    limits: the longest run, per group.
    """
    batch: list[Transfer] = []
    kind, written = None, set[int]()
    for transfer in transfers:
        next_kind = (transfer.group, transfer.source_tier, transfer.destination_tier)
        is_read_later = transfer.source_tier == transfer.destination_tier and transfer.source in written
        # The disk store makes changes in their order anyway.
        is_conflict = transfer.destination_tier != Tier.DISK and (is_read_later or transfer.destination in written)
        if batch and (next_kind != kind or is_conflict or len(batch) == limits[transfer.group]):
            yield batch
            batch, written = [], set()
        kind = next_kind
        batch.append(transfer)
        written.add(transfer.destination)
    if batch:
        yield batch
