"""module_command: how child processes run a module of this package."""

from __future__ import annotations

import os
import sys


def module_command() -> list[str]:
    """Return the command that runs a module in a child process; the module's name must be appended.

    `python -m` puts the working directory first on the import path; a child does so only if this process does.
    """
    safe_path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe_path, "-m"]
