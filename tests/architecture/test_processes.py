"""The HTTP process never imports torch, not even indirectly, and neither do modules that need no tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGE, ROOT

TORCH_FREE = [
    "pagewick",
    "pagewick.async_llm",
    "pagewick.cli",
    "pagewick.cli.serve",
    "pagewick.engine.client",
    "pagewick.engine.messages",
    "pagewick.images.sources",
    "pagewick.parallel.topology",
    "pagewick.server.app",
    "pagewick.server.hub.api_process",
    "pagewick.server.hub.run",
    "pagewick.weights.hub",
    *(f"pagewick.text.{path.stem}" for path in sorted((PACKAGE / "text").glob("*.py")) if path.stem != "__init__"),
]

# Prints which of the modules imported torch, Triton, or a library that would import them.
SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "triton", "transformers", "numpy"} & set(sys.modules)
    if heavy:
        sys.exit(f"{name} imports {', '.join(sorted(heavy))}")
"""


def import_in_a_fresh_process(*modules: str) -> str:
    """Return the script's complaint; empty if there is none."""
    command = [sys.executable, "-c", SCRIPT, *modules]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode == 0) == (result.stderr == ""), result.stderr
    return result.stderr.strip()


def test_the_http_process_imports_no_torch() -> None:
    assert import_in_a_fresh_process(*TORCH_FREE) == ""


@pytest.mark.parametrize("module", ["pagewick.kernels", "pagewick.engine.engine"])
def test_the_check_finds_torch(module: str) -> None:
    assert f"{module} imports" in import_in_a_fresh_process(module)
