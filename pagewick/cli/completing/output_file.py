"""OutputFile: the lines of a batch's output, each written completely as soon as it is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pagewick.cli.terminal_text import shown_on
from pagewick.errors import ConfigError


class OutputFile:
    """A file that grows by whole lines, or stdout if the path is None.

    can_resume: whether it is the output of a batch, which a later run can continue. resumes: this is such a run; `done`
    holds the custom_ids that the file has. Whatever ends the process, the file
    loses no line; only its last line may be cut off, and that is removed when it is resumed.
    Raises ConfigError if the file exists and `resumes` is false, or if it is not the output of a batch.
    """

    def __init__(self, path: Path | None, *, can_resume: bool, resumes: bool = False) -> None:
        self.done: frozenset[str] = frozenset()
        self._descriptor: int | None = None
        self._way_on = "continue with --resume" if can_resume else f"remove {path} and start again"
        if path is None:
            return
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --output") from None
        if not resumes and os.fstat(self._descriptor).st_size:
            self.close()
            or_resume = ", or --resume the batch" if can_resume else ""
            raise ConfigError(f"{path} exists already; remove it or choose another --output{or_resume}")
        if resumes:
            self.done = self._read_done(path, self._descriptor)

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a line break. Raises ConfigError if the disk is full."""
        if self._descriptor is None:
            sys.stdout.buffer.write(shown_on(sys.stdout, line.decode()).encode())
            sys.stdout.buffer.flush()
            return
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise ConfigError(f"cannot write the output: {error.strerror}; free space, then {self._way_on}") from None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def _read_done(path: Path, descriptor: int) -> frozenset[str]:
        """Return the custom_ids of all whole lines; remove an incomplete line at the end."""
        done: set[str] = set()
        size = 0
        with open(descriptor, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(str(json.loads(line)["custom_id"]))
                except (ValueError, KeyError, TypeError):
                    message = f"{path} is not the output of a batch; choose another --output"
                    raise ConfigError(message) from None
                size += len(line)
        os.ftruncate(descriptor, size)
        return frozenset(done)
