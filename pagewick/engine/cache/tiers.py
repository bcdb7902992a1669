"""Which blocks have moved from the pool to host memory and to disk: names and numbers only.

The contents are moved by the Transfers that are collected here. A transfer from disk to disk deletes the file. A block
is in host memory or in the pool, never in both: loading it takes it out of host memory. A block on disk stays there.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Sequence

from pagewick.engine.batch import Tier, Transfer


class HostTier:
    """Blocks of one cache group in host memory, least recently stored first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._slot_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    @property
    def is_full(self) -> bool:
        return not self._free

    def put(self, key: bytes) -> int:
        """Return a free slot for a block; the tier must not be full."""
        self._slot_of[key] = self._free.pop()
        return self._slot_of[key]

    def take(self, key: bytes) -> int:
        """Forget a block and return its slot, which is not free before `release`."""
        return self._slot_of.pop(key)

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def entries(self) -> ItemsView[bytes, int]:
        """Return the key and the slot of every block."""
        return self._slot_of.items()

    def problems(self) -> Iterable[str]:
        """Yield contradictions in the slots."""
        if sorted([*self._free, *self._slot_of.values()]) != list(range(self.num_blocks)):
            yield "a place in host memory is lost, or used twice"


class DiskTier:
    """Keys of one cache group's blocks on disk, least recently used first, `capacity` at most.

    is_closed: whether the disk takes no more blocks; those on it are still read.
    exists: asks the disk for a block that another server may have written; None: no other server shares it.
    """

    def __init__(self, keys: Sequence[bytes], capacity: int, exists: Callable[[bytes], bool] | None = None) -> None:
        self.capacity = capacity
        self.is_shared = exists is not None
        self._exists = exists
        self.is_closed = False
        self._keys: dict[bytes, None] = dict.fromkeys(keys)
        self._added: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def finds(self, key: bytes) -> bool:
        """Whether a block is on the disk. One that another server has written is known from now on.

        It pushes no other block out yet: those that were found before it may be about to be taken.
        """
        if key not in self._keys and self._exists is not None and self._exists(key):
            self._keys[key] = None
        return key in self._keys

    def touch(self, key: bytes) -> None:
        del self._keys[key]
        self._keys[key] = None

    def add(self, key: bytes) -> list[bytes]:
        """Note a block that is written; return the keys that it pushes out."""
        self._added.add(key)
        return self.put_back(key)

    def take(self, key: bytes) -> None:
        """Let no other block push this one out before `put_back`."""
        del self._keys[key]

    def put_back(self, key: bytes) -> list[bytes]:
        """Note that a block was used; return the keys that must go for it."""
        self._keys[key] = None
        gone = []
        while len(self._keys) > self.capacity:
            gone.append(next(iter(self._keys)))
            self.forget(gone[-1])
        return gone

    def forget(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._added.discard(key)

    def close(self) -> None:
        """Note that the disk takes no more blocks, since an unknown time. Those found at the start are still there."""
        self.is_closed = True
        for key in self._added:
            self._keys.pop(key, None)
        self._added.clear()


class GroupTiers:
    """Moves one cache group's evicted blocks to host memory, and from there to disk.

    transfers: those of all groups, in the order in which they must run. host, disk: None where there is no such tier.
    """

    def __init__(self, group: int, host: HostTier | None, disk: DiskTier | None, transfers: list[Transfer]) -> None:
        self.host = HostTier(0) if host is None else host
        self.disk = DiskTier((), 0) if disk is None else disk
        self._group = group
        self._transfers = transfers
        self.num_saved = 0
        self.num_loaded = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.host or self.disk.finds(key)

    def take(self, key: bytes) -> int | None:
        """Return a block's slot in host memory, None if it is on disk. No other block gets its place before `load`."""
        if key in self.host:
            return self.host.take(key)
        self.disk.take(key)
        return None

    def load(self, key: bytes, host_slot: int | None, block_id: int) -> None:
        """Move a block that `take` has found into the pool."""
        self.num_loaded += 1
        if host_slot is None:
            self._transfers.append(Transfer(self._group, Tier.DISK, -1, Tier.DEVICE, block_id, key))
            self._delete(self.disk.put_back(key))
        else:
            self._transfers.append(Transfer(self._group, Tier.HOST, host_slot, Tier.DEVICE, block_id))
            self.host.release(host_slot)

    def save(self, block_id: int, key: bytes) -> list[bytes]:
        """Keep the content of a block of the pool; return the keys that are now neither there nor in host memory."""
        gone = []
        if self.host.is_full:
            oldest = next(iter(self.host.entries()), None)
            if oldest is None:  # there is no host memory, or every slot is about to be loaded from
                self.write(Tier.DEVICE, block_id, key)
                return [key]
            self.write(Tier.HOST, oldest[1], oldest[0])
            self.drop(oldest[0])
            gone.append(oldest[0])
        self._transfers.append(Transfer(self._group, Tier.DEVICE, block_id, Tier.HOST, self.host.put(key)))
        self.num_saved += 1
        return gone

    def write(self, tier: Tier, number: int, key: bytes) -> None:
        """Write a block to disk, if there is a disk that does not have it yet."""
        if self.disk.is_closed or not self.disk.capacity:
            return
        if self.disk.finds(key):
            self.disk.touch(key)
            return
        self._delete(self.disk.add(key))
        self._transfers.append(Transfer(self._group, tier, number, Tier.DISK, -1, key))
        self.num_saved += 1

    def add(self, block_id: int, key: bytes) -> None:
        """Note a new block of the pool, which is written to a disk that other servers share."""
        self.drop(key)  # computed again, after a miss in another group
        if self.disk.is_shared:
            self.write(Tier.DEVICE, block_id, key)

    def write_all(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Write blocks of the pool and those in host memory to disk, the most useful last, as far as they fit."""
        entries = [(Tier.HOST, slot, key) for key, slot in self.host.entries()]
        entries += [(Tier.DEVICE, block_id, key) for block_id, key in blocks]
        for tier, number, key in entries[max(0, len(entries) - self.disk.capacity) :]:
            self.write(tier, number, key)

    def drop(self, key: bytes) -> None:
        """Drop the copy in host memory, if there is one."""
        if key in self.host:
            self.host.release(self.host.take(key))

    def forget(self, key: bytes) -> None:
        """Drop all copies, because the content is wrong or cannot be read."""
        self.drop(key)
        if key in self.disk:
            self.disk.forget(key)
            self._delete([key])

    def _delete(self, keys: Iterable[bytes]) -> None:
        """Delete the files of these blocks, which the disk tier has forgotten."""
        self._transfers += [Transfer(self._group, Tier.DISK, -1, Tier.DISK, -1, key) for key in keys]
