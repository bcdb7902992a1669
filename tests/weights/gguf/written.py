"""GGUF files as `pagewick quantize` writes them."""

from __future__ import annotations

from pathlib import Path

from pagewick.cli.quantizing.plan import planned_export
from pagewick.weights.gguf.importance import Importance
from pagewick.weights.progress import Progress


def write(model: Path, output: Path, kind: str, importance: Importance | None = None) -> Path:
    """Write a model's file in a type, replacing any; return its path."""
    with planned_export(model, "a-model", kind, importance) as (export, _):
        export.write(output, is_forced=True, progress=Progress())
    return output
