"""Takes away root's right to pass over the permissions of files, so that tests of them mean the same for every user."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# linux/capability.h defines these: _LINUX_CAPABILITY_VERSION_3, CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
_VERSION: Final = 0x20080522
_PASSING_OVER: Final = 1 << 1 | 1 << 2


@contextmanager
def forbidden(directory: Path, mode: int) -> Iterator[None]:
    """Give a directory, and all that is in it, the permissions `mode`, for this thread and those that it starts.

    Files get no permission to execute.
    """
    before = [(path, path.stat().st_mode) for path in (directory, *directory.rglob("*")) if not path.is_symlink()]
    for path, _ in reversed(before):
        path.chmod(mode if path.is_dir() else mode & 0o666)
    try:
        with _without_privileges():
            yield
    finally:
        for path, own in before:
            path.chmod(own)


@contextmanager
def _without_privileges() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    before = sets[0]
    sets[0] &= ~_PASSING_OVER
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
