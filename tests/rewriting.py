"""Lets the workers of `pytest -n` share the rewriting of asserts.

pytest rewrites the asserts of a test file when it first imports the file, and keeps the result beside it. On a fresh
clone all workers import all files at the same time, and each would rewrite nearly all of them.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, folder: Path, worker: int, num_workers: int) -> None:
    """Rewrite and keep the files of one worker among those in a folder that nobody has rewritten so far."""
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None or state.mode != "rewrite" or sys.dont_write_bytecode:
        return
    for path in sorted(folder.rglob("test_*.py"))[worker::num_workers]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        # pytest itself looks whether what is kept is up to date, and reports an error of syntax.
        if not kept.exists():
            with suppress(SyntaxError):
                source_hash, code = rewrite._rewrite_test(path, config)
                kept.parent.mkdir(parents=True, exist_ok=True)
                rewrite._write_pyc(state, code, source_hash, kept)
