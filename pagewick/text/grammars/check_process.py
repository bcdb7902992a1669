"""The process that tries grammars: `python -m pagewick.text.grammars.check_process`; GrammarChecker starts it.

It reads JSON lines: first what `main` needs, then grammars, each with the beginnings that it must not allow. It
answers each with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from pagewick.text.grammars.constraint import reason_of
from pagewick.text.grammars.vocabulary import LIMITS, make_small_vocabulary

# The engine's threads have four times as much, so that a grammar that passes here passes there.
STACK_BYTES = 2 * 2**20
MAX_MEMORY_BYTES = 2 * 2**30
# With this niceness, the process gets about a tenth of a processor that another process wants, too.
NICENESS = 10
# Tokens of each response that a grammar is tried with. Some grammars compile quickly, and fail at the first of them, in
# one of several alternatives, so the responses begin with different tokens.
NUM_TRIED = (24, 8, 8, 8)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.readline())
    special = {int(key): name.encode() for key, name in setup["special"].items()}
    vocabulary = make_small_vocabulary(special, setup["vocab_size"])
    _answer(None)
    _lower_priority()
    for line in sys.stdin:
        # The signal ends this process; GrammarChecker sees that.
        signal.setitimer(signal.ITIMER_PROF, setup["timeout_s"])
        problem = _problem(vocabulary, *json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(problem)


def _lower_priority() -> None:
    os.nice(NICENESS)
    # Where Linux divides processor time among sessions first, the niceness of the session counts.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def _answer(reason: str | None) -> None:
    sys.stdout.write(json.dumps({"reason": reason}) + "\n")
    sys.stdout.flush()


def _problem(vocabulary: LLTokenizer, grammar: str, excluded: list[str]) -> str | None:
    """Return why a grammar cannot be used; None if it can. excluded: texts with which no response may begin."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    for text in excluded if not matcher.is_error() else ():
        token_ids = vocabulary.tokenize_str(text)
        if matcher.deep_copy().try_consume_tokens(token_ids) == len(token_ids):
            fix = "narrow it (additionalProperties false in a JSON schema), or leave tools out"
            return f"it allows responses that begin with {text!r}, as this model's tool calls do; {fix}"
    if matcher.is_error():
        return reason_of(matcher.get_error())
    tried = (
        _problem_of_response(vocabulary, matcher.deep_copy(), number, num_tokens)
        for number, num_tokens in enumerate(NUM_TRIED)
    )
    return next(filter(None, tried), None)


def _problem_of_response(vocabulary: LLTokenizer, matcher: LLMatcher, number: int, num_tokens: int) -> str | None:
    """Return why the response of this number fails within its first tokens."""
    chosen = random.Random(number)
    for place in range(num_tokens):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [place for place, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
        allowed = [place for place in allowed if place != vocabulary.eos_token]
        if matcher.is_error() or not allowed:
            break
        first = allowed[number * (len(allowed) - 1) // (len(NUM_TRIED) - 1)]
        matcher.consume_token(chosen.choice(allowed) if place else first)
    return reason_of(matcher.get_error()) if matcher.is_error() else None


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
