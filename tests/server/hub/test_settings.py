"""--api-server-count: its limits, and that one process pays nothing for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagewick.errors import ConfigError
from pagewick.server.settings import MAX_API_SERVERS, ServerSettings


@pytest.mark.parametrize("count", [-1, 0, MAX_API_SERVERS + 1])
def test_a_senseless_number_of_processes_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--api-server-count must be 1 to {MAX_API_SERVERS}; got {count}"):
        ServerSettings(api_server_count=count)


def test_a_server_of_one_process_does_not_load_the_hub() -> None:
    script = "import sys, pagewick.server.run; print(*(one for one in sys.modules if '.server.hub' in one))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "\n"
