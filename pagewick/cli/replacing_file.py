"""Writing a file as a whole, or not at all, also in place of an earlier one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that only the user can read; when the block ends, it replaces the file at `path`.

    If the block raises, or the process ends before, the earlier file stays as it is. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file. If that fails, an earlier file stays as it was, and nothing of a new one remains. Raises OSError.

    A pipe or a device stays what it is.
    """
    if path.is_file():
        target = path.resolve()
        with replacing(target) as file:
            os.fchmod(file.fileno(), target.stat().st_mode)
            file.write(content)
        return
    # The path of a pipe, such as /dev/stdout, leads to a name that does not exist.
    is_new = not path.exists()
    try:
        path.write_bytes(content)
    except BaseException:
        if is_new:
            with suppress(OSError):
                path.resolve().unlink()
        raise
