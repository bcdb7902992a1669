"""Results in files, and comparisons with them, which are less reliable than one within a single run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pagewick
from pagewick.cli.replacing_file import write_whole
from pagewick.errors import ConfigError

FORMAT = 1
WARNING = "Not the same run: the machine may have been faster or slower then."


def save_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report. Raises ConfigError if that fails; an earlier report then stays, and no new file remains."""
    content = json.dumps({"format": FORMAT, "pagewick": pagewick.__version__, **report}, indent=2) + "\n"
    try:
        write_whole(path, content.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --save") from None


def check_replaceable(path: Path) -> None:
    """Raise ConfigError for a file that is not a report of any version: the user may have taken another name for it."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or "pagewick" not in report:
        raise ConfigError(f"{path} exists, and is not a result of bench --save; remove it, or choose another --save")


def load_report(path: Path) -> dict[str, Any]:
    """Read a report that save_report wrote. Raises ConfigError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; --against needs a file that --save wrote") from None
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or report.get("format") != FORMAT or not isinstance(report.get("metrics"), dict):
        raise ConfigError(f"{path} is not a result that bench --save of this version wrote")
    return report


def compare(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning, the differences between the runs, and a line for each number that both have."""
    yield WARNING
    for name in ("workload", "model", "endpoint"):
        if name in earlier and name in now and (difference := _difference(earlier[name], now[name])):
            yield f"The {name} differs: {difference}"
    for name, spread in now["metrics"].items():
        before = earlier["metrics"].get(name)
        if not spread or not before or not before["median"]:
            continue
        ratio = spread["median"] / before["median"]
        yield f"{name}: {before['median']:,.4g} then, {spread['median']:,.4g} now, now / then {ratio:.3f}"


def _difference(before: Any, after: Any) -> str:
    """Describe how two values differ, only the entries that do if they are objects; empty if they do not."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return "" if before == after else f"{before} then, {after} now"
    before, after = _comparable(before), _comparable(after)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} was {before.get(name)} and is {after.get(name)}" for name in names)


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what differs between any two runs: the times of the start, and the number of a seed that was drawn."""
    kept = {name: value for name, value in values.items() if name not in ("timeline", "is_seed_drawn")}
    return kept | ({"seed": "drawn"} if values.get("is_seed_drawn") else {})
