"""The models of a server that has several: MODEL, the tables of --models-preset, and those in --models-dir."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pagewick.cli.arguments import ENGINE_FLAGS, SAMPLING_FLAGS, SERVER_FLAGS
from pagewick.cli.flags import flag_of
from pagewick.cli.foreign_flags import ForeignOption
from pagewick.cli.serving.given import GivenFlags
from pagewick.cli.text_input import read_text, unreadable
from pagewick.cli.typed_flags import typed_flags
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError, PagewickError
from pagewick.local_models import models_in
from pagewick.parallel.topology import detect_topology
from pagewick.sampling_params import SamplingParams
from pagewick.server.router.entry import ModelEntry
from pagewick.server.settings import ANY_NAME, ServerSettings

# Flags that say something about one model: on the command line they are MODEL's.
_OF_ONE_MODEL = (
    *("weight_file", "tokenizer", "revision", "mmproj", "rerank", "lora", "lora_modules", "speculative_model"),
    *("served_model_name", "chat_template"),
)
# The settings of the server that each model may have for itself.
_OWN_SETTINGS = frozenset({
    *("served_model_name", "chat_template", "trust_request_chat_template", "reasoning_parser", "tool_call_parser"),
    *("thinking", "thinking_budget", "record_conversation", "hang_timeout", "stream_interval", "models_autoload"),
    "sleep_idle_seconds",
})  # fmt: skip
# Keys of a table that are no flags, and the fields of ModelEntry that they set.
_KEYS = {"load-on-startup": "loads_at_start", "pinned": "is_pinned"}
# Flags whose values may be objects.
_OBJECTS = ("rope-scaling", "rope_scaling")


@dataclass(frozen=True)
class SeveralModels:
    """Called, it returns the models that can be loaded now. given: the flags that all models have in common.

    settings: the server's. own: MODEL and those of --models-preset.
    """

    given: GivenFlags
    settings: ServerSettings
    own: Sequence[ModelEntry]

    @classmethod
    def of(cls, given: GivenFlags, settings: ServerSettings, command: click.Command) -> SeveralModels:
        """Read MODEL and the file of --models-preset. command: has the flags that its tables may set.

        Raises ConfigError, and click.UsageError for the file.
        """
        if detect_topology(os.environ, tensor_parallel_size=1).world_size > 1:
            raise ConfigError(
                "a server with several models does not span processes of a launcher; start it without one, and give "
                "models on this machine --tensor-parallel-size"
            )
        common = GivenFlags(*(_without(values, _OF_ONE_MODEL) for values in given.groups))
        own: list[ModelEntry] = []
        if (model := given.engine.get("model")) is not None:
            config, names = EngineConfig(**given.engine), given.server.get("served_model_name") or (model,)
            own.append(_entry(config, settings, given.sampling, names, loads_at_start=True, is_default=True))
        elif wrong := [flag_of(name) for group in given.groups for name in _OF_ONE_MODEL if group.get(name)]:
            raise ConfigError(f"{wrong[0]} is for one model: set it in the model's table of --models-preset")
        if settings.models_preset is not None:
            own += _presets(Path(settings.models_preset), common, settings, command)
        return cls(common, settings, own)

    def __call__(self) -> list[ModelEntry]:
        """Raises ConfigError if --models-dir cannot be read."""
        taken = {name for entry in self.own for name in entry.names}
        paths = {Path(entry.config.model).expanduser().resolve() for entry in self.own}
        found = {} if self.settings.models_dir is None else models_in(Path(self.settings.models_dir).expanduser())
        below = (
            _entry(self._config_of(path), self.settings, self.given.sampling, (name,))
            for name, path in found.items()
            if name not in taken and path.resolve() not in paths
        )
        return [*self.own, *below]

    def _config_of(self, path: Path) -> EngineConfig:
        # Absolute, because owner/name stands for a model on a hub once there is no such directory any more.
        return EngineConfig(**{**self.given.engine, "model": str(path.absolute())})


def _entry(
    config: EngineConfig,
    settings: ServerSettings,
    sampling: Mapping[str, Any],
    names: Sequence[str],
    **attributes: bool,
) -> ModelEntry:
    if ANY_NAME in names:
        raise ConfigError("--served-model-name * is for a server with one model; requests must name one of several")
    own = replace(settings, served_model_name=tuple(dict.fromkeys(names)))
    own.check_adapters(config.adapter_paths)
    return ModelEntry(config, own, sampling, **attributes)


def _presets(file: Path, common: GivenFlags, settings: ServerSettings, command: click.Command) -> Iterator[ModelEntry]:
    """Yield the models of a file. A table's name is the model's, and its keys are flags, which override those common.

    Raises click.UsageError.
    """
    try:
        content = tomllib.loads(read_text(file))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"cannot read {file} ({unreadable(error)}).") from None
    except ValueError as error:
        raise click.UsageError(f"{file} is not valid TOML: {error}; texts stand in quotes.") from None
    if not content:
        raise click.UsageError(f"{file} names no models: each is a table, such as [coder], with its flags.")
    for name, table in content.items():
        if not isinstance(table, dict):
            raise click.UsageError(f"{file}: {name} is outside of all tables; put it below [NAME], a model's name.")
        try:
            yield _preset(name, table, common, settings, command)
        except (click.UsageError, PagewickError) as error:
            message = error.format_message() if isinstance(error, click.UsageError) else str(error)
            raise click.UsageError(f"{file}, [{name}]: {message}") from None


def _preset(
    name: str, table: Mapping[str, Any], common: GivenFlags, settings: ServerSettings, command: click.Command
) -> ModelEntry:
    """Raises click.UsageError and ConfigError."""
    from pagewick.api_arguments import check_given
    from pagewick.weights.hub import local_model, parse_id

    keys = {key.lstrip("-").replace("_", "-"): value for key, value in table.items()}
    if part := next((key for key, value in table.items() if isinstance(value, dict) and key not in _OBJECTS), None):
        raise click.UsageError(f'a name with a dot stands in quotes: write ["{name}.{part}"].')
    if "config" in keys:
        raise click.UsageError("--config is not a flag of a model.")
    attributes = {field: keys.pop(key, False) for key, field in _KEYS.items()}
    if wrong := next((key for key, field in _KEYS.items() if not isinstance(attributes[field], bool)), None):
        raise click.UsageError(f"{wrong} must be true or false.")
    with command.make_context("serve", [*_arguments(keys)]) as ctx:
        groups = (ENGINE_FLAGS, SERVER_FLAGS, SAMPLING_FLAGS)
        if other := next((flag for one, flag in typed_flags(ctx).items() if not _is_of_a_model(ctx, one)), None):
            raise click.UsageError(f"{other} is not a flag of a model.")
        own = GivenFlags(*(group.values(ctx, [ParameterSource.COMMANDLINE]) for group in groups))
    if others := [flag_of(key) for key in own.server if key not in _OWN_SETTINGS]:
        raise click.UsageError(f"{others[0]} is the server's, and not one model's: give it on the command line.")
    if attributes["is_pinned"] and own.server.get("sleep_idle_seconds") is not None:
        raise click.UsageError("a pinned model never sleeps: leave out pinned or sleep-idle-seconds.")
    if own.engine.get("model") is None:
        raise click.UsageError('the table names no model; add model = "...": a directory, a GGUF file, or an id.')
    config = EngineConfig(**{**common.engine, **own.engine})
    check_given(config, {key: flag_of(key) for key in own.engine})
    if local_model(config.model, config.weight_file) is None:
        parse_id(config.model, config.revision, config.hub, config.weight_file)
    sampling = {**common.sampling, **own.sampling}
    SamplingParams(**sampling)
    names = (name, *own.server.pop("served_model_name", ()))
    return _entry(config, replace(settings, **own.server), sampling, names, **attributes)


def _arguments(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table as it would stand on the command line."""
    for key, value in table.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, bool):
                yield f"--{key}" if one else f"--{key.removeprefix('no-')}" if key.startswith("no-") else f"--no-{key}"
            else:
                yield f"--{key}={json.dumps(one) if isinstance(one, dict) else one}"


def _is_of_a_model(ctx: click.Context, parameter: str) -> bool:
    """Whether a flag belongs to a group, or is another program's, which says by itself what becomes of it."""
    option = next(one for one in ctx.command.params if one.name == parameter)
    groups = (ENGINE_FLAGS, SERVER_FLAGS, SAMPLING_FLAGS)
    return isinstance(option, ForeignOption) or any(group.owns(parameter) for group in groups)


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in (*names, "model")}
