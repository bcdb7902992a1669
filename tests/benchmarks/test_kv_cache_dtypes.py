"""The benchmark of KV cache dtypes runs, and its limit is that of the bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.kv_cache_dtypes import limit, main
from pagewick.cli.random_model import SHAPES


def test_the_limit_is_that_of_the_bytes() -> None:
    def engine(vector_bytes: int) -> Any:
        # 28 layers with keys and values of 8 heads; 7 blocks of 32 tokens.
        info = SimpleNamespace(kv_cache_bytes=28 * 2 * 8 * vector_bytes * 7 * 32, num_kv_blocks=7)
        return SimpleNamespace(info=info)

    engines = {"bfloat16": engine(128 * 2), "int8": engine(128 + 4)}
    weights = (28 * (1024 * (2 * 2048 + 2 * 1024) + 1024 * 3 * 3072) + 151936 * 1024) * 34 / 32
    expected = (weights + 8192 * 28 * 2 * 8 * 256) / (weights + 8192 * 28 * 2 * 8 * 132)
    assert limit(SHAPES["qwen3-0.6b"], engines, "int8", 8192) == pytest.approx(expected)
    assert 1.40 < expected < 1.42


def test_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = "--shape qwen3-tiny --dtypes int8 --context 40 --rounds 2 --steps 2 --prompts 2 --chunk 16 --threads 1"
    result = CliRunner().invoke(main, options.split(), catch_exceptions=False)
    rows = [line.split()[:2] for line in result.output.splitlines()[3:]]
    assert rows == [["prompt", "bfloat16"], ["prompt", "int8"], ["decode", "bfloat16"], ["decode", "int8"]]
