"""Flags as they stand on the command line: -n stays -n, although the option's first name is --n-predict.

Flags without an effect are refused only if they are typed: a variable or a file may be meant for another command.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields

import click
from click.core import ParameterSource

from pagewick.config import EngineConfig
from pagewick.errors import ConfigError

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


def refuse_beside_url(ctx: click.Context, typed: Mapping[str, str]) -> None:
    """Raise click.UsageError for the engine's flags on the command line, where --url names a server.

    typed: fields of EngineConfig, each with the flag that was typed. The model and the seed are for requests, too.
    """
    *flags, last = [flag for name, flag in typed.items() if name not in ("model", "seed")] or [""]
    if last:
        these, verb, them = (f"{', '.join(flags)} and {last}", "have", "them") if flags else (last, "has", "it")
        raise click.UsageError(
            f"{these} {verb} no effect with --url: the server has its own engine; leave {them} out.", ctx
        )


def check_typed(ctx: click.Context, config: EngineConfig, typed: Mapping[str, str]) -> None:
    """Raise click.UsageError for a flag on the command line that has no effect beside the others.

    typed: as for refuse_beside_url.
    """
    if not typed:
        return
    from pagewick.api_arguments import check_given

    try:
        check_given(config, typed)
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from None


def with_effect(config: EngineConfig, typed: Mapping[str, str]) -> EngineConfig:
    """Return the config without the options of variables and files that have no effect beside the others.

    typed: as for refuse_beside_url.
    """
    names = [one.name for one in fields(config) if getattr(config, one.name) != one.default and one.name not in typed]
    if not set(names) - {"model"}:
        return config
    from pagewick.api_arguments import without_idle_options

    return without_idle_options(config, names)


def check_hub_flags(model: str) -> None:
    """Raise click.UsageError for --revision and --hub of the running command if the model is not on a hub."""
    ctx = click.get_current_context()
    typed = [name for name in ("revision", "hub") if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    check_typed(ctx, EngineConfig(model=model), {name: f"--{name}" for name in typed})


def _one_per_flag(param: click.Parameter) -> Iterator[click.Parameter]:
    """Yield a copy of an option for each of its flags, so that the parser tells them apart."""
    if not isinstance(param, click.Option):
        yield param
        return
    for flag in (*param.opts, *param.secondary_opts):
        one = copy.copy(param)
        one.opts, one.secondary_opts = [flag], []
        yield one
