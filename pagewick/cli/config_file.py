"""Configuration files: flags as TOML keys, for all commands or for one.

model = "Qwen/Qwen3-0.6B"
max-model-len = 8192

[serve]
port = 9000
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from pagewick.cli.flags import long_name
from pagewick.cli.foreign_flags import ForeignOption
from pagewick.cli.text_input import read_text, unreadable


def defaults_of(file: Path, name: str, command: click.Command) -> dict[str, Any]:
    """Return the file's values for a command: option name -> value, for click's default_map.

    Keys outside of all tables are for every command, and a command that has no such flag ignores them if another
    command has it; a table named like a command is for that one. name: the command's.
    Raises click.UsageError for a file that cannot be read or is not TOML, and for a key that is not a flag.
    """
    from pagewick.cli import COMMANDS

    try:
        content = tomllib.loads(read_text(file))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"cannot read {file} ({unreadable(error)}).") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is not valid TOML: {error}.") from None
    options = _options_by_key(command)
    visible = [key for key, option in options.items() if not option.hidden]
    own: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and key not in COMMANDS:
            raise _unknown(file, f"[{key}] is not a command", key, COMMANDS)
        if isinstance(value, dict) and key == name:
            own = _normal_keys(file, value)
    common = _normal_keys(file, {key: value for key, value in content.items() if not isinstance(value, dict)})
    if (unknown := next((key for key in own if key not in options), None)) is not None:
        raise _unknown(file, f"{unknown or repr('')} is not a flag of pagewick {name}", unknown, visible)
    values: dict[str, Any] = {}
    for key, value in (common | own).items():
        if key in own or (key in options and not isinstance(options[key], ForeignOption)):
            values[key] = value
            continue
        # This command has no use for the key: it may be meant for another one.
        elsewhere = [found[key] for other in COMMANDS if key in (found := _options_by_key(_command_named(other)))]
        if key not in options and not elsewhere:
            raise _unknown(file, f"{key} is not a flag", key, visible)
        if key in options and all(isinstance(option, ForeignOption) for option in elsewhere):
            values[key] = value
    return {options[key].name or "": _plain(file, key, value, options[key]) for key, value in values.items()}


def _command_named(name: str) -> click.Command:
    from pagewick.cli import cli

    command = cli.get_command(click.Context(cli), name)
    assert command is not None, "only names in COMMANDS are asked for"
    return command


def _options_by_key(command: click.Command) -> dict[str, click.Option]:
    """Return the options with a long name, by their keys in a file."""
    return {
        _normal(flag): option
        for option in command.params
        if isinstance(option, click.Option) and (flag := long_name(option)) not in (None, "--config")
    }


def _unknown(file: Path, what: str, key: str, known: Iterable[str]) -> click.UsageError:
    known = list(known)
    if key == "config":
        return click.UsageError(
            f"{file}: a file cannot name another one; give its path in PAGEWICK_CONFIG or --config."
        )
    if (positive := key.removeprefix("no-")) != key and positive in known:
        return click.UsageError(f"{file}: {what}; write {positive} = false.")
    near = difflib.get_close_matches(key, known, n=1)
    return click.UsageError(f"{file}: {what}{f'; did you mean {near[0]}?' if near else '.'}")


def _normal_keys(file: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Raises click.UsageError for two spellings of one key; TOML itself refuses the same one twice."""
    spellings: dict[str, str] = {}
    for key in table:
        name = _normal(key)
        if (other := spellings.get(name)) is not None:
            spelling = key if key != name else other
            raise click.UsageError(f"{file}: {name} is given twice (once as {spelling}); leave one out.")
        spellings[name] = key
    return {name: table[key] for name, key in spellings.items()}


def _normal(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _plain(file: Path, key: str, value: Any, option: click.Option) -> Any:
    """Return a value as click takes it: as text, so that it is checked as on the command line; a switch's as it is.

    Raises click.UsageError for a list or a table where one value belongs, and for one value in place of a list.
    """
    if not option.multiple:
        if isinstance(value, list | dict):
            what = "list" if isinstance(value, list) else "table"
            raise click.UsageError(f"{file}: {key} takes one value, not a {what}.")
        return _plain_one(value, option)
    if not isinstance(value, list):
        raise click.UsageError(f"{file}: {key} takes a list: write it in [ ].")
    if any(isinstance(one, list | dict) for one in value):
        raise click.UsageError(f"{file}: {key} takes a list of single values.")
    return [_plain_one(one, option) for one in value]


def _plain_one(value: Any, option: click.Option) -> Any:
    if not isinstance(value, bool):
        return str(value)
    # Where a number is wanted, click would take true for 1.
    return value if option.is_flag or isinstance(option, ForeignOption) else str(value).lower()
