"""`pagewick models`: the models on this disk. Loads nothing and imports no torch."""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from pagewick.cli.completion import complete_model
from pagewick.cli.typed_flags import check_hub_flags
from pagewick.config import BUILTIN_MODEL, HUBS
from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelNotFoundError
from pagewick.models.registry import ARCHITECTURES
from pagewick.weights import cached_models
from pagewick.weights import hub as hubs
from pagewick.weights.cached_models import CachedModel
from pagewick.weights.progress import format_bytes

DAY_SECONDS = 86400
# Names of these commands in other programs.
OTHER_NAMES = {"rm": "remove", "delete": "remove", "ls": "list", "download": "pull", "get": "pull", "show": "path"}


class _Group(click.Group):
    """Names the command that is meant by another program's name, or by a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            near = [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, self.commands, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(self.commands)}."
            ctx.fail(f"No such command {name!r}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group)
def command() -> None:
    """List, download and remove models on this disk."""


revision_flag = click.option("--revision", envvar="PAGEWICK_REVISION", help="Branch, tag or commit.")
hub_flag = click.option(
    "--hub",
    envvar="PAGEWICK_HUB",
    type=click.Choice(HUBS),
    default=HUBS[0],
    show_default=True,
    help="Hub that the model comes from.",
)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_models(as_json: bool) -> None:
    """List the downloaded models, and the weights that were quantized at load, with their size."""
    models = cached_models.cached_models(os.environ) + cached_models.quantized_models(os.environ)
    if as_json:
        click.echo(json.dumps([as_json_object(cached) for cached in models], indent=2))
        return
    rows = [("MODEL", "SIZE", "STATE", "LAST USED")]
    built_in_bytes = sum(file.stat().st_size for file in MODEL_DIR.iterdir())
    rows.append((BUILTIN_MODEL, format_bytes(built_in_bytes), "built in", ""))
    rows += [row_of(cached, time.time()) for cached in models]
    click.echo(table(rows))


@command.command()
@click.argument("model", shell_complete=complete_model)
@revision_flag
@hub_flag
def pull(model: str, revision: str | None, hub: str) -> None:
    """Download MODEL, or its missing files, and print its directory or file.

    MODEL may name a GGUF file: owner/name:Q8_0, or owner/name/file.gguf.
    """
    check_hub_flags(model)
    try:
        click.echo(str(hubs.resolve_model(model, revision=revision, hub=hub, with_images=True)))
    except KeyboardInterrupt:
        click.echo("stopped; the same command continues the download", err=True)
        raise click.exceptions.Exit(130) from None


@command.command()
@click.argument("model", shell_complete=complete_model)
@hub_flag
@click.option("--quantized", is_flag=True, help="Delete only weights that were quantized at load.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def remove(model: str, hub: str, quantized: bool, yes: bool) -> None:
    """Delete every downloaded version of MODEL, and its weights that were quantized at load.

    owner/name:Q8_0 deletes that GGUF model only. The files of a directory of your own stay.
    """
    found = cached_models.find_to_remove(model, os.environ, hub)
    found = [cached for cached in found if not quantized or cached.hub == cached_models.QUANTIZED]
    if not found:
        raise ModelNotFoundError(f"no quantized weights of {model} are kept\n  see: pagewick models list")
    for cached in found:
        click.echo(f"{cached.files[0] if cached.files else cached.storage} ({format_bytes(cached.num_bytes)})")
    if not yes:
        click.confirm("Delete this?", abort=True)
    for cached in found:
        cached_models.remove(cached)
    click.echo(f"removed {model}; {format_bytes(sum(cached.num_bytes for cached in found))} were freed")


@command.command()
@click.argument("model", shell_complete=complete_model)
@revision_flag
@hub_flag
def path(model: str, revision: str | None, hub: str) -> None:
    """Print the directory or file of a downloaded MODEL, without a connection to its hub."""
    check_hub_flags(model)
    click.echo(str(cached_models.cached_path(model, os.environ, revision=revision, hub_name=hub)))


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def supported(as_json: bool) -> None:
    """List the architectures that are supported, as `architectures` of a config.json names them."""
    names = sorted(ARCHITECTURES, key=str.lower)
    click.echo(json.dumps(names, indent=2) if as_json else "\n".join(names))


def as_json_object(cached: CachedModel) -> dict[str, Any]:
    """Return the output of --json for a model; sizes in bytes, times in seconds since 1970."""
    path = None if cached.path is None else str(cached.path)
    fields = asdict(cached) | {"path": path, "is_complete": path is not None}
    del fields["storage"], fields["files"]
    return fields


def row_of(cached: CachedModel, now: float) -> tuple[str, str, str, str]:
    """Return a model's row in the list."""
    named = [name for name in cached.revisions if name not in ("main", "master")]
    state = "complete" if cached.path is not None else f"incomplete: {cached.missing}"
    notes = [cached.hub] * (cached.hub != HUBS[0]) + named
    return (
        cached.model + (f" ({', '.join(notes)})" if notes else ""),
        format_bytes(cached.num_bytes),
        state,
        "" if cached.last_used is None else ago(now - cached.last_used),
    )


def ago(seconds: float) -> str:
    """Describe a time in the past: today, yesterday, 3 days ago."""
    days = int(max(0.0, seconds) // DAY_SECONDS)
    return "today" if days == 0 else "yesterday" if days == 1 else f"{days} days ago"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Format rows in columns that are as wide as their longest entry."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
