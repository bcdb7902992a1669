"""The limit on open files, tested in separate processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagewick.server.guard.connections import MAX_FAREWELLS
from pagewick.server.guard.open_files import OTHER_FILES

SCRIPT = """
import resource, sys
from pagewick import log
from pagewick.server.guard.open_files import allow_open_files
from pagewick.server.settings import ServerSettings
log.set_up()
soft, hard, num_connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_open_files(ServerSettings(served_model_name=("m",), max_connections=num_connections))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
MORE = MAX_FAREWELLS + OTHER_FILES
HARD = 900  # whatever the machine allows, it allows as many


@pytest.mark.parametrize(
    ("soft", "num_connections", "expected", "warning"),
    [
        (800, 10, 800, ""),
        (100, 10, MORE + 10, ""),
        (100, HARD - MORE, HARD, ""),
        (100, 5000, HARD, f"ulimit -n {5000 + MORE}, or --max-connections {HARD - MORE}"),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(soft: int, num_connections: int, expected: int, warning: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(HARD), str(num_connections)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(expected), str(HARD)]
    assert (warning in done.stderr) if warning else not done.stderr
