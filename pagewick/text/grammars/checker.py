"""GrammarChecker: tries a grammar in a process of its own, with a time limit, before the engine compiles it.

A hostile grammar can take seconds to compile, all memory, or more stack than there is. Then only that process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping

from pagewick.child_processes import module_command
from pagewick.errors import InvalidRequestError
from pagewick.log import child_environment

MODULE = "pagewick.text.grammars.check_process"
MAX_KNOWN = 1024
_Key = tuple[str, tuple[str, ...]]
# Seconds for the process to start, on a machine that is very busy.
_START_S = 30.0
# The time limit is one of processor time. On a busy machine, it may take longer by this factor.
_MAX_SLOWNESS = 40


class GrammarChecker:
    """Starts its process with the first grammar; may be used by several threads, one of which waits for another.

    special: as from vocabulary.special_tokens. vocab_size: the model's. timeout_s: processor time for one
    grammar.
    """

    def __init__(self, special: Mapping[int, bytes], vocab_size: int, timeout_s: float) -> None:
        self._setup = {
            "special": {str(key): name.decode() for key, name in special.items()},
            "vocab_size": vocab_size,
            "timeout_s": timeout_s,
        }
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[str]], GrammarChecker] | None = None
        self._lock = threading.Lock()
        # (grammar, excluded beginnings) -> why it is refused, or None.
        self._known: OrderedDict[_Key, str | None] = OrderedDict()

    def check(self, grammar: str, param: str, excluded: tuple[str, ...] = ()) -> None:
        """Raises InvalidRequestError for a grammar that is wrong, allows nothing, or is too costly. param: names it.

        excluded: texts with which no response may begin.
        """
        key = (grammar, excluded)
        try:
            reason = self._known[key]
        except KeyError:  # or another thread has just forgotten it
            reason = self._find_out(key)
        if reason is not None:
            raise InvalidRequestError(f"{param} cannot be honoured: {reason}", param=param)

    def knows(self, grammar: str, excluded: tuple[str, ...] = ()) -> bool:
        """Whether `check` needs no process for it."""
        return (grammar, excluded) in self._known

    def close(self) -> None:
        """End the process. A later check starts another."""
        with self._lock:
            self._end()

    def _find_out(self, key: _Key) -> str | None:
        with self._lock:
            reason = self._known[key] = self._try(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return reason

    def _try(self, key: _Key) -> str | None:
        if self._process is None:
            self._process = self._start()
            # A checker that nobody closes ends its process when it is collected.
            self._finalizer = weakref.finalize(self, _stop, self._process)
        try:
            answer = _ask(self._process, key, self._timeout_s * _MAX_SLOWNESS)
            is_slow = answer is None and self._process.wait() == -signal.SIGPROF
        except TimeoutError:
            answer, is_slow = None, True
        if answer is not None:
            return answer["reason"]
        self._end()
        if is_slow:
            return f"compiling it takes longer than {self._timeout_s:g} s (--grammar-timeout); make it simpler"
        return "it is nested or repeated too deeply to be compiled; make it simpler"

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*module_command(), MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            # In a session of its own, so that Ctrl-C does not reach it. It ends when its input is closed.
            start_new_session=True,
            env={**os.environ, **child_environment()},
        )
        if _ask(process, self._setup, _START_S) is None:
            process.kill()
            raise RuntimeError("the process that checks grammars did not start")
        return process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None, "both are pipes"
        # A broken pipe: its rest is lost anyway.
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def _ask(process: subprocess.Popen[str], message: object, timeout_s: float) -> dict[str, str | None] | None:
    """Return the answer to a message; None if the process ended instead. Raises TimeoutError."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    # An answer is one short line, which comes as a whole.
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise TimeoutError
    line = process.stdout.readline()
    answer: dict[str, str | None] | None = json.loads(line) if line else None
    return answer
