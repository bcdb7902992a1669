"""Facts from Pagewick's code: the values of the placeholders in the corpus, and the names that exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch

from pagewick.attention.native import default_block_size
from pagewick.cli import COMMANDS, cli
from pagewick.cli.flags import variable_of
from pagewick.cli.foreign_flags import SERVER_NOTED, SERVER_REFUSED
from pagewick.config import BUILTIN_MODEL, DEVICES, EngineConfig
from pagewick.foreign_names import NOTED, REFUSED
from pagewick.number_formats import DTYPES
from pagewick.server.guard.api_keys import VARIABLES
from pagewick.server.settings import ServerSettings
from training.network import NetworkConfig, num_parameters

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 4096


@cache
def values() -> dict[str, str]:
    """The value of each placeholder, as it stands in a sentence."""
    server, engine, project = ServerSettings(), EngineConfig(), _project()
    return {
        "builtin_model": BUILTIN_MODEL,
        "default_host": server.host,
        "default_port": str(server.port),
        "max_body_size": _mebibytes(server.body_limit(reads_images=False)),
        "max_image_body_size": _mebibytes(server.body_limit(reads_images=True)),
        "max_num_seqs": str(engine.max_num_seqs),
        "max_num_batched_tokens": str(engine.max_num_batched_tokens),
        "block_size": str(default_block_size(torch.device("cpu"))),
        "dtypes": _alternatives(DTYPES),
        "devices": _alternatives(DEVICES),
        "commands": _listed(list(COMMANDS), "and"),
        "key_variable": VARIABLES[0],
        "port_variable": variable_of("--port"),
        "license": project["license"].partition(" ")[0],
        "python_version": project["requires-python"].removeprefix(">="),
        "torch_version": _lowest_version(project, "torch"),
        "demo_parameters": f"{num_parameters(NetworkConfig(VOCAB_SIZE)) / 1e6:.0f} million",
    }


def fill(sentence: str) -> str:
    """Put the values into the placeholders of a sentence. Raises KeyError for an unknown one."""
    return re.sub(r"\{(\w+)\}", lambda match: values()[match[1]], sentence)


@cache
def commands() -> dict[str, tuple[str, ...]]:
    """Every command and subcommand as a user types it, with its flags."""
    found: dict[str, tuple[str, ...]] = {}

    def visit(name: str, command: click.Command) -> None:
        context = click.Context(command)
        found[name] = tuple(
            flag
            for parameter in command.get_params(context)
            for flag in (*parameter.opts, *parameter.secondary_opts)
            if flag.startswith("--") and not getattr(parameter, "hidden", False)
        )
        if isinstance(command, click.Group):
            for sub in command.list_commands(context):
                child = command.get_command(context, sub)
                assert child is not None
                visit(f"{name} {sub}", child)

    visit("pagewick", cli)
    return found


@cache
def flags() -> frozenset[str]:
    """Every flag of any command."""
    return frozenset(flag for given in commands().values() for flag in given)


@cache
def foreign_flags() -> tuple[str, ...]:
    """Long flags of other servers that have no counterpart here and get a sentence instead."""
    words = " ".join(line for line, _ in (*NOTED, *REFUSED, *SERVER_NOTED, *SERVER_REFUSED)).split()
    names = {word.partition("=")[0] for word in words}
    return tuple(sorted(name for name in names if len(name) > 5 and name not in flags()))


def _project() -> dict[str, Any]:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project: dict[str, Any] = content["project"]
    return project


def _lowest_version(project: dict[str, Any], package: str) -> str:
    """The lower bound that pyproject.toml sets for a package."""
    found = next(line for line in project["dependencies"] if re.match(rf"{package}\b", line))
    return str(found).partition(">=")[2]


def _mebibytes(size: int) -> str:
    assert size % 2**20 == 0, f"{size} bytes are no whole number of MiB"
    return f"{size // 2**20} MiB"


def _listed(names: Sequence[str], word: str) -> str:
    return ", ".join(names[:-1]) + f" {word} {names[-1]}"


def _alternatives(names: Sequence[str]) -> str:
    return _listed(names, "or")
