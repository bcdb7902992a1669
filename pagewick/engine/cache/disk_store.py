"""DiskStore: KV blocks on disk, a cache that outlives the process. No tensors here.

DIR/hash.key                                                          secret key of the prefix hashes
DIR/<fingerprint>/<tp rank>-of-<tp size>/<group>/<2 digits>/<key>.kv  one block, see block_files.py
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagewick import log
from pagewick.engine.cache.block_files import (
    KEY_BYTES,
    BlockFiles,
    DamagedBlockError,
    make_directory,
    opened,
    write_fully,
)
from pagewick.errors import ConfigError
from pagewick.weights.files import is_plain_name

logger = log.get_logger(__name__)

HASH_KEY_BYTES: Final = 32
HASH_KEY_NAME: Final = "hash.key"
MAX_QUEUED_BYTES: Final = 64 * 2**20


def hash_key(directory: Path) -> bytes:
    """Return the 32 random bytes that key the prefix hashes below `directory`; the first call creates them.

    Knowing them is enough to make two prompts collide, so the file is for this user alone (0600). Raises ConfigError.
    """
    path = directory / HASH_KEY_NAME
    try:
        make_directory(directory)
        with opened(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            # If two servers start together, one makes the key and the other waits for it. A crash in between leaves an
            # empty file, which the next server fills.
            fcntl.flock(file, fcntl.LOCK_EX)
            key = os.pread(file, HASH_KEY_BYTES + 1, 0)
            if not key:
                key = secrets.token_bytes(HASH_KEY_BYTES)
                write_fully(file, key)
                os.fsync(file)
    except OSError as error:
        raise _unusable(directory, error) from error
    if len(key) != HASH_KEY_BYTES:
        raise ConfigError(
            f"{path} is not a hash key of {HASH_KEY_BYTES} bytes; delete it (the blocks that {directory} holds cannot "
            "be found without it), or give --kv-cache-disk another directory"
        )
    return key


@dataclass(slots=True)
class _Change:
    """A change of a file that is still to be made. content: None to delete the file."""

    content: bytes | None
    mtime_ns: int


class DiskStore:
    """The blocks of one rank, by cache group and prefix hash (16 bytes).

    block_bytes: per group, the bytes of a block in all layers of this rank. fingerprint: see model_fingerprint; blocks
    with another one are not found. share: a name for the part of the model that this rank holds. A thread makes the
    changes, one after the other; reads see them at once. Only one other thread may call. Raises ConfigError if the
    directory cannot be used.
    """

    def __init__(self, directory: Path, *, fingerprint: str, block_bytes: Sequence[int], share: str) -> None:
        assert is_plain_name(fingerprint) and is_plain_name(share)
        self._root = directory / fingerprint / share
        self._block_bytes = tuple(block_bytes)
        self._last_mtime_ns = 0
        self._has_reported_damage = False
        with ExitStack() as cleanup:
            try:
                make_directory(directory)
                self._groups: list[BlockFiles] = []
                for group, num_bytes in enumerate(block_bytes):
                    names = (fingerprint, share, str(group))
                    self._groups.append(BlockFiles(directory, names, num_bytes))
                    cleanup.callback(self._groups[-1].close)
                self._found = [files.scan() for files in self._groups]
            except OSError as error:
                raise _unusable(directory, error) from error
            self._cleanup = cleanup.pop_all()

        # The condition guards the fields from here on, which the thread shares, and signals changes of them.
        self._condition = threading.Condition()
        self._queue: dict[tuple[int, bytes], _Change] = {}
        self._num_queued_bytes = 0
        self._can_write = True
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-cache-disk", daemon=True)
        self._thread.start()

    @property
    def can_write(self) -> bool:
        """False once the disk has refused a change: from then on `write` does nothing."""
        return self._can_write

    def keys(self, group: int) -> list[bytes]:
        """Return the keys found at the start, least recently used first. Contents are checked when they are read."""
        return list(self._found[group])

    def exists(self, group: int, key: bytes) -> bool:
        """Whether another server has written a block since the start. Its content is checked when it is read."""
        with suppress(OSError):
            return self._groups[group].exists(key)
        return False

    def write(self, group: int, key: bytes, content: memoryview | bytes) -> None:
        """Keep a copy of the content, in bytes. Waits while more than MAX_QUEUED_BYTES are queued."""
        assert len(content) == self._block_bytes[group]
        with self._condition:
            self._condition.wait_for(lambda: self._has_room(len(content)))
            if self._can_write:
                self._enqueue(group, key, bytes(content))

    def delete(self, group: int, key: bytes) -> None:
        """Forget a block, if there is one."""
        with self._condition:
            self._enqueue(group, key, None)

    def read_into(self, group: int, key: bytes, out: memoryview) -> bool:
        """Fill `out` with a block, which counts as used now. False, with `out` undefined, if there is no valid one."""
        assert len(key) == KEY_BYTES and len(out) == self._block_bytes[group] and not self._is_closing
        with self._condition:
            change = self._queue.get((group, key))
            if change is not None and change.content is not None:
                out[:] = change.content
                change.mtime_ns = self._now()
            if change is not None:
                return change.content is not None
        try:
            self._groups[group].read_into(key, out, self._now())
        except FileNotFoundError:
            return False
        except DamagedBlockError as error:
            self._report_damage(group, key, f"{error} and is deleted")
            return False
        except OSError as error:
            self._report_damage(group, key, f"cannot be used ({error.strerror})")
            return False
        return True

    def publish(self) -> None:
        """Wait until other servers can read what has been written, or the disk takes no more."""
        with self._condition:
            self._condition.wait_for(lambda: not self._queue or not self._can_write)

    def close(self) -> None:
        """Wait until every queued change is made; may be called twice."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        self._cleanup.close()

    def _has_room(self, num_bytes: int) -> bool:
        fits = self._num_queued_bytes == 0 or self._num_queued_bytes + num_bytes <= MAX_QUEUED_BYTES
        return fits or not self._can_write

    def _enqueue(self, group: int, key: bytes, content: bytes | None) -> None:
        """Queue a change, which replaces an earlier one of the same block. The caller holds the lock."""
        assert len(key) == KEY_BYTES and not self._is_closing
        self._dequeue(group, key)
        self._queue[group, key] = _Change(content, self._now())
        self._num_queued_bytes += len(content or b"")
        self._condition.notify_all()

    def _dequeue(self, group: int, key: bytes) -> None:
        change = self._queue.pop((group, key), None)
        if change is not None:
            self._num_queued_bytes -= len(change.content or b"")
            self._condition.notify_all()

    def _now(self) -> int:
        """Return a time later than every one before, so that the order of use is unique."""
        self._last_mtime_ns = max(time.time_ns(), self._last_mtime_ns + 1)
        return self._last_mtime_ns

    def _run(self) -> None:
        """Make the queued changes; the body of the thread."""
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._queue or self._is_closing)
                    if not self._queue:
                        return
                    (group, key), change = next(iter(self._queue.items()))
                self._apply(group, key, change)
        finally:
            with self._condition:
                # If the thread dies of an unexpected error, no caller may wait for it.
                self._can_write = False
                self._condition.notify_all()

    def _apply(self, group: int, key: bytes, change: _Change) -> None:
        try:
            if change.content is not None:
                with self._groups[group].written(key, change.content) as publish, self._condition:
                    # Locked, because a reader of the queued content changes its time.
                    publish(change.mtime_ns)
                    self._finish(group, key, change)
            else:
                self._groups[group].delete(key)
        except OSError as error:
            self._stop_writing(error)
        with self._condition:
            self._finish(group, key, change)

    def _finish(self, group: int, key: bytes, change: _Change) -> None:
        """Dequeue a change that has been made, unless another one of the same block has replaced it."""
        if self._queue.get((group, key)) is change:
            self._dequeue(group, key)

    def _stop_writing(self, error: OSError) -> None:
        with self._condition:
            for (group, key), change in list(self._queue.items()):
                if change.content is not None:
                    self._dequeue(group, key)
            is_first, self._can_write = self._can_write, False
        if is_first:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            logger.warning(
                "no more KV blocks go to disk (those already there are still read): writing below %s failed: %s; %s or "
                "give --kv-cache-disk another directory, then start again",
                self._root,
                error.strerror,
                "free some space" if is_full else "put that right",
            )

    def _report_damage(self, group: int, key: bytes, problem: str) -> None:
        """Warn of the first damaged file only: a failing disk has many."""
        level = logging.DEBUG if self._has_reported_damage else logging.WARNING
        self._has_reported_damage = True
        path = self._root / str(group) / key.hex()[:2] / f"{key.hex()}.kv"
        logger.log(level, "a KV block has to be computed again: the file %s %s", path, problem)


def _unusable(directory: Path, error: OSError) -> ConfigError:
    advice = {
        errno.EPERM: f"chmod go-w {directory} if it is yours, or give --kv-cache-disk a new directory",
        errno.EEXIST: "a file has this name; give --kv-cache-disk the name of a directory",
        errno.ENOTDIR: "a part of this path is a file; give --kv-cache-disk the name of a directory",
        errno.ENOSPC: "free some space, or give --kv-cache-disk a directory on another disk",
        errno.EROFS: "give --kv-cache-disk a directory on a disk that can be written",
    }
    usual = "give --kv-cache-disk a directory that this user can write"
    reason = error.strerror or str(error)
    return ConfigError(f"the KV cache cannot be kept in {directory} ({reason}); {advice.get(error.errno or 0, usual)}")
