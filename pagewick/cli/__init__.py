"""The `pagewick` command. Each subcommand is a module, which is imported when the command is called."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

import click

import pagewick
from pagewick.cli.terminal_text import harmless_lines
from pagewick.errors import PagewickError

# Name -> the line that `pagewick --help` shows, without importing the command.
COMMANDS = {
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "chat": "Talk to a model in the terminal.",
    "complete": "Complete prompts and print the responses.",
    "bench": "Measure tokens per second of this machine or of a server.",
    "convert": "Write a model as a GPTQ, AWQ, Marlin or GGUF checkpoint.",
    "quantize": "Write a model as a GGUF file, quantized or not.",
    "imatrix": "Measure which weights matter most on a text, for quantize.",
    "doctor": "Check what this machine can run, and how.",
    "models": "List, download and remove models.",
    "completion": "Print a script for completion of commands in your shell.",
}
# Names of these commands in other programs.
OTHER_NAMES = {"run": "chat", "server": "serve", "completions": "completion", "generate": "complete"}
# Commands of other programs that take several words here.
_INSTEAD = {
    "pull": "models pull MODEL",
    "download": "models pull MODEL",
    "list": "models list",
    "ls": "models list",
    "rm": "models remove MODEL",
    "cache": "models list",
}
# Flags that select a command in programs without commands.
_COMMAND_OF_FLAG = {"--i": "chat", "--prompts": "complete", "--prompt": "complete", "--batch": "bench"}
MAX_ERROR_LINES = 6
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        name = OTHER_NAMES.get(args[0], args[0])
        if name not in COMMANDS and not name.startswith("-"):
            ctx.fail(f"No such command {name!r}; {_alternative(name)}")
        return super().resolve_command(ctx, [name, *args[1:]])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            command = next((_COMMAND_OF_FLAG[flag] for flag in given if flag in _COMMAND_OF_FLAG), "serve")
            ctx.fail(f"{error.option_name} comes after a command: pagewick {command} {error.option_name} ...")
        # --help and --version print here.
        except OSError as error:
            _end_with(ctx, error)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.MissingParameter as error:
            # click writes a line for each value that it may have.
            raise click.UsageError(" ".join(error.format_message().split()), error.ctx) from None
        except PagewickError as error:
            show_error(error)
            ctx.exit(1)
        except OSError as error:
            _end_with(ctx, error)


def _end_with(ctx: click.Context, error: OSError) -> NoReturn:
    if error.filename is None and error.errno not in _DISK_FULL:
        raise error
    show_error(_error_of(error))
    ctx.exit(1)


def _error_of(error: OSError) -> PagewickError:
    """Return our error for one of the system that no part of a command expected, about a path or a full disk."""
    if error.filename is None:
        # The rest of stdout's buffer could not be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        found = PagewickError(f"cannot write the output: {error.strerror}; free space and start again")
    else:
        check = "check the path, and your permissions for it and its directories"
        fix = "free space and start again" if error.errno in _DISK_FULL else check
        path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        found = PagewickError(f"cannot use {path}: {error.strerror}\n  {fix}")
    found.__cause__ = error
    return found


def _alternative(name: str) -> str:
    """Return what to do instead of calling a command that does not exist."""
    if name in _INSTEAD:
        return f"use: pagewick {_INSTEAD[name]}"
    if "/" in name or os.path.exists(name):
        return f"a model comes after a command: pagewick serve {name}, or pagewick chat {name}"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."


def show_error(error: PagewickError) -> None:
    """Print an error on stderr, in at most six lines; PAGEWICK_DEBUG=1 adds the traceback."""
    if os.environ.get("PAGEWICK_DEBUG", "") not in ("", "0"):
        click.echo("".join(traceback.format_exception(error)), err=True)
    lines = [*f"error: {error}".splitlines(), *getattr(error, "__notes__", [])]
    if len(lines) > MAX_ERROR_LINES:
        lines = [*lines[: MAX_ERROR_LINES - 1], "..."]
    click.echo(harmless_lines("\n".join(lines)), err=True)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every flag can also be set by an environment variable (--max-model-len by PAGEWICK_MAX_MODEL_LEN) and in a "
    "TOML file that --config names. Many flags of other servers are understood.",
)
@click.version_option(pagewick.__version__, prog_name="pagewick")
def cli() -> None:
    """Pagewick runs and serves large language models."""


def open_standard_streams() -> None:
    """Open /dev/null in place of stdin, stdout and stderr if the caller has closed them, as `>&-` does.

    Python leaves them None then, and the next file that is opened would get their number, and what C code prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is that of the stream.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def main() -> None:
    """Run the `pagewick` command; the exit status is 0, 1 (an error) or 2 (a wrong command line)."""
    open_standard_streams()
    cli(prog_name="pagewick")
