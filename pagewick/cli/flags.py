"""Command-line flags made from the fields of a dataclass, with their environment variables."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import click
from click.core import ParameterSource

from pagewick.cli.completion import completer_of
from pagewick.cli.typed_flags import typed_flags
from pagewick.errors import ConfigError, InvalidRequestError
from pagewick.option_checks import parse_bytes

# Another name -> the field, and the function that converts a value given under that name to the field's value.
Aliases = Mapping[str, tuple[str, Callable[[Any], Any] | None]]

_SERVICE_ADDRESS = re.compile("(tcp|udp|sctp)://")

# The order of precedence: the command line, the environment, the configuration file.
SOURCES = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def flag_of(name: str) -> str:
    """Return the flag of a field: --max-model-len for max_model_len."""
    return "--" + name.replace("_", "-")


def variable_of(flag: str) -> str:
    """Return the environment variable of a flag: PAGEWICK_MAX_MODEL_LEN for --max-model-len."""
    return "PAGEWICK_" + flag.lstrip("-").replace("-", "_").upper()


def long_name(option: click.Parameter) -> str | None:
    """Return the first long name of an option, --like-this; None if it has none."""
    return next((name for name in option.opts if name.startswith("--")), None)


class Flag(click.Option):
    """An option whose variable PAGEWICK_PORT is ignored if Kubernetes put the address of a Service there."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the first of its variables that is set."""
        for name in [self.envvar] if isinstance(self.envvar, str) else self.envvar or ():
            value = os.environ.get(name)
            # Kubernetes sets PAGEWICK_PORT=tcp://10.0.0.1:8000 in every pod if a Service is called pagewick.
            if value and name == variable_of("--port") and _SERVICE_ADDRESS.match(value):
                reason = "it is the address of a Kubernetes Service; set the port with --port or PORT"
                click.echo(f"warning: {name}={value} is ignored: {reason}", err=True)
            elif value:
                return value
        return None


class Size(click.ParamType["int"]):
    """A number of bytes, written with a unit: 4GiB. needs_unit: as for parse_bytes."""

    name = "size"

    def __init__(self, *, needs_unit: bool = True) -> None:
        self._needs_unit = needs_unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value, needs_unit=self._needs_unit)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True)
class FieldFlags:
    """The flags of a dataclass whose fields have a `help` in their metadata.

    prefix: comes before the options' names in click's flat name space. sections: headings of the help, each with its
    first field. sizes: the fields that are bytes. sizes_without_unit: those of them that need no unit. aliases: other
    names of fields, which become hidden flags. short: short flags of fields and of their other names. variables: field
    -> environment variables, where these are not only the usual one.
    """

    kind: type[Any]
    prefix: str
    sections: Mapping[str, str]
    sizes: Collection[str] = ()
    sizes_without_unit: Collection[str] = ()
    aliases: Aliases = field(default_factory=dict)
    short: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, list[str]] = field(default_factory=dict)

    def options(self) -> list[click.Option]:
        """Return one option for each field, and a hidden one for each of its other names."""
        hints = typing.get_type_hints(self.kind)
        options: list[click.Option] = []
        for one in fields(self.kind):
            text = one.metadata["help"]
            if one.default is not None and one.default is not MISSING and one.default not in ("auto", ()):
                text += f"  [default: {self._shown(one.name, one.default)}]"
            option = self._option(one.name, self._value_type(one.name, hints[one.name]), hints[one.name], text)
            option.envvar = self.variables.get(one.name)
            options.append(option)
        for alias, (target, convert) in self.aliases.items():
            value_type = self._value_type(target, hints[target])
            if convert is not None:
                value_type = next(iter(typing.get_type_hints(convert).values()))
            options.append(self._option(alias, value_type, hints[target], None))
        return options

    def values(self, ctx: click.Context, sources: Sequence[ParameterSource] = SOURCES) -> dict[str, Any]:
        """Return the values that were given, by field; an earlier one of the sources overrides a later one.

        A conversion may return a dict, which gives several fields. Raises click.UsageError for a field that one source
        gives twice, under different names, and ConfigError for a value that has no meaning under its name.
        """
        found: dict[str, Any] = {}
        for source in sources:
            given: dict[str, str] = {}
            known = frozenset(found)
            for parameter, value in ctx.params.items():
                if not self.owns(parameter) or value is None or ctx.get_parameter_source(parameter) != source:
                    continue
                name = parameter.removeprefix(self.prefix)
                target, convert = self.aliases.get(name, (name, None))
                converted = value if convert is None or target in known else convert(value)
                parts = converted if isinstance(converted, dict) else {target: converted}
                typed = typed_flags(ctx) if source == ParameterSource.COMMANDLINE else {}
                flag = typed.get(parameter, flag_of(name))
                if twice := given.keys() & parts.keys():
                    raise click.UsageError(f"{given[twice.pop()]} is given twice (once as {flag}); leave one out.", ctx)
                given |= dict.fromkeys(parts, flag)
                found = parts | found
        return found

    def names(self, ctx: click.Context) -> set[str]:
        """Return the fields and other names that stand on the command line."""
        given = {one for one in ctx.params if ctx.get_parameter_source(one) == ParameterSource.COMMANDLINE}
        return {one.removeprefix(self.prefix) for one in given if self.owns(one)}

    def typed(self, ctx: click.Context) -> dict[str, str]:
        """Return the fields that are set on the command line, each with the flag that was typed."""
        own = {name.removeprefix(self.prefix): flag for name, flag in typed_flags(ctx).items() if self.owns(name)}
        return {self.aliases.get(name, (name, None))[0]: flag for name, flag in own.items()}

    @contextmanager
    def named_in_errors(self, ctx: click.Context) -> Iterator[None]:
        """Let an InvalidRequestError about a field begin with its flag, as it was typed."""
        try:
            yield
        except InvalidRequestError as error:
            name = error.param
            if name is not None and name in {one.name for one in fields(self.kind)} and str(error).startswith(name):
                error.args = (self.typed(ctx).get(name, flag_of(name)) + str(error).removeprefix(name),)
            raise

    def field_of(self, option: click.Parameter) -> str | None:
        """Return the field that an option sets; None if it belongs to another group."""
        if option.name is None or not self.owns(option.name):
            return None
        name = option.name.removeprefix(self.prefix)
        return self.aliases.get(name, (name, None))[0]

    def owns(self, name: str) -> bool:
        return name.startswith(self.prefix)

    def section_of(self, name: str) -> str:
        """Return the heading under which the help shows an option of this group."""
        names = [one.name for one in fields(self.kind)]
        field_name = name.removeprefix(self.prefix)
        place = names.index(field_name) if field_name in names else 0
        return [title for title, first in self.sections.items() if names.index(first) <= place][-1]

    def _option(self, name: str, value_type: Any, hint: Any, text: str | None) -> Flag:
        """Return an option; it is hidden if there is no text."""
        flag = flag_of(name)
        attributes: dict[str, Any] = {"help": text, "hidden": text is None, "multiple": _is_many(hint)}
        attributes["shell_complete"] = completer_of(name)
        if value_type is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        else:
            attributes["type"] = value_type
        # Where nothing is given, the value is None and not (): a file or a later default may still set it.
        return Flag([*self.short.get(name, ()), flag, self.prefix + name], default=None, **attributes)

    def _shown(self, name: str, default: Any) -> str:
        """Return a default as the help shows it; a size in the largest unit that gives a whole number."""
        if name not in self.sizes:
            return str(default).lower() if isinstance(default, bool) else str(default)
        units = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, ""))
        return next(f"{default >> exponent}{unit}" for exponent, unit in units if default % 2**exponent == 0)

    def _value_type(self, name: str, hint: Any) -> Any:
        """Return the click type of a field: int for `int | None`, str for a tuple of strings, Size for a size."""
        if name in self.sizes:
            return Size(needs_unit=name not in self.sizes_without_unit)
        if _is_many(hint):
            return typing.get_args(hint)[0]
        if isinstance(hint, types.UnionType):
            return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        return hint


def _is_many(hint: Any) -> bool:
    """Whether a flag may be repeated."""
    return typing.get_origin(hint) is tuple
