"""BlockFiles: writes, finds, checks and reads files that hold one KV block each, below one directory.

    <first 2 digits of the key>/<key>.kv     a header, then the content

Nothing in a file is trusted. There is no fsync: a block that a power failure damages fails its checksum and counts as
missing. Directories are opened by descriptor and without following symbolic links, so no path leads out of `top`.
Several processes may use one directory: a file gets its name only when it is complete, and a block that another process
deletes is just missing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

KEY_BYTES: Final = 16

# Magic, version, key, bytes of content, BLAKE2b-128 of the content; little endian.
_HEADER: Final = struct.Struct("<8sI16sQ16s")
_MAGIC: Final = b"pagewick"
_VERSION: Final = 1
_CHECKSUM_BYTES: Final = 16

_DIRECTORY_NAME: Final = re.compile(r"[0-9a-f]{2}")
_BLOCK_NAME: Final = re.compile(r"([0-9a-f]{32})\.kv")
_TEMPORARY_NAME: Final = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.tmp")

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Not blocking, because a named pipe in place of a file would block for ever.
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK


class DamagedBlockError(Exception):
    """The content of a file is not what was written; the file has been deleted."""


class BlockFiles:
    """The blocks, block_bytes each, below names[0]/names[1]/... in `top`; missing directories are created (0700).

    Every method may raise OSError.
    """

    def __init__(self, top: Path, names: tuple[str, ...], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        with opened(str(top), os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            self._directory = _open_below(descriptor, names)

    def close(self) -> None:
        os.close(self._directory)

    def scan(self) -> list[bytes]:
        """Return the keys by time of last use. Remove what a crash has left: temporary files and wrong sizes."""
        found: list[tuple[int, bytes]] = []
        for name in filter(_DIRECTORY_NAME.fullmatch, os.listdir(self._directory)):
            # Anything but a directory of ours is left alone, such as a stray file or a symbolic link.
            with suppress(OSError), opened(name, _DIRECTORY, self._directory) as directory:
                found += _scan_directory(directory, name, _HEADER.size + self._block_bytes)
        return [key for _, key in sorted(found)]

    def exists(self, key: bytes) -> bool:
        """Whether there is a file of a block, which another process may have written. Contents are not checked."""
        name = f"{key.hex()}.kv"
        try:
            status = os.stat(f"{name[:2]}/{name}", dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode)

    @contextmanager
    def written(self, key: bytes, content: bytes) -> Iterator[Callable[[int], None]]:
        """Write a block under a temporary name; yield a function that publishes it with its time of use (ns)."""
        name = f"{key.hex()}.kv"
        checksum = hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
        with suppress(FileExistsError):
            os.mkdir(name[:2], 0o700, dir_fd=self._directory)
        with (
            opened(name[:2], _DIRECTORY, self._directory) as directory,
            _temporary_file(directory, key) as (file, temporary_name),
        ):
            write_fully(file, _HEADER.pack(_MAGIC, _VERSION, key, len(content), checksum))
            write_fully(file, content)

            def publish(mtime_ns: int) -> None:
                os.utime(file, ns=(mtime_ns, mtime_ns))
                os.replace(temporary_name, name, src_dir_fd=directory, dst_dir_fd=directory)

            yield publish

    def read_into(self, key: bytes, out: memoryview, mtime_ns: int) -> None:
        """Fill `out`, block_bytes long, and note the use. Raises DamagedBlockError, or FileNotFoundError for none."""
        name = f"{key.hex()}.kv"
        with (
            opened(name[:2], _DIRECTORY, self._directory) as directory,
            opened(name, os.O_RDONLY | _FILE, directory) as file,
        ):
            problem = _read_block(file, key, out)
            if problem is not None:
                os.unlink(name, dir_fd=directory)
                raise DamagedBlockError(problem)
            with suppress(OSError):  # a directory that has become read-only still serves; only the order of use is lost
                os.utime(file, ns=(mtime_ns, mtime_ns))

    def delete(self, key: bytes) -> None:
        """Delete a block, if there is one."""
        name = f"{key.hex()}.kv"
        with suppress(FileNotFoundError), opened(name[:2], _DIRECTORY, self._directory) as directory:
            os.unlink(name, dir_fd=directory)


@contextmanager
def opened(path: str, flags: int, directory: int | None = None) -> Iterator[int]:
    """Yield the descriptor of a file or directory; a new file is for this user alone (0600)."""
    descriptor = os.open(path, flags, 0o600, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory, if missing. Raises OSError if it cannot be written, or if other users can write to it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "it must belong to this user, and nobody else may write to it")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_fully(file: int, content: bytes) -> None:
    """Write all bytes, however many system calls that takes."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def _open_below(top: int, names: tuple[str, ...]) -> int:
    current = os.dup(top)
    for name in names:
        try:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=current)
            below = os.open(name, _DIRECTORY, dir_fd=current)
        finally:
            os.close(current)
        current = below
    return current


def _scan_directory(directory: int, prefix: str, file_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (time of last use, key) of every block in a directory."""
    for name in os.listdir(directory):
        with suppress(OSError):  # another process may delete it
            if _TEMPORARY_NAME.fullmatch(name):
                _remove_if_abandoned(directory, name)
            match = _BLOCK_NAME.fullmatch(name)
            if match is None or not name.startswith(prefix):
                continue
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_size == file_bytes:
                yield status.st_mtime_ns, bytes.fromhex(match[1])
            elif stat.S_ISREG(status.st_mode):
                os.unlink(name, dir_fd=directory)


def _read_block(file: int, key: bytes, out: memoryview) -> str | None:
    """Fill `out`, whose length is a block's; return the problem of the file, or None."""
    header = bytearray(_HEADER.size)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(header) + len(out):
            return "has a wrong size"
        if not (_read_fully(file, memoryview(header), 0) and _read_fully(file, out, len(header))):
            return "is truncated"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    magic, version, found_key, num_bytes, checksum = _HEADER.unpack(header)
    if (magic, version, found_key, num_bytes) != (_MAGIC, _VERSION, key, len(out)):
        return "has a wrong header"
    if hashlib.blake2b(out, digest_size=_CHECKSUM_BYTES).digest() != checksum:
        return "has a wrong checksum"
    return None


def _read_fully(file: int, out: memoryview, offset: int) -> bool:
    """Fill `out`; False if the file is too short."""
    while out:
        num_bytes = os.preadv(file, [out], offset)
        if num_bytes == 0:
            return False
        out, offset = out[num_bytes:], offset + num_bytes
    return True


@contextmanager
def _temporary_file(directory: int, key: bytes) -> Iterator[tuple[int, str]]:
    """Yield descriptor and name of a new file, which is deleted at the end unless it was renamed.

    It is locked while it is open, so that another process can distinguish it from one that a crash has left.
    """
    while True:
        name = f".{key.hex()}.{secrets.token_hex(8)}.tmp"
        with opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, directory) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_nlink == 0:  # removed before it was locked
                    continue
                yield file, name
                return
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)


def _remove_if_abandoned(directory: int, name: str) -> None:
    """Delete a temporary file that no process is writing. Raises BlockingIOError if one is."""
    with opened(name, os.O_RDWR | _FILE, directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=directory)
