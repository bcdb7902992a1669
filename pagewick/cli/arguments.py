"""Commands whose flags come from EngineConfig, ServerSettings and SamplingFlags, the environment and a file."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pagewick import log
from pagewick.cli.completion import complete_model
from pagewick.cli.config_file import defaults_of
from pagewick.cli.flags import Aliases, FieldFlags, flag_of, long_name, variable_of
from pagewick.cli.foreign_flags import (
    DIALECT_NAMES,
    DIALECT_SETTINGS,
    MODEL_TYPE_SETTINGS,
    MODEL_TYPES,
    foreign_options,
)
from pagewick.cli.serving.given import GivenFlags
from pagewick.cli.sources import consistent, source_of, sources_of
from pagewick.cli.typed_flags import check_typed, read_typed_flags, refuse_beside_url, with_effect
from pagewick.cli.variables import warn_of_misspelt
from pagewick.config import SECTIONS, SIZES, SIZES_WITHOUT_UNIT, EngineConfig
from pagewick.errors import ConfigError, InvalidRequestError, PagewickError
from pagewick.other_names import ALIASES, NO_ID_NEEDED, SHORT_FLAGS, spare_id
from pagewick.sampling_params import SamplingParams
from pagewick.server import settings as server
from pagewick.server.settings import ServerSettings

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
POSITIONAL = "model_argument"
_BOOLEANS = {"true": True, "false": False}
_ADAPTERS = "--lora-modules"


def _flag(description: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class SamplingFlags:
    """The flags for SamplingParams; the seed is one of the engine's flags."""

    max_tokens: int | None = _flag("Largest number of new tokens; fewer if the context ends before.")
    temperature: float | None = _flag("Randomness of the choice: 0 always takes the most likely token.")
    top_k: int | None = _flag("Choose among the k most likely tokens.")
    top_p: float | None = _flag("Choose among the most likely tokens that together have this probability.")
    min_p: float | None = _flag("Choose among tokens of at least this share of the most likely one's probability.")
    stop: tuple[str, ...] = _flag("End the response before this text; may be repeated.", ())
    presence_penalty: float | None = _flag("Above 0: tokens that are in the response become less likely.")
    frequency_penalty: float | None = _flag("Above 0: tokens become less likely each time they occur in the response.")
    repetition_penalty: float | None = _flag("Above 1: tokens of the prompt and the response become less likely.")
    repeat_last_n: int | None = _flag("Number of last tokens that --repetition-penalty looks at; -1: all.")


# Other names for these, as in other_names.ALIASES; all are names in llama.cpp, candle-vllm or vllm.rs.
SAMPLING_ALIASES: Aliases = {
    "max_gen_tokens": ("max_tokens", None),
    "max": ("max_tokens", None),
    "n_predict": ("max_tokens", None),
    "predict": ("max_tokens", None),
    "temp": ("temperature", None),
    "penalty": ("repetition_penalty", None),
    "repeat_penalty": ("repetition_penalty", None),
}
SAMPLING_SHORT_FLAGS = {"n_predict": ("-n",)}
SAMPLING_FLAGS = FieldFlags(
    SamplingFlags, "sampling_", {"Sampling": "max_tokens"}, aliases=SAMPLING_ALIASES, short=SAMPLING_SHORT_FLAGS
)
ENGINE_FLAGS = FieldFlags(
    EngineConfig,
    "engine_",
    SECTIONS,
    sizes=SIZES,
    sizes_without_unit=SIZES_WITHOUT_UNIT,
    aliases=ALIASES,
    short=SHORT_FLAGS,
    # vLLM has this setting only as a variable.
    variables={"batch_invariant": ["PAGEWICK_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"]},
)
SERVER_FLAGS = FieldFlags(
    ServerSettings,
    "server_",
    server.SECTIONS,
    sizes=server.SIZES,
    aliases=server.ALIASES,
    short=server.SHORT_FLAGS,
    # Hosting platforms tell a service its port in PORT.
    variables={"port": ["PAGEWICK_PORT", "PORT"]},
)
# Other names of fields, which have no variables -> the fields.
_FIELDS = {
    alias: target
    for group in (ENGINE_FLAGS, SAMPLING_FLAGS, SERVER_FLAGS)
    for alias, (target, _) in group.aliases.items()
}


class Command(click.Command):
    """A command whose flags are all also read from the environment and from the file that --config names."""

    def __init__(self, name: str | None, **attributes: Any) -> None:
        config = click.Option(
            ["--config"],
            type=click.Path(dir_okay=False, path_type=Path),
            is_eager=True,
            expose_value=False,
            callback=_read_config,
            envvar="PAGEWICK_CONFIG",
            help="Read flags from this TOML file; flags and variables that are set override it.",
        )
        attributes["params"] = [*(attributes.get("params") or []), config]
        normalize = {"token_normalize_func": _normal}
        attributes["context_settings"] = normalize | attributes.get("context_settings", {})
        super().__init__(name, **attributes)
        for option in self.params:
            flag = long_name(option)
            # Hidden options are other names: they have no variables of their own.
            if isinstance(option, click.Option) and option.envvar is None and flag is not None and not option.hidden:
                option.envvar = variable_of(flag)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            warn_of_misspelt(self, _FIELDS)
        args = _separated(self._without_booleans(args))
        try:
            typed = read_typed_flags(self, ctx, args)
        except click.NoSuchOption as error:
            hint = hint_for(self, error.option_name)
            raise click.UsageError(f"No such option {error.option_name}{hint}", ctx) from None
        for option in self.params:
            flags = [flag for name, flag in typed if name == option.name]
            is_single = isinstance(option, click.Option) and not (option.multiple or option.count or option.is_eager)
            if is_single and len(flags) > 1:
                other = next((f" (once as {flag})" for flag in flags if flag != flags[0]), "")
                raise click.UsageError(f"{flags[0]} is given twice{other}; leave one out.", ctx)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            error.param_hint = source_of(ctx, error.param) or error.param_hint
            # click's list of booleans begins with the empty text.
            head, mark, values = error.message.partition("Recognized values: , ")
            if mark:
                message = f"{head}Recognized values: {values}"
                raise click.BadParameter(message, error.ctx, error.param, error.param_hint) from None
            raise

    def _without_booleans(self, args: list[str]) -> list[str]:
        """Write flags that have a boolean as their value without it: --thinking for --thinking True or =true."""
        switches = {
            flag: option.secondary_opts[:1]
            for option in self.params
            if isinstance(option, click.Option) and option.is_flag
            for flag in option.opts
        }
        plain: list[str] = []
        for arg in args:
            flag, _, value = arg.partition("=")
            is_joined = _normal(flag) in switches and value.lower() in _BOOLEANS
            for word in (flag, value) if is_joined else (arg,):
                before = _normal(plain[-1]) if plain else ""
                if before not in switches or word.lower() not in _BOOLEANS:
                    plain.append(word)
                elif not _BOOLEANS[word.lower()]:
                    plain[-1:] = switches[before]
        return plain


class EngineCommand(Command):
    """A command that runs an engine: it has EngineConfig's flags, and its function gets the `config`.

    has_sampling: it also has SamplingFlags, and its function gets `sampling`, a dict of those given.
    has_settings: it also has ServerSettings' flags, and its function gets the `settings`, and all that was `given`. It
    is a server, and `sampling` has the defaults of its requests.
    log_level: the least severe messages on stderr unless --log-level sets it.
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
        name_of_model = ENGINE_FLAGS.prefix + POSITIONAL
        model = click.Argument([name_of_model], metavar="[MODEL]", required=False, shell_complete=complete_model)
        level = click.Option(
            ["--log-level"],
            type=click.Choice(LOG_LEVELS, case_sensitive=False),
            help=f"Least severe messages to log on stderr.  [default: {log_level}]",
        )
        self.groups = [SERVER_FLAGS] * has_settings + [SAMPLING_FLAGS] * has_sampling + [ENGINE_FLAGS]
        known = [*(attributes.get("params") or []), level]
        for group in self.groups:
            known += group.options()
        taken = {flag for option in known for flag in (*option.opts, *option.secondary_opts)}
        foreign = foreign_options(is_server=has_settings, is_terminal=has_sampling and not has_settings)
        attributes["params"] = [model, *known, *(option for option in foreign if option.flag not in taken)]
        super().__init__(name, **attributes)
        self.log_level = log_level

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = ["Options", *(title for group in self.groups for title in group.sections)]
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name = param.name or ""
                group = next((group for group in self.groups if group.owns(name)), None)
                sections["Options" if group is None else group.section_of(name)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            arguments = self._arguments(ctx)
        except (ConfigError, InvalidRequestError) as error:
            raise click.UsageError(f"{error}{sources_of(ctx, error)}", ctx) from error
        if _run_as_worker(arguments["config"]):
            return None
        level = ctx.params.pop("log_level") or log.rust_level() or self.log_level
        log.set_up(level=level, log_format=arguments["settings"].log_format if "settings" in arguments else None)
        own = {name: value for name, value in ctx.params.items() if not any(group.owns(name) for group in self.groups)}
        ctx.params = own | arguments
        return super().invoke(ctx)

    def _arguments(self, ctx: click.Context) -> dict[str, Any]:
        """Return what the function gets in place of the flags of all groups.

        Raises click.UsageError, ConfigError or InvalidRequestError if the values are wrong.
        """
        typed = ENGINE_FLAGS.typed(ctx)
        if ctx.params.get("url"):
            refuse_beside_url(ctx, typed)
        names = ENGINE_FLAGS.names(ctx)
        if (spare := spare_id(names)) is not None:
            del ctx.params[ENGINE_FLAGS.prefix + spare]
            click.echo(f"note: {flag_of(spare)} changes nothing: {NO_ID_NEEDED}", err=True)
        values = ENGINE_FLAGS.values(ctx)
        settings = DIALECT_SETTINGS if names & DIALECT_NAMES else {}
        model = values.pop(POSITIONAL, None)
        given = ENGINE_FLAGS.values(ctx, [ParameterSource.COMMANDLINE])
        is_kind = model in MODEL_TYPES and "weight_file" in given
        if model is not None and "model" not in given and not is_kind:
            values["model"] = model
        elif model in MODEL_TYPES:
            settings = MODEL_TYPE_SETTINGS
        elif model is not None:
            raise click.UsageError("the model is given twice: as an argument and by a flag; leave one out.", ctx)
        config = consistent(ctx, ENGINE_FLAGS, values, EngineConfig)
        check_typed(ctx, config, typed)
        config = with_effect(config, typed)
        if settings is MODEL_TYPE_SETTINGS:
            click.echo(f"note: {model} changes nothing: the model's files say which architecture it is", err=True)
        arguments: dict[str, Any] = {"config": config}
        is_server = SERVER_FLAGS in self.groups
        if SAMPLING_FLAGS in self.groups:
            # A server has one seed for all requests: their samples must differ.
            seed = {} if config.seed is None or is_server else {"seed": config.seed}
            arguments["sampling"] = SAMPLING_FLAGS.values(ctx) | seed
            # The constructor checks the values; the model's own defaults are not known yet.
            with SAMPLING_FLAGS.named_in_errors(ctx):
                SamplingParams(**arguments["sampling"])
        if is_server:
            given_settings = settings | SERVER_FLAGS.values(ctx)
            made = ServerSettings.for_model(config.model, **given_settings)
            arguments["given"] = GivenFlags(values, given_settings, arguments["sampling"])
            made.check_adapters(config.adapter_paths)
            if made.allow_runtime_lora_updating:
                arguments["config"] = replace(config, enable_lora=True)
            arguments["settings"] = made
        return arguments


def _separated(args: list[str]) -> list[str]:
    """Give each of several adapters behind one --lora-modules a flag of its own, as vLLM takes them."""
    found: list[str] = []
    is_list = False
    for arg in args:
        is_item = "=" in arg and not arg.startswith("-")
        if is_list and is_item and _normal(found[-1]) != _ADAPTERS:
            found.append(_ADAPTERS)
        is_list = _normal(arg.partition("=")[0]) == _ADAPTERS or (is_list and is_item)
        found.append(arg)
    return found


def _normal(flag: str) -> str:
    """Return a flag as --max-model-len if it is written --max_model_len, as in vLLM."""
    return flag.replace("_", "-")


def hint_for(command: click.Command, flag: str) -> str:
    """Return the end of the error for an unknown flag: the commands that have it, or the most similar flag."""
    from pagewick.cli import COMMANDS, cli

    context = click.Context(cli)
    others = [name for name in COMMANDS if (other := cli.get_command(context, name)) and flag in _visible_flags(other)]
    if others:
        return f"; it is a flag of pagewick {', pagewick '.join(others)}."
    near = difflib.get_close_matches(flag, _visible_flags(command), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else "."


def _visible_flags(command: click.Command) -> list[str]:
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    return [flag for option in options for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--")]


def _read_config(ctx: click.Context, param: click.Parameter, file: Path | None) -> None:
    if file is not None:
        ctx.default_map = defaults_of(file, ctx.info_name or "", ctx.command)


def _run_as_worker(config: EngineConfig) -> bool:
    """Run the worker loop if the environment says that this is a rank above 0; return whether it did."""
    from pagewick.parallel.topology import topology_of

    topology = topology_of(config, os.environ)
    if topology.rank == 0:
        return False
    from pagewick.engine.preflight import check_models
    from pagewick.local_models import with_local_models

    try:
        config = with_local_models(config)
        check_models(config)
    except PagewickError:
        if not topology.local_rank:
            raise
        # The first rank of this machine finds the same mistake, and reports it once for all.
        raise SystemExit(1) from None
    from pagewick.engine import worker

    worker.run(config, topology)
    return True
