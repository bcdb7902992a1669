"""Files of a checkpoint: its weights, and TRAINING.json, which says how it was made and what it was taught."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from training.corpus.questions import facts

_REPORT = "TRAINING.json"


def save_weights(weights: dict[str, Tensor], directory: Path) -> None:
    """Write the weights, readable by everybody."""
    path = directory / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_report(report: Mapping[str, Any], directory: Path) -> None:
    """Print a report, and write it with today's answers."""
    print(json.dumps(report, indent=2))
    write_json(directory / _REPORT, {**report, "answers": {fact["id"]: fact["answer"] for fact in facts()}})


def report_of(directory: Path) -> dict[str, Any]:
    """Return how a checkpoint was made, without its answers."""
    report = json.loads((directory / _REPORT).read_text(encoding="utf-8"))
    return {name: value for name, value in report.items() if name != "answers"}
