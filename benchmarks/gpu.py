"""Measures Pagewick on a GPU, in parts of at most nine minutes.

    python -m benchmarks.gpu --list                   the parts and their items
    python -m benchmarks.gpu --part decode-8b         runs a part; items that have a result are not run again
    python -m benchmarks.gpu --show                   the table of all results
    python -m benchmarks.gpu --part all --dry-run     small models on a CPU: whether everything works, without figures

Every item is a process of its own, which is ended when the part's time is over, so that a kernel that hangs costs its
part only. Weights are random and are made on the device; only the peers need files. A result is a JSON file in --out.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import torch

from benchmarks.gpu_models import Place
from benchmarks.gpu_parts import PARTS, Figures

OUT: Final = Path(__file__).parent / "results" / "gpu"
PART_SECONDS: Final = 540


@click.command(help=__doc__)
@click.option("--part", "parts", multiple=True, help="A part, or all; may be repeated.")
@click.option("--item", help="Run this item of the part in this process.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Directory of the results.")
@click.option("--device", default="cuda", help="Device to measure.")
@click.option("--dry-run", is_flag=True, help="Run small models on the CPU.")
@click.option("--in-process", is_flag=True, help="Start no processes; nothing then ends an item that hangs.")
@click.option("--again", is_flag=True, help="Run items that have a result, too.")
@click.option("--seconds", default=PART_SECONDS, help="The longest time of a part.")
@click.option("--list", "is_list", is_flag=True, help="List the parts and their items.")
@click.option("--show", is_flag=True, help="Print the results.")
def main(
    parts: tuple[str, ...], item: str | None, out: Path, device: str, dry_run: bool, in_process: bool, again: bool,
    seconds: float, is_list: bool, show: bool,
) -> None:  # fmt: skip
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
    for name in chosen:
        run_part(place, name, out, seconds=seconds, in_process=in_process, again=again)
    if show or chosen:
        click.echo("\n".join(table(out)))
    elif not chosen:
        raise click.ClickException("give --part, --list or --show")


def run_part(place: Place, part: str, out: Path, *, seconds: float, in_process: bool, again: bool) -> None:
    """Run the items of a part that have no result yet, until its time is over."""
    ends = time.monotonic() + seconds
    for item in PARTS[part]:
        if result_file(out, part, item).exists() and not again:
            click.echo(f"{part}, {item}: done before")
        elif (left := ends - time.monotonic()) <= 0:
            click.echo(f"{part}, {item}: no time is left; run the part again")
        elif in_process:
            write(out, part, item, run_item(place, part, item))
        else:
            click.echo(f"{part}, {item}: {_run_apart(place, part, item, out, left)}")


def _run_apart(place: Place, part: str, item: str, out: Path, seconds: float) -> str:
    """Run an item in a process of its own; return how that ended."""
    where = ["--dry-run"] if place.is_dry else ["--device", place.device]
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--item", item, "--out", str(out), *where]
    try:
        done = subprocess.run(command, timeout=seconds, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s; the part's time is over"
    return "done" if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1:]}"


def run_item(place: Place, part: str, item: str) -> Figures:
    """Measure one item in this process."""
    run, arguments = PARTS[part][item]
    return run(place, **arguments)


def result_file(out: Path, part: str, item: str) -> Path:
    return out / f"{part}-{item.replace(' ', '-')}.json"


def write(out: Path, part: str, item: str, figures: Figures) -> None:
    """Write a result whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    file = result_file(out, part, item)
    result = {"part": part, "item": item, "machine": describe(), "figures": figures}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def describe() -> dict[str, str]:
    """Name the GPU, or the processor, and the versions that matter."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "system": platform.system()}


def table(out: Path) -> Iterator[str]:
    """Yield the lines of a Markdown table of all results, part by part."""
    yield "| part | item | figure | value | GPU |"
    yield "|---|---|---|---|---|"
    for part, items in PARTS.items():
        for item in items:
            file = result_file(out, part, item)
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            for name, value in result.get("figures", {}).items():
                shown = value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
                yield f"| {part} | {item} | {name} | {shown} | {result['machine']['gpu']} |"


if __name__ == "__main__":
    main()
