"""Dataclass fields <-> command-line flags, environment variables and keys of a configuration file."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

import click
from click.core import ParameterSource

from pagewick.config import parse_bytes
from pagewick.errors import ConfigError

# Another name -> the field, and what makes the field's value of the given one.
Aliases = Mapping[str, tuple[str, Callable[[Any], Any] | None]]

_SERVICE_ADDRESS = re.compile("(tcp|udp|sctp)://")

# Who is heard first.
_SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def variable_of(flag: str) -> str:
    """The environment variable of a flag: PAGEWICK_MAX_MODEL_LEN of --max-model-len."""
    return "PAGEWICK_" + flag.lstrip("-").replace("-", "_").upper()


def long_name(option: click.Parameter) -> str | None:
    """The first long name of an option, --like-this; None if it has none."""
    return next((name for name in option.opts if name.startswith("--")), None)


class Flag(click.Option):
    """An option that is also read from PAGEWICK_<NAME>, but for an address that Kubernetes has put there."""

    def __init__(self, param_decls: typing.Sequence[str], **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        name = long_name(self)
        if self.envvar is None and name is not None:
            self.envvar = variable_of(name)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The first of its variables that is set."""
        for name in [self.envvar] if isinstance(self.envvar, str) else self.envvar or ():
            value = os.environ.get(name)
            # Kubernetes sets PAGEWICK_PORT=tcp://10.0.0.1:8000 in every pod if a Service is called pagewick.
            if value and name == variable_of("--port") and _SERVICE_ADDRESS.match(value):
                reason = "it is the address of a Kubernetes Service; the port comes from --port or PORT"
                click.echo(f"warning: {name}={value} is ignored: {reason}", err=True)
            elif value:
                return value
        return None


class Size(click.ParamType["int"]):
    """Bytes, written with a unit: 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class FieldFlags:
    """The flags of a dataclass whose fields have a `help` in their metadata.

    prefix: of the options' names in click's flat name space. sizes: the fields that are bytes. sections: headings of
    the help, each with its first field. short: short flags of fields and of their other names. variables: field ->
    environment variables, where they are not only the usual one.
    """

    def __init__(
        self,
        kind: type[Any],
        prefix: str,
        *,
        sizes: typing.Collection[str] = (),
        sections: Mapping[str, str],
        aliases: Aliases | None = None,
        short: Mapping[str, tuple[str, ...]] | None = None,
        variables: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.prefix = prefix
        self._kind = kind
        self._sizes = sizes
        self._sections = sections
        self._aliases = aliases or {}
        self._short = short or {}
        self._variables = variables or {}

    def options(self) -> list[click.Option]:
        """One option per field, and a hidden one for each of its other names."""
        hints = typing.get_type_hints(self._kind)
        options: list[click.Option] = [self._flag(one, hints[one.name]) for one in fields(self._kind)]
        for alias, (target, convert) in self._aliases.items():
            hint = self._value_type(target, hints[target]) if convert is None else _argument_type(convert)
            is_many = _is_many(hints[target])
            short = self._short.get(alias, ())
            options.append(self._option(alias, hint, *short, is_many=is_many, kind=click.Option, hidden=True))
        return options

    def values(self, ctx: click.Context) -> dict[str, Any]:
        """What was given, under the fields' names: on the command line, else in the environment, else in a file.

        Raises click.UsageError for a field that one source gives twice, under different names.
        """
        found: dict[str, Any] = {}
        for source in _SOURCES:
            names = self._given_by(ctx, source)
            for target, name in names.items():
                if target not in found:
                    convert = self._aliases[name][1] if name in self._aliases else None
                    value = ctx.params[self.prefix + name]
                    try:
                        found[target] = convert(value) if convert is not None else value
                    except ConfigError as error:
                        raise click.UsageError(str(error), ctx) from error
        return found

    def section_of(self, name: str) -> str | None:
        """Under which heading of the help an option stands; None if it is none of these flags."""
        if not self.owns(name):
            return None
        starts = {first: title for title, first in self._sections.items()}
        title = next(iter(self._sections))
        for one in fields(self._kind):
            title = starts.get(one.name, title)
            if one.name == name.removeprefix(self.prefix):
                return title
        return next(iter(self._sections))

    def owns(self, name: str) -> bool:
        return name.startswith(self.prefix)

    def _given_by(self, ctx: click.Context, source: ParameterSource) -> dict[str, str]:
        """Field -> the name under which the source gives it."""
        names: dict[str, str] = {}
        for parameter, value in ctx.params.items():
            if not self.owns(parameter) or value is None or ctx.get_parameter_source(parameter) != source:
                continue
            name = parameter.removeprefix(self.prefix)
            target = self._aliases[name][0] if name in self._aliases else name
            if target in names:
                both = f"--{target.replace('_', '-')} is given twice (once as --{name.replace('_', '-')})"
                raise click.UsageError(both, ctx)
            names[target] = name
        return names

    def _flag(self, one: Field[Any], hint: Any) -> click.Option:
        text = one.metadata["help"]
        if one.default is not None and one.default is not MISSING and one.default not in ("auto", ()):
            text = f"{text}  [default: {self._shown(one.name, one.default)}]"
        short = self._short.get(one.name, ())
        option = self._option(
            one.name, self._value_type(one.name, hint), *short, is_many=_is_many(hint), kind=Flag, help=text
        )
        if one.name in self._variables:
            option.envvar = self._variables[one.name]
        return option

    def _option(
        self, name: str, value_type: Any, *short: str, is_many: bool, kind: type[click.Option], **attributes: Any
    ) -> click.Option:
        flag = "--" + name.replace("_", "-")
        if value_type is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        else:
            attributes["type"] = value_type
        # None, not (), where nothing is given: a file or a later default may still say something.
        return kind([*short, flag, self.prefix + name], default=None, multiple=is_many, **attributes)

    def _shown(self, name: str, default: Any) -> str:
        """A default as the help shows it."""
        if name in self._sizes:
            return _with_unit(default)
        return str(default).lower() if isinstance(default, bool) else str(default)

    def _value_type(self, name: str, hint: Any) -> Any:
        """The click type of a field: `int | None` is int, a tuple of texts is text, a size is Size."""
        if name in self._sizes:
            return Size()
        if _is_many(hint):
            return typing.get_args(hint)[0]
        if isinstance(hint, types.UnionType):
            return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        return hint


def _argument_type(convert: Callable[[Any], Any]) -> Any:
    """The type of a converter's only argument, by its annotation."""
    hints = typing.get_type_hints(convert)
    return next(hint for name, hint in hints.items() if name != "return")


def _is_many(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _with_unit(num_bytes: int) -> str:
    """The largest unit of which it is a whole number."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes % 2**exponent == 0:
            return f"{num_bytes >> exponent}{unit}"
    return str(num_bytes)
