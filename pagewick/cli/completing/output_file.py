"""OutputFile: the lines of a batch's output, each written completely as soon as it is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pagewick.cli.replacing_file import replacing
from pagewick.cli.terminal_text import shown_on
from pagewick.errors import ConfigError


class OutputFile:
    """A file that grows by whole lines, or stdout if the path is None.

    can_resume: whether it is the output of a batch, which a later run can continue. resumes: this is such a run; `done`
    holds the custom_ids that have a response in the file, `failed` those that have an error only. Closing the file
    removes an error that a later line replaces. Whatever ends the process, the file
    loses no line; only its last line may be cut off, and that is removed when it is resumed.
    Raises ConfigError if the file exists and `resumes` is false, or if it is not the output of a batch.
    """

    def __init__(self, path: Path | None, *, can_resume: bool, resumes: bool = False) -> None:
        self.done: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()
        self._path = path
        self._has_errors = False
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
            self._read_earlier_lines(path, self._descriptor)

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
        """Close the file. Raises ConfigError if errors that are replaced cannot be removed."""
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        if self._has_errors and self._path is not None:
            try:
                _remove_replaced_errors(self._path.resolve())
            except OSError as error:
                raise ConfigError(
                    f"the output is complete, but errors that later lines replace are still in {self._path}: "
                    f"{error.strerror}; the last line of each custom_id counts"
                ) from None

    def _read_earlier_lines(self, path: Path, descriptor: int) -> None:
        """Find the custom_ids of all whole lines; remove an incomplete line at the end."""
        done, failed = set[str](), set[str]()
        size = 0
        with open(descriptor, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    (failed if _is_error(record) else done).add(str(record["custom_id"]))
                except (ValueError, KeyError, TypeError, AttributeError):
                    message = f"{path} is not the output of a batch; choose another --output"
                    raise ConfigError(message) from None
                size += len(line)
        os.ftruncate(descriptor, size)
        self.done, self.failed = frozenset(done), frozenset(failed - done)
        self._has_errors = bool(failed)


def _is_error(record: dict[str, Any]) -> bool:
    return bool(record.get("error")) or (record.get("response") or {}).get("status_code", 200) != 200


def _remove_replaced_errors(path: Path) -> None:
    """Write the output again without errors whose custom_id has a later line. Raises OSError."""
    last: dict[str, int] = {}
    errors: list[tuple[int, str]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file):
            record = json.loads(line)
            custom_id = str(record["custom_id"])
            last[custom_id] = number
            if _is_error(record):
                errors.append((number, custom_id))
    replaced = {number for number, custom_id in errors if last[custom_id] > number}
    if not replaced:
        return
    with path.open("rb") as file, replacing(path) as copy:
        os.fchmod(copy.fileno(), os.fstat(file.fileno()).st_mode & 0o777)
        copy.writelines(line for number, line in enumerate(file) if number not in replaced)
