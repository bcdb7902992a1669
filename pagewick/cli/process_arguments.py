"""Removes secrets from the command line, which everybody on the machine can read."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, MutableSequence
from pathlib import Path

_ARG_START, _ARG_END = 47, 48  # fields of /proc/PID/stat, counted from 0 (proc_pid_stat(5))
_BYTES = "latin-1"  # a character for each byte, so that the arguments keep their lengths


def hide_values(flags: Collection[str]) -> None:
    """Overwrite the values of these flags, `--flag X` or `--flag=X`, in the output of `ps` and in sys.argv.

    Every character becomes a star. A flag of several words is found with underscores between them, too, as the
    commands read it. If the arguments cannot be reached (not Linux, or no /proc), only sys.argv and sys.orig_argv
    change.
    """
    for arguments in (sys.argv, sys.orig_argv):
        _hide(arguments, flags)
    try:
        stat = Path("/proc/self/stat").read_bytes()
    except OSError:
        return
    # The second field is the program's name in brackets, which may contain spaces and brackets.
    fields = [b"", b"", *stat[stat.rfind(b")") + 2 :].split()]
    start, end = (int(fields[index]) for index in (_ARG_START, _ARG_END)) if len(fields) > _ARG_END else (0, 0)
    if 0 < start < end:
        content = ctypes.string_at(start, end - start).decode(_BYTES).split("\0")
        _hide(content, flags)
        ctypes.memmove(start, "\0".join(content).encode(_BYTES), end - start)


def _hide(arguments: MutableSequence[str], flags: Collection[str]) -> None:
    """Replace the values of the flags by as many stars. flags: with hyphens."""
    is_value = False
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if is_value:
            arguments[index] = "*" * len(argument)
            is_value = False
        elif flag.replace("_", "-") in flags:
            arguments[index] = flag + equals + "*" * len(value)
            is_value = not equals
