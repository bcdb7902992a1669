"""Flags as they stand on the command line: -n stays -n, although the option's first name is --n-predict."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import click

_KEY = "pagewick.typed_flags"


def read_typed_flags(command: click.Command, ctx: click.Context, args: list[str]) -> list[tuple[str, str]]:
    """Return the name of the parameter of every flag on the command line, with the flag that was typed.

    Keeps them for `typed_flags`. Raises click.UsageError for a flag that the command does not have.
    """
    each = click.Command(command.name, params=[one for param in command.params for one in _one_per_flag(param)])
    _, _, order = each.make_parser(ctx).parse_args(list(args))
    typed = [(param.name or "", param.opts[0]) for param in order if isinstance(param, click.Option)]
    first: dict[str, str] = {}
    for name, flag in typed:
        first.setdefault(name, flag)
    ctx.meta[_KEY] = first
    return typed


def typed_flags(ctx: click.Context) -> dict[str, str]:
    """Return the names of the parameters on the command line, each with the first flag that was typed for it."""
    return dict(ctx.meta.get(_KEY, {}))


def _one_per_flag(param: click.Parameter) -> Iterator[click.Parameter]:
    """Yield a copy of an option for each of its flags, so that the parser tells them apart."""
    if not isinstance(param, click.Option):
        yield param
        return
    for flag in (*param.opts, *param.secondary_opts):
        one = copy.copy(param)
        one.opts, one.secondary_opts = [flag], []
        yield one
