"""Takes secrets out of the command line that the process shows to everybody on the machine."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, MutableSequence, Sequence
from pathlib import Path
from typing import AnyStr

_ARG_START, _ARG_END = 47, 48  # fields of /proc/PID/stat, counted from 0 (proc_pid_stat(5))


def hide_values(flags: Sequence[str]) -> None:
    """Overwrite the values of these flags, `--flag X` or `--flag=X`, where `ps` and sys.argv show them.

    Every value becomes as many stars. Where the arguments are out of reach (not Linux, or no /proc), only sys.argv and
    sys.orig_argv change.
    """
    for arguments in (sys.argv, sys.orig_argv):
        _hide_in_list(arguments, flags)
    memory = _argument_memory()
    if memory is not None:
        start, length = memory
        content = ctypes.string_at(start, length)
        ctypes.memmove(start, _hidden(content, [flag.encode() for flag in flags]), length)


def _hide_in_list(arguments: MutableSequence[str], flags: Sequence[str]) -> None:
    for index, start in _values(arguments, flags, "="):
        arguments[index] = arguments[index][:start] + "*" * (len(arguments[index]) - start)


def _hidden(content: bytes, flags: Sequence[bytes]) -> bytes:
    """The arguments, each with a zero byte behind it, without the values; of the same length."""
    arguments = content.split(b"\0")
    for index, start in _values(arguments, flags, b"="):
        arguments[index] = arguments[index][:start] + b"*" * (len(arguments[index]) - start)
    return b"\0".join(arguments)


def _values(arguments: Sequence[AnyStr], flags: Sequence[AnyStr], equals: AnyStr) -> Iterator[tuple[int, int]]:
    """Where the values stand: the argument's index, and where in it the value begins."""
    for index, argument in enumerate(arguments):
        if argument in flags and index + 1 < len(arguments):
            yield index + 1, 0
        for flag in flags:
            if argument.startswith(flag + equals):
                yield index, len(flag) + 1


def _argument_memory() -> tuple[int, int] | None:
    """Address and bytes of this process' arguments, if the system tells."""
    try:
        stat = Path("/proc/self/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in brackets, and may have spaces and brackets itself.
    fields = [b"", b"", *stat[stat.rfind(b")") + 2 :].split()]
    if len(fields) <= _ARG_END:
        return None
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    return (start, end - start) if 0 < start < end else None
