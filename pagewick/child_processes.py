"""How child processes run a module of this package, and the memory that they share with their parent."""

from __future__ import annotations

import os
import sys
import tempfile


def module_command() -> list[str]:
    """Return the command that runs a module in a child process; the module's name must be appended.

    `python -m` puts the working directory first on the import path; a child does so only if this process does.
    """
    safe_path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe_path, "-m"]


def shared_file(name: str, num_bytes: int) -> int:
    """Return an open file of zeros without a place on disk; a child that inherits it can map it. Raises OSError.

    name: shown by the system's tools.
    """
    if sys.platform == "linux":
        file = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    # Written, not only extended: writing into a hole of a full disk would be a bus error later.
    os.write(file, bytes(num_bytes))
    return file
