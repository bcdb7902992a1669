"""Measures Pagewick on a GPU, in parts of at most nine minutes.

    python -m benchmarks.gpu --list                   the parts and their items
    python -m benchmarks.gpu --part decode-8b         runs a part; items that have a result are not run again
    python -m benchmarks.gpu --show                   the table of all results
    python -m benchmarks.gpu --part all --dry-run     small models on a CPU: whether everything works, without figures

Every item is a process of its own. It gets at most half of the part's time while others wait, so that a kernel that
hangs or fails costs its item only; what it wrote to standard error stays in a file beside the results. Run again, a
part first measures the items that have never run, then those that failed. Weights are random and are made on the
device; only the peers need files. A result is a JSON file in --out.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# Before torch, so that it can set up torch's threads: the CPU computes what the results are compared with.
import pagewick  # noqa: F401

# isort: split
import click
import torch

from benchmarks.gpu_models import Place
from benchmarks.gpu_parts import PARTS
from benchmarks.gpu_serving import Figures
from pagewick.parallel.launch import die_with_parent

OUT: Final = Path(__file__).parent / "results" / "gpu"
PART_SECONDS: Final = 540
# A process that a GPU's driver holds cannot be ended; the next item then starts without waiting for it.
ENDING_SECONDS: Final = 10
# Letters of an exception that a table shows.
REASON_LENGTH: Final = 400
_EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


@click.command(help=__doc__)
@click.option("--part", "parts", multiple=True, help="A part, or all; may be repeated.")
@click.option("--item", help="Run this item of the part in this process.")
@click.option("--parent", type=int, hidden=True, help="The process that has started this one, and with which it ends.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Directory of the results.")
@click.option("--device", default="cuda", help="Device to measure.")
@click.option("--dry-run", is_flag=True, help="Run small models on the CPU.")
@click.option("--in-process", is_flag=True, help="Start no processes; nothing then ends an item that hangs.")
@click.option("--again", is_flag=True, help="Run items that have a result, too.")
@click.option("--seconds", default=PART_SECONDS, help="The longest time of a part.")
@click.option("--list", "is_list", is_flag=True, help="List the parts and their items.")
@click.option("--show", is_flag=True, help="Print the results.")
def main(
    parts: tuple[str, ...], item: str | None, parent: int | None, out: Path, device: str, dry_run: bool,
    in_process: bool, again: bool, seconds: float, is_list: bool, show: bool,
) -> None:  # fmt: skip
    if parent is not None:
        die_with_parent(parent)
    place = Place("cpu", is_dry=True) if dry_run else Place(device)
    chosen = list(PARTS) if "all" in parts else list(parts)
    if unknown := [name for name in chosen if name not in PARTS]:
        raise click.ClickException(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    if item is not None:
        if len(chosen) != 1 or item not in PARTS[chosen[0]]:
            raise click.ClickException(f"--item {item} is none of one --part; --list shows them")
        write(out, chosen[0], item, run_item(place, chosen[0], item))
        return
    if is_list:
        for name, items in PARTS.items():
            click.echo(f"{name}: {', '.join(items)}")
        return
    all_done = True
    for name in chosen:
        all_done &= run_part(place, name, out, seconds=seconds, in_process=in_process, again=again)
    if show or chosen:
        click.echo("\n".join(table(out)))
    elif not chosen:
        raise click.ClickException("give --part, --list or --show")
    sys.exit(0 if all_done else 1)


def run_part(place: Place, part: str, out: Path, *, seconds: float, in_process: bool, again: bool) -> bool:
    """Run the items of a part that have no result yet, until its time is over. Returns whether none of them failed."""
    ends, all_done = time.monotonic() + seconds, True
    waiting = []
    for item in PARTS[part]:
        if result_file(out, part, item).exists() and not again:
            click.echo(f"{part}, {item}: done before")
        else:
            waiting.append(item)
    # Those that have failed before may fail again, and take the time of others.
    waiting.sort(key=lambda item: failure_file(out, part, item).exists())
    for number, item in enumerate(waiting):
        if (left := ends - time.monotonic()) <= 0:
            click.echo(f"{part}, {item}: no time is left; run the part again")
            continue
        is_last = number == len(waiting) - 1
        limit = left if is_last else min(left, seconds / 2)
        problem = _run_here(place, part, item, out) if in_process else _run_apart(place, part, item, out, limit)
        if problem:
            all_done = False
            _write_whole(failure_file(out, part, item), {"part": part, "item": item, "problem": problem})
        else:
            failure_file(out, part, item).unlink(missing_ok=True)
        click.echo(f"{part}, {item}: {problem or 'done'}")
    return all_done


def _run_here(place: Place, part: str, item: str, out: Path) -> str:
    """Run an item in this process; return why it failed, or nothing."""
    try:
        write(out, part, item, run_item(place, part, item))
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return ""


def _run_apart(place: Place, part: str, item: str, out: Path, seconds: float) -> str:
    """Run an item in a process of its own; return why it failed, or nothing."""
    where = ["--dry-run"] if place.is_dry else ["--device", place.device]
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--item", item, "--out", str(out), *where]
    out.mkdir(parents=True, exist_ok=True)
    log = result_file(out, part, item).with_suffix(".log")
    with log.open("wb") as errors:
        # In a session of its own, so that compilers that it has started end with it.
        process = subprocess.Popen([*command, "--parent", str(os.getpid())], stderr=errors, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s; {log.name} has what it said"
        finally:
            _end(process)
    if status == 0:
        return ""
    reason = reason_in(log.read_text(encoding="utf-8", errors="replace"))
    return f"failed ({_named(status)}): {reason}; {log.name} has more"


def reason_in(said: str) -> str:
    """Return the last exception in what a process has written to standard error, or else its last line."""
    lines = [line.strip() for line in said.strip().splitlines()]
    first = max((place for place, line in enumerate(lines) if _EXCEPTION.match(line)), default=len(lines) - 1)
    return " ".join(lines[first:])[:REASON_LENGTH] or "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=ENDING_SECONDS)


def _named(status: int) -> str:
    """Return the exit status of a process in words."""
    return f"signal {-status}" if status < 0 else f"status {status}"


class _Warnings(logging.Handler):
    """Keeps warnings, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.said[record.getMessage()] = None


def run_item(place: Place, part: str, item: str) -> Figures:
    """Measure one item in this process. What Pagewick has warned of is a figure, too: that graphs are off, say."""
    run, arguments = PARTS[part][item]
    warnings = _Warnings()
    logging.getLogger("pagewick").addHandler(warnings)
    try:
        figures = run(place, **arguments)
    finally:
        logging.getLogger("pagewick").removeHandler(warnings)
    return figures | ({"warnings": "; ".join(warnings.said)[:REASON_LENGTH]} if warnings.said else {})


def result_file(out: Path, part: str, item: str) -> Path:
    return out / f"{part}-{item.replace(' ', '-')}.json"


def failure_file(out: Path, part: str, item: str) -> Path:
    return result_file(out, part, item).with_suffix(".failed")


def write(out: Path, part: str, item: str, figures: Figures) -> None:
    """Write a result whole or not at all."""
    result = {"part": part, "item": item, "machine": describe(), "figures": figures}
    _write_whole(result_file(out, part, item), result)


def _write_whole(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def describe() -> dict[str, str]:
    """Name the GPU, or the processor, and the versions that matter."""
    gpu, capability, triton = "none", "none", "none"
    if torch.cuda.is_available():
        gpu, capability = torch.cuda.get_device_name(), "{}.{}".format(*torch.cuda.get_device_capability())
    with suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
    return {
        "gpu": gpu, "capability": capability, "torch": torch.__version__, "triton": triton,
        "python": platform.python_version(), "system": platform.system(),
    }  # fmt: skip


def table(out: Path) -> Iterator[str]:
    """Yield the lines of a Markdown table of all results and failures, part by part."""
    yield "| part | item | figure | value | GPU |"
    yield "|---|---|---|---|---|"
    for part, items in PARTS.items():
        for item in items:
            file = result_file(out, part, item)
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            failure = failure_file(out, part, item)
            if failure.exists():
                problem = json.loads(failure.read_text(encoding="utf-8"))["problem"].replace("|", "/")
                yield f"| {part} | {item} | no result | {problem} | |"
            for name, value in result.get("figures", {}).items():
                shown = value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
                yield f"| {part} | {item} | {name} | {shown} | {result['machine']['gpu']} |"


if __name__ == "__main__":
    main()
