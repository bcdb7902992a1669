"""Where a flag's value comes from: the command line, a variable or the file of --config; and which of them wins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from pagewick.cli.flags import SOURCES, FieldFlags, flag_of, long_name
from pagewick.cli.typed_flags import typed_flags
from pagewick.errors import ConfigError, InvalidRequestError

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_Config = TypeVar("_Config")
_Option = TypeVar("_Option", bound=click.Parameter)


def source_of(ctx: click.Context, option: click.Parameter | None) -> str | None:
    """Return the variable or the file's key that a value comes from; None if it is on the command line."""
    if option is None or option.name is None:
        return None
    source = ctx.get_parameter_source(option.name)
    if source == SOURCES[1]:
        variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
        return next((name for name in variables if os.environ.get(name)), None)
    return f"{long_name(option)} in the file of --config" if source == SOURCES[2] else None


def sources_of(ctx: click.Context, error: ConfigError | InvalidRequestError) -> str:
    """Return the end of an error: the variables and the file's keys that set the flags which it names."""
    param = error.param if isinstance(error, InvalidRequestError) else None
    options: list[click.Parameter] = [*_named(ctx, str(error))]
    if param is not None:
        options += [one for one in ctx.command.params if long_name(one) == flag_of(param) and one not in options]
    sources = [source for option in options if (source := source_of(ctx, option)) is not None]
    return f" (from {', '.join(sources)})" if sources else ""


def give_way(ctx: click.Context, options: Collection[_Option]) -> list[_Option]:
    """Return those of these options, which contradict each other, that come from a lower source than another.

    Prints a line about each on stderr.
    """
    ranks = {option: SOURCES.index(found) for option in options if (found := _source(ctx, option)) in SOURCES}
    first = min(ranks.values(), default=0)
    winners = [option for option, rank in ranks.items() if rank == first]
    losers = [option for option, rank in ranks.items() if rank > first]
    for option in losers:
        place = source_of(ctx, winners[0])
        typed = typed_flags(ctx).get(winners[0].name or "", long_name(winners[0]))
        winner = f"{typed} is on the command line" if place is None else f"{place} is set"
        click.echo(f"note: {source_of(ctx, option)} changes nothing: {winner}", err=True)
    return losers


def consistent(
    ctx: click.Context, group: FieldFlags, values: Mapping[str, Any], make: Callable[..., _Config]
) -> _Config:
    """Return make(**values). If values contradict each other, those of a variable or a file give way to others.

    values: by field, some of the flags of `group`. Raises ConfigError as `make` does, if that does not help.
    """
    values = dict(values)
    while True:
        try:
            return make(**values)
        except ConfigError as error:
            targets = {option: group.field_of(option) for option in _named(ctx, str(error), group)}
            given = {option: target for option, target in targets.items() if target in values}
            losers = [given[option] for option in give_way(ctx, given)]
            if not losers:
                raise
            for name in losers:
                values.pop(name, None)


def _named(ctx: click.Context, message: str, group: FieldFlags | None = None) -> list[click.Option]:
    """Return the options whose flags a message names, in the order of the command; with a group, under all names."""
    flags = set(_FLAG.findall(message))
    options = [option for option in ctx.command.params if isinstance(option, click.Option)]
    named = [option for option in options if flags & {long_name(option), *option.secondary_opts}]
    if group is None:
        return named
    names = {group.field_of(option) for option in named} - {None}
    return [option for option in options if group.field_of(option) in names and _source(ctx, option) in SOURCES]


def _source(ctx: click.Context, option: click.Parameter) -> Any:
    return None if option.name is None else ctx.get_parameter_source(option.name)
