"""Files of a checkpoint: its weights, and TRAINING.json, which says how it was made and what it was taught."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from training.corpus.questions import facts

_REPORT = "TRAINING.json"
_EARLIER = "earlier_checkpoints"


def save_weights(weights: dict[str, Tensor], directory: Path) -> None:
    """Write the weights, readable by everybody."""
    path = directory / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_report(report: Mapping[str, Any], directory: Path) -> None:
    """Print a report, and write it with today's answers.

    Reports of earlier checkpoints inside it, as started_from and average_of, are written once each, as a list, and
    their places name them by number.
    """
    earlier: list[dict[str, Any]] = []
    flat = {**_flat(report, earlier, {}), _EARLIER: earlier}
    print(json.dumps(flat, indent=2))
    write_json(directory / _REPORT, {**flat, "answers": {fact["id"]: fact["answer"] for fact in facts()}})


def report_of(directory: Path) -> dict[str, Any]:
    """Return how a checkpoint was made, with the reports of earlier ones inside, without its answers."""
    report = json.loads((directory / _REPORT).read_text(encoding="utf-8"))
    earlier: list[dict[str, Any]] = []
    for one in report.pop(_EARLIER, ()):
        earlier.append(_with_earlier(one, earlier))
    return {name: value for name, value in _with_earlier(report, earlier).items() if name != "answers"}


def _flat(report: Mapping[str, Any], earlier: list[dict[str, Any]], numbers: dict[int, int]) -> dict[str, Any]:
    """Return a report with numbers of `earlier`, to which missing ones are added. numbers: by the id of a report."""

    def number(inner: Mapping[str, Any]) -> int:
        if id(inner) not in numbers:
            found = _flat(inner, earlier, numbers)
            if found not in earlier:
                earlier.append(found)
            numbers[id(inner)] = earlier.index(found)
        return numbers[id(inner)]

    return _replaced(report, number)


def _with_earlier(report: Mapping[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a report with those in place of their numbers."""
    return _replaced(report, lambda one: earlier[one] if isinstance(one, int) else one)


def _replaced(report: Mapping[str, Any], replace: Callable[[Any], Any]) -> dict[str, Any]:
    found = dict(report)
    if found.get("started_from") is not None:
        found["started_from"] = replace(found["started_from"])
    if "average_of" in found:
        found["average_of"] = [replace(one) for one in found["average_of"]]
    return found
