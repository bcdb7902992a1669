"""Removes secrets from the command line, which everybody on the machine can read."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import MutableSequence, Sequence
from pathlib import Path
from typing import AnyStr

_ARG_START, _ARG_END = 47, 48  # fields of /proc/PID/stat, counted from 0 (proc_pid_stat(5))


def hide_values(flags: Sequence[str]) -> None:
    """Overwrite the values of these flags, `--flag X` or `--flag=X`, in the output of `ps` and in sys.argv.

    Every character becomes a star. If the arguments cannot be reached (not Linux, or no /proc), only sys.argv and
    sys.orig_argv change.
    """
    for arguments in (sys.argv, sys.orig_argv):
        _hide(arguments, flags, "=", "*")
    try:
        stat = Path("/proc/self/stat").read_bytes()
    except OSError:
        return
    # The second field is the program's name in brackets, which may contain spaces and brackets.
    fields = [b"", b"", *stat[stat.rfind(b")") + 2 :].split()]
    start, end = (int(fields[index]) for index in (_ARG_START, _ARG_END)) if len(fields) > _ARG_END else (0, 0)
    if 0 < start < end:
        content = ctypes.string_at(start, end - start).split(b"\0")
        _hide(content, [flag.encode() for flag in flags], b"=", b"*")
        ctypes.memmove(start, b"\0".join(content), end - start)


def _hide(arguments: MutableSequence[AnyStr], flags: Sequence[AnyStr], equals: AnyStr, star: AnyStr) -> None:
    """Replace the values of the flags by as many stars."""
    for index, argument in enumerate(arguments):
        if index and arguments[index - 1] in flags:
            arguments[index] = star * len(argument)
            continue
        for flag in flags:
            if argument.startswith(flag + equals):
                arguments[index] = flag + equals + star * (len(argument) - len(flag) - 1)
