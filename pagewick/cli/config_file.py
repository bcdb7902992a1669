"""Configuration files: flags as TOML keys, for all commands or for one.

model = "Qwen/Qwen3-0.6B"
max-model-len = 8192

[serve]
port = 9000
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pagewick.cli.flags import long_name
from pagewick.cli.foreign_flags import ForeignOption


def defaults_of(file: Path, name: str, command: click.Command, all_commands: dict[str, str]) -> dict[str, Any]:
    """What the file says for the command: option name -> value, for click's default_map.

    Keys outside of all tables are for every command, and a command that has no such flag leaves them alone if another
    command may have it; a table named like a command is for that one. name: of the command among all_commands.
    Raises click.UsageError for a file that cannot be read or is no TOML, and for a key that is no flag.
    """
    content = _read(file)
    options = _options_by_key(command)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    if wrong := next((key for key in tables if key not in all_commands), None):
        _complain(file, f"[{wrong}]", wrong, all_commands, "is no command")
    values = {_normal(key): value for key, value in content.items() if key not in tables}
    own = {_normal(key): value for key, value in tables.get(name, {}).items()}
    if unknown := next((key for key in own if key not in options), None):
        _complain(file, unknown, unknown, _suggestions(command), f"is no flag of pagewick {name}")
    if unknown := next((key for key in values if key not in options and key not in _keys_of_all(all_commands)), None):
        _complain(file, unknown, unknown, _suggestions(command), "is no flag")
    others = _keys_of_others(command, values, all_commands)
    given = {key: value for key, value in values.items() if key in options and key not in others} | own
    plain = {key: _plain(file, key, value, is_many=options[key].multiple) for key, value in given.items()}
    return _without_twice(file, plain, {key: option.name or "" for key, option in options.items()})


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"cannot read {file} ({error.strerror}).") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is not valid TOML: {error}.") from None


def _options_by_key(command: click.Command) -> dict[str, click.Option]:
    """Key in a file -> option, for all long names of flags."""
    return {
        _normal(flag): option
        for option in command.params
        if isinstance(option, click.Option) and long_name(option) != "--config"
        for flag in option.opts
        if flag.startswith("--")
    }


def _suggestions(command: click.Command) -> list[str]:
    return [key for key, option in _options_by_key(command).items() if not option.hidden]


def _keys_of_others(command: click.Command, keys: Iterable[str], all_commands: dict[str, str]) -> set[str]:
    """Those of the keys that this command could only refuse or note, and that are flags of another."""
    options = _options_by_key(command)
    foreign = {key for key in keys if isinstance(options.get(key), ForeignOption)}
    return foreign & _keys_of_all(all_commands, with_foreign=False) if foreign else set()


def _keys_of_all(commands: dict[str, str], *, with_foreign: bool = True) -> set[str]:
    from pagewick.cli import cli

    context = click.Context(cli)
    found = [cli.get_command(context, name) for name in commands]
    return {
        key
        for command in found
        if command is not None
        for key, option in _options_by_key(command).items()
        if with_foreign or not isinstance(option, ForeignOption)
    }


def _without_twice(file: Path, given: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in given.items():
        if options[key] in values:
            raise click.UsageError(f"{file}: {key} is given twice, under different names.")
        values[options[key]] = value
    return values


def _complain(file: Path, shown: str, key: str, known: Iterable[str], what: str) -> None:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise click.UsageError(f"{file}: {shown} {what}{hint}")


def _normal(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _plain(file: Path, key: str, value: Any, *, is_many: bool) -> Any:
    """As click takes it: numbers and sizes as text, so that they are checked as on the command line.

    Raises click.UsageError for a list or a table where one value belongs, and for one value in place of a list.
    """
    if not is_many and not isinstance(value, list | dict):
        return _as_text(value)
    if is_many and isinstance(value, list) and not any(isinstance(one, list | dict) for one in value):
        return [_as_text(one) for one in value]
    if not is_many:
        what = f"one value, not a {'list' if isinstance(value, list) else 'table'}"
    else:
        what = "a list of single values" if isinstance(value, list) else "a list: write it in [ ]"
    raise click.UsageError(f"{file}: {key} takes {what}.")


def _as_text(value: Any) -> bool | str:
    return value if isinstance(value, bool) else str(value)
