"""Commands whose flags come from EngineConfig, ServerSettings and SamplingParams, the environment and a file."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pagewick import log
from pagewick.cli.config_file import defaults_of
from pagewick.cli.flags import FieldFlags, Flag, long_name, variable_of
from pagewick.cli.foreign_flags import foreign_flags, foreign_options
from pagewick.config import ALIASES, SHORT_FLAGS, EngineConfig
from pagewick.config import SECTIONS as ENGINE_SECTIONS
from pagewick.config import SIZES as ENGINE_SIZES
from pagewick.errors import ConfigError, InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.server.settings import ALIASES as SERVER_ALIASES
from pagewick.server.settings import SECTIONS as SERVER_SECTIONS
from pagewick.server.settings import SHORT_FLAGS as SERVER_SHORT_FLAGS
from pagewick.server.settings import SIZES as SERVER_SIZES
from pagewick.server.settings import ServerSettings

__all__ = ["Command", "EngineCommand", "Flag"]

ENGINE_FLAGS = FieldFlags(
    EngineConfig, "engine_", sizes=ENGINE_SIZES, sections=ENGINE_SECTIONS, aliases=ALIASES, short=SHORT_FLAGS
)
# PORT: how platforms tell a service its port.
SERVER_FLAGS = FieldFlags(
    ServerSettings,
    "server_",
    sizes=SERVER_SIZES,
    sections=SERVER_SECTIONS,
    aliases=SERVER_ALIASES,
    short=SERVER_SHORT_FLAGS,
    variables={"port": ["PAGEWICK_PORT", "PORT"]},
)
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_POSITIONAL = "model_argument"
_SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "repeat_last_n",
)  # fmt: skip
# Other names for these, as in config.ALIASES, all of llama.cpp, candle-vllm and vllm.rs.
SAMPLING_ALIASES = {
    "max_gen_tokens": "max_tokens",
    "max": "max_tokens",
    "n_predict": "max_tokens",
    "predict": "max_tokens",
    "temp": "temperature",
    "penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
}


class Command(click.Command):
    """A command all of whose flags are also read from the environment and from the file that --config names."""

    def __init__(self, name: str | None, **attributes: Any) -> None:
        config = click.Option(
            ["--config"],
            type=click.Path(dir_okay=False, path_type=Path),
            is_eager=True,
            expose_value=False,
            callback=_read_config,
            envvar="PAGEWICK_CONFIG",
            help="TOML file with flags as keys; what is given otherwise comes first.",
        )
        attributes["params"] = [*(attributes.get("params") or []), config]
        # --max_model_len is --max-model-len, as in vLLM.
        attributes["context_settings"] = {"token_normalize_func": _with_dashes} | attributes.get("context_settings", {})
        super().__init__(name, **attributes)
        for option in self.params:
            flag = long_name(option)
            # Hidden ones are other names, which would all be read from the environment, too.
            if isinstance(option, click.Option) and option.envvar is None and flag is not None and not option.hidden:
                option.envvar = variable_of(flag)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"No such option {error.option_name}{hint_for(self, error.option_name)}", ctx
            ) from None
        for option, count in Counter(given).items():
            if (
                isinstance(option, click.Option)
                and count > 1
                and not (option.multiple or option.count or option.is_eager)
            ):
                raise click.UsageError(f"{long_name(option) or option.opts[0]} is given twice; leave one out.", ctx)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            error.param_hint = _where_given(ctx, error.param) or error.param_hint
            raise


class EngineCommand(Command):
    """A command that runs an engine: it has EngineConfig's flags, and its function gets the `config`.

    has_sampling: it also has the flags of SamplingParams, and its function gets `sampling`, a dict of those given.
    has_settings: it also has ServerSettings' flags, and its function gets the `settings`.
    log_level: what goes to stderr unless --log-level says otherwise.
    On a rank above 0, as torchrun or mpirun starts them, the engine's worker runs in place of the function.
    """

    def __init__(
        self,
        name: str | None,
        *,
        has_sampling: bool = False,
        has_settings: bool = False,
        log_level: str = "WARNING",
        **attributes: Any,
    ) -> None:
        model = click.Argument([ENGINE_FLAGS.prefix + _POSITIONAL], metavar="[MODEL]", required=False)
        sampling = sampling_flags() if has_sampling else []
        settings = SERVER_FLAGS.options() if has_settings else []
        own = [*(attributes.get("params") or []), _log_level_flag(log_level)]
        known = [*own, *sampling, *settings, *ENGINE_FLAGS.options()]
        taken = {flag for option in known for flag in (*option.opts, *option.secondary_opts)}
        foreign = foreign_options(foreign_flags(is_server=has_settings, is_terminal=has_sampling), taken)
        attributes["params"] = [model, *known, *foreign]
        super().__init__(name, **attributes)
        self.has_sampling = has_sampling
        self.has_settings = has_settings
        self.log_level = log_level

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = ["Options", "Sampling", *SERVER_SECTIONS, *ENGINE_SECTIONS]
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name = param.name or ""
                own = "Sampling" if self.has_sampling and is_sampling(name) else "Options"
                sections[SERVER_FLAGS.section_of(name) or ENGINE_FLAGS.section_of(name) or own].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        config = engine_config(ctx)
        made: dict[str, Any] = {"config": config}
        if self.has_sampling:
            made["sampling"] = sampling_changes(ctx, config)
        if self.has_settings:
            made["settings"] = server_settings(ctx, config)
        if _run_as_worker(config):
            return None
        settings = made.get("settings")
        level = ctx.params.pop("log_level") or self.log_level
        log.set_up(level=level, log_format=None if settings is None else settings.log_format)
        for name in list(ctx.params):
            if ENGINE_FLAGS.owns(name) or SERVER_FLAGS.owns(name) or (self.has_sampling and is_sampling(name)):
                del ctx.params[name]
        ctx.params |= made
        return super().invoke(ctx)


def engine_config(ctx: click.Context) -> EngineConfig:
    """The config that the command line asks for; what it leaves open comes from PAGEWICK_*, a file and the defaults.

    Raises click.UsageError where EngineConfig raises ConfigError.
    """
    values = ENGINE_FLAGS.values(ctx)
    positional = values.pop(_POSITIONAL, None)
    if positional is not None:
        sources = {
            ctx.get_parameter_source(name)
            for name, value in ctx.params.items()
            if value is not None and _names_the_model(name)
        }
        if ParameterSource.COMMANDLINE in sources:
            raise click.UsageError("the model is given twice: as an argument and by a flag.", ctx)
        values["model"] = positional
    try:
        return EngineConfig(**values)
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error


def server_settings(ctx: click.Context, config: EngineConfig) -> ServerSettings:
    """The settings that the command line asks for. Raises click.UsageError where ServerSettings raises ConfigError."""
    try:
        return ServerSettings.for_model(config.model, **SERVER_FLAGS.values(ctx))
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error


def sampling_flags() -> list[click.Option]:
    """The options of `chat` and `complete` for SamplingParams; the seed is among the engine's flags."""
    options: list[click.Option] = [
        Flag(["--max-tokens"], type=int, help="At most so many new tokens."),
        Flag(["--temperature"], type=float, help="0 always takes the likeliest token; higher is more varied."),
        Flag(["--top-k"], type=int, help="Choose among the k likeliest tokens."),
        Flag(["--top-p"], type=float, help="Choose among the likeliest tokens of this total probability."),
        Flag(["--min-p"], type=float, help="Choose among tokens of at least this share of the best one's probability."),
        Flag(["--stop"], multiple=True, help="End the answer before this text; may be repeated."),
        Flag(["--presence-penalty"], type=float, help="Above 0: tokens that the answer has become less likely."),
        Flag(["--frequency-penalty"], type=float, help="The same, more so the more often it has them."),
        Flag(["--repetition-penalty"], type=float, help="Above 1: tokens that are there already become less likely."),
        Flag(["--repeat-last-n"], type=int, help="Only the last n tokens count for that; -1 is all."),
    ]
    kinds = {option.name: option.type for option in options}
    options += [
        click.Option([f"--{alias.replace('_', '-')}", alias], type=kinds[target], hidden=True)
        for alias, target in SAMPLING_ALIASES.items()
    ]
    return options


def is_sampling(name: str) -> bool:
    """Whether an option is one of sampling_flags."""
    return name in _SAMPLING or name in SAMPLING_ALIASES


def sampling_changes(ctx: click.Context, config: EngineConfig) -> dict[str, Any]:
    """What the command line changes of the model's own SamplingParams. Raises click.UsageError for a wrong value."""
    changes = {name: ctx.params[name] for name in _SAMPLING if ctx.params[name] not in (None, ())}
    for alias, target in SAMPLING_ALIASES.items():
        value = ctx.params[alias]
        if value is None:
            continue
        if ctx.get_parameter_source(target) == ParameterSource.COMMANDLINE and target in changes:
            both = f"--{target.replace('_', '-')} is given twice (once as --{alias.replace('_', '-')})"
            raise click.UsageError(both, ctx)
        changes[target] = value
    if config.seed is not None:
        changes["seed"] = config.seed
    try:
        SamplingParams(**changes)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), ctx) from error
    return changes


def _where_given(ctx: click.Context, option: click.Parameter | None) -> str | None:
    """The variable, or the file's key, that a wrong value comes from; None if it is the command line's."""
    if option is None or option.name is None:
        return None
    source = ctx.get_parameter_source(option.name)
    if source == ParameterSource.ENVIRONMENT:
        variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
        return next((name for name in variables if os.environ.get(name)), None)
    return f"{long_name(option)} in the file of --config" if source == ParameterSource.DEFAULT_MAP else None


def hint_for(command: click.Command, flag: str) -> str:
    """What may have been meant by a flag that the command has not."""
    from pagewick.cli import COMMANDS, cli

    context = click.Context(cli)
    others = [name for name in COMMANDS if (other := cli.get_command(context, name)) and flag in _visible_flags(other)]
    if others:
        return f"; it is one of pagewick {', pagewick '.join(others)}."
    near = difflib.get_close_matches(flag, _visible_flags(command), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else "."


def _visible_flags(command: click.Command) -> list[str]:
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    return [flag for option in options for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--")]


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _read_config(ctx: click.Context, param: click.Parameter, file: Path | None) -> None:
    if file is not None:
        from pagewick.cli import COMMANDS

        ctx.default_map = defaults_of(file, ctx.info_name or "", ctx.command, COMMANDS)


def _log_level_flag(default: str) -> click.Option:
    levels = click.Choice(LOG_LEVELS, case_sensitive=False)
    return Flag(["--log-level"], type=levels, help=f"The least that is logged on stderr.  [default: {default}]")


def _names_the_model(name: str) -> bool:
    if not ENGINE_FLAGS.owns(name):
        return False
    plain = name.removeprefix(ENGINE_FLAGS.prefix)
    return plain == "model" or (plain in ALIASES and ALIASES[plain][0] == "model")


def _run_as_worker(config: EngineConfig) -> bool:
    """Run the worker loop if the environment says that this is a rank above 0; return whether it did."""
    from pagewick.parallel.topology import detect_topology

    topology = detect_topology(os.environ, tensor_parallel_size=config.tensor_parallel_size)
    if topology.rank == 0:
        return False
    from pagewick.async_llm import with_local_models
    from pagewick.engine import worker

    worker.run(with_local_models(config), topology)
    return True
