"""Environment variables that look like those of flags, and are not."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping

import click

PREFIX = "PAGEWICK_"
# Variables of Pagewick, its tests and its benchmarks that belong to no flag.
OTHERS = frozenset(
    PREFIX + name
    for name in (
        *("API_KEY", "BENCHMARK_PERIOD_US", "CHROMIUM", "COMPLETE", "CPU_ISA", "DEBUG", "DEEP", "LAUNCHER", "NATIVE"),
        *("NO_AARCH64", "NO_BROWSER", "PARENT_PID", "PROGRESS_FD", "REQUIRE_NATIVE", "TALLY", "TORTURE_SEED", "TRITON"),
    )
)
# Kubernetes sets PAGEWICK_SERVICE_HOST, PAGEWICK_PORT_8000_TCP and others in every pod if a Service is called pagewick,
# and PAGEWICK_API_SERVICE_HOST if one is called pagewick-api. The benchmarks read PAGEWICK_PEER_VLLM and others.
_OF_OTHERS = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)|^PAGEWICK_PEER_")
_ADDRESS = re.compile("(tcp|udp|sctp)://")


def warn_of_misspelt(
    command: click.Command, aliases: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> None:
    """Print a line on stderr for every variable that is similar to one of a flag, of any command, or to an alias.

    aliases: other names of fields, which have no variables, each with its field.
    """
    own = _variables([command])
    unknown = [name for name, value in environ.items() if name.startswith(PREFIX) and not _is_foreign(name, value)]
    if not (unknown := sorted(set(unknown) - own - OTHERS)):
        return
    from pagewick.cli import COMMANDS, cli

    context = click.Context(cli)
    commands = [found for name in COMMANDS if (found := cli.get_command(context, name)) is not None]
    known, ends = _variables(commands), {alias.upper(): target.upper() for alias, target in aliases.items()}
    suffixes = [name.removeprefix(PREFIX) for name in sorted(known) if name.startswith(PREFIX)]
    for name in unknown:
        suffix = name.removeprefix(PREFIX)
        near = [ends[suffix]] if suffix in ends else difflib.get_close_matches(suffix, suffixes, 1, cutoff=0.75)
        if name not in known and near:
            click.echo(f"warning: no flag has the variable {name}; did you mean {PREFIX}{near[0]}?", err=True)


def _is_foreign(name: str, value: str) -> bool:
    return _OF_OTHERS.search(name) is not None or _ADDRESS.match(value) is not None


def _variables(commands: Iterable[click.Command]) -> set[str]:
    """Return the variables of all flags of these commands and of their subcommands."""
    found: set[str] = set()
    for command in commands:
        for option in command.params:
            found |= {option.envvar} if isinstance(option.envvar, str) else set(option.envvar or ())
        found |= _variables(command.commands.values()) if isinstance(command, click.Group) else set()
    return found
