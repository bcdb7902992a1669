"""How far the logits of each engine are from those of the bf16 weights, for a prompt of random tokens.

Every engine has a command, which gets three more arguments: TOKENS, a file of 32-bit ids, NUM_LAST, and OUT, the file
to write: [2][NUM_LAST][vocab_size] floats, the logits of the last tokens. First they are computed as parts of the
prompt, then in steps of one token, since some engines multiply with other numbers when there are many rows. The
reference is Pagewick with the bf16 weights, computed in float32, which tests/models compares with transformers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagewick.cli.benchmarking.scenarios import Scenario
from pagewick.errors import ConfigError

NUM_LAST: Final = 32
PROMPT: Final = Scenario("accuracy", 512, 1)
SEED: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class LogitsCommand:
    """A command that writes logits, without its last three arguments, and the environment that it needs."""

    arguments: list[str]
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LogitsError:
    """The mean distance of logits from those of the bf16 weights, in standard deviations of the latter."""

    prompt: float
    token_by_token: float


def pagewick_logits(model: Path, dtype: str, num_threads: int, *, is_reference: bool = False) -> LogitsCommand:
    """Return Pagewick's command. is_reference: only the first half is wanted, since the other takes minutes."""
    ways = "prompt" if is_reference else "both"
    arguments = [sys.executable, "-m", "benchmarks.logits_pagewick", str(model), dtype, str(num_threads), ways]
    return LogitsCommand(arguments)


def measure_errors(
    commands: Mapping[str, Callable[[], LogitsCommand]], reference: LogitsCommand, vocab_size: int, directory: Path
) -> dict[str, LogitsError]:
    """Return the error of each engine. Raises ConfigError if a command fails.

    commands: by engine; each is made when it is needed, which may compile a program. directory: of files.
    """
    tokens = directory / "tokens"
    np.array(PROMPT.prompts(vocab_size, SEED)[0], np.int32).tofile(tokens)
    expected = _run(reference, tokens, vocab_size, directory / "reference")[0]
    found = {}
    for key, make_command in commands.items():
        logits = _run(make_command(), tokens, vocab_size, directory / "logits")
        found[key] = LogitsError(*(mean_error(one, expected) for one in logits))
    return found


def mean_error(logits: Iterable[NDArray[np.float32]], expected: NDArray[np.float32]) -> float:
    """Return the mean of |difference|, divided by the standard deviation of what is expected."""
    rows = [np.abs(one - other, dtype=np.float64).mean() for one, other in zip(logits, expected, strict=True)]
    return float(np.mean(rows) / expected.std(dtype=np.float64))


def _run(command: LogitsCommand, tokens: Path, vocab_size: int, out: Path) -> NDArray[np.float32]:
    arguments = [*command.arguments, str(tokens), str(NUM_LAST), str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=command.environment)
    if done.returncode:
        raise ConfigError(f"{' '.join(arguments[:3])} computes no logits: {done.stderr.strip()[-400:]}")
    return np.fromfile(out, np.float32).reshape(-1, NUM_LAST, vocab_size)
