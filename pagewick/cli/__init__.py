"""The `pagewick` command. Each subcommand is a module of its own, imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import os
import traceback
from typing import Any

import click

import pagewick
from pagewick.errors import PagewickError

# Name -> the line that `pagewick --help` shows; kept here so that it needs no import.
COMMANDS = {
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "chat": "Talk to a model in the terminal.",
    "complete": "Complete prompts and print the answers.",
    "bench": "Measure tokens per second, of this machine or of a server.",
    "doctor": "Say what this machine can run, and how.",
    "models": "List, download and remove models.",
    "completion": "Print a script that completes commands in your shell.",
}
MAX_ERROR_LINES = 6


class LazyGroup(click.Group):
    """Imports `pagewick.cli.<name>` when the command `<name>` is called; shows errors as messages, not tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"pagewick.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PagewickError as error:
            show_error(error)
            ctx.exit(1)


def show_error(error: PagewickError) -> None:
    """Say what is wrong in at most six lines on stderr; PAGEWICK_DEBUG=1 adds the traceback."""
    if os.environ.get("PAGEWICK_DEBUG", "") not in ("", "0"):
        click.echo("".join(traceback.format_exception(error)), err=True)
    lines = [*f"error: {error}".splitlines(), *getattr(error, "__notes__", [])]
    if len(lines) > MAX_ERROR_LINES:
        lines = [*lines[: MAX_ERROR_LINES - 1], "..."]
    click.echo("\n".join(lines), err=True)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every flag is also read from the environment (--max-model-len from PAGEWICK_MAX_MODEL_LEN), and from a TOML "
    "file that --config names.",
)
@click.version_option(pagewick.__version__, prog_name="pagewick")
def cli() -> None:
    """Pagewick serves large language models."""


def main() -> None:
    """Entry point of the `pagewick` command; it exits with 0, 1 (an error) or 2 (a wrong command line)."""
    cli(prog_name="pagewick")
