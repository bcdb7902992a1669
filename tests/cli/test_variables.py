"""Variables that look like those of flags."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagewick.cli.variables import OTHERS, PREFIX

ROOT = Path(__file__).parents[2]


def warnings(*arguments: str, **environment: str) -> list[str]:
    """Return the warnings of a command that ends at once."""
    left = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWICK_")}
    done = subprocess.run(
        [sys.executable, "-m", "pagewick", *arguments],
        env=left | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [line for line in done.stderr.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PAGEWICK_MAX_MODELL_LEN", "PAGEWICK_MAX_MODEL_LEN"),
        ("PAGEWICK_SHUTDOWN_TIMOUT", "PAGEWICK_SHUTDOWN_TIMEOUT"),  # a flag of another command
        ("PAGEWICK_CTX_SIZE", "PAGEWICK_MAX_MODEL_LEN"),  # other names of flags have no variables
        ("PAGEWICK_TENSOR_PARALEL_SIZE", "PAGEWICK_TENSOR_PARALLEL_SIZE"),
    ],
)
def test_a_misspelt_variable_is_named_once(name: str, meant: str) -> None:
    expected = [f"warning: no flag has the variable {name}; did you mean {meant}?"]
    assert warnings("complete", **{name: "5"}) == expected


def test_variables_of_flags_and_of_others_are_left_alone() -> None:
    environment = {
        "PAGEWICK_SERVICE_HOST": "10.0.0.1",
        "PAGEWICK_SERVICE_PORT_HTTP": "8000",
        "PAGEWICK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PAGEWICK_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PAGEWICK_PORTS": "tcp://10.0.0.1:8000",
        "PAGEWICK_PEER_VLLM": "/opt/vllm",
        "PAGEWICK_SHUTDOWN_TIMEOUT": "5",
        "PAGEWICK_NATIVE": "1",
        "PAGEWICK_SOMETHING_ELSE": "x",
    }
    assert warnings("complete", **environment) == []


def test_every_variable_that_the_package_reads_is_known() -> None:
    read: set[str] = set()
    for file in (ROOT / "pagewick").rglob("*"):
        if file.suffix in (".py", ".cpp", ".h"):
            text = file.read_text(encoding="utf-8")
            read |= set(re.findall(r"(?:environ|getenv|environ\.get)[\[(]\"(PAGEWICK_[A-Z_]+)\"", text))
    assert "PAGEWICK_DEBUG" in read
    assert read <= OTHERS | {f"{PREFIX}{name}" for name in ("LOG_FORMAT", "LOG_LEVEL", "CONFIG", "PORT")}
