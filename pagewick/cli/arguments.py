"""Command line <-> EngineConfig and SamplingParams. The engine's flags are generated from the dataclass's fields."""

from __future__ import annotations

import os
import types
import typing
from dataclasses import MISSING, Field, fields
from typing import Any

import click
from click.core import ParameterSource

from pagewick import log
from pagewick.config import ALIASES, EngineConfig, parse_bytes
from pagewick.errors import ConfigError, InvalidRequestError
from pagewick.sampling_params import SamplingParams

# The engine's flags share click's flat name space with each command's own, under this prefix.
_PREFIX = "engine_"
_POSITIONAL = "model_argument"
_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "stop")
_SIZES = ("kv_cache_memory", "swap_space", "kv_cache_disk_size")
_SHORT_FLAGS = {"model": "-m"}


class Flag(click.Option):
    """An option that is also read from PAGEWICK_<NAME>."""

    def __init__(self, param_decls: typing.Sequence[str], **attributes: Any) -> None:
        flag = next(name for name in param_decls if name.startswith("--")).partition("/")[0]
        attributes.setdefault("envvar", "PAGEWICK_" + flag.removeprefix("--").replace("-", "_").upper())
        super().__init__(param_decls, **attributes)


class Size(click.ParamType["int"]):
    """Bytes, written with a unit: 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class EngineCommand(click.Command):
    """A command that runs an engine: it has EngineConfig's flags, and its function gets the `config`.

    has_sampling: it also has the flags of SamplingParams, and its function gets `sampling`, a dict of those given.
    log_level: what goes to stderr unless PAGEWICK_LOG_LEVEL says otherwise.
    On a rank above 0, as torchrun or mpirun starts them, the engine's worker runs in place of the function.
    """

    def __init__(
        self, name: str | None, *, has_sampling: bool = False, log_level: str = "WARNING", **attributes: Any
    ) -> None:
        model = click.Argument([_PREFIX + _POSITIONAL], metavar="[MODEL]", required=False)
        sampling = sampling_flags() if has_sampling else []
        attributes["params"] = [model, *(attributes.get("params") or []), *sampling, *engine_flags()]
        super().__init__(name, **attributes)
        self.has_sampling = has_sampling
        self.log_level = log_level

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Engine options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_engine = (param.name or "").startswith(_PREFIX)
                sections["Engine options" if is_engine else "Options"].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        config = engine_config(ctx)
        sampling = sampling_changes(ctx, config) if self.has_sampling else None
        if _run_as_worker(config):
            return None
        log.set_up(level=os.environ.get("PAGEWICK_LOG_LEVEL") or self.log_level)
        engine_names = [name for name in ctx.params if name.startswith(_PREFIX)]
        for name in [*engine_names, *(_SAMPLING if self.has_sampling else ())]:
            del ctx.params[name]
        ctx.params["config"] = config
        if sampling is not None:
            ctx.params["sampling"] = sampling
        return super().invoke(ctx)


def engine_flags() -> list[click.Option]:
    """One option per field of EngineConfig, and a hidden one for each of its other names."""
    hints = typing.get_type_hints(EngineConfig)
    options = [_flag(option, hints[option.name]) for option in fields(EngineConfig)]
    for alias, (target, convert) in ALIASES.items():
        options.append(_alias(alias, target, int if convert is not None else _value_type(target, hints[target])))
    return options


def engine_config(ctx: click.Context) -> EngineConfig:
    """The config that the command line asks for; what it leaves open comes from PAGEWICK_* and the defaults.

    Raises click.UsageError where EngineConfig raises ConfigError.
    """
    given: dict[str, Any] = {}
    from_environment: dict[str, Any] = {}
    for name, value in ctx.params.items():
        if value is None or not name.startswith(_PREFIX):
            continue
        is_environment = ctx.get_parameter_source(name) == ParameterSource.ENVIRONMENT
        (from_environment if is_environment else given)[name.removeprefix(_PREFIX)] = value
    positional = given.pop(_POSITIONAL, None)
    if positional is not None:
        if any(_target(name) == "model" for name in given):
            raise click.UsageError("the model is given twice: as an argument and by a flag.", ctx)
        given["model"] = positional
    targets = {_target(name) for name in given}
    given.update({name: value for name, value in from_environment.items() if name not in targets})
    try:
        return EngineConfig.from_options(**given)
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error


def sampling_flags() -> list[click.Option]:
    """The options of `chat` and `complete` for SamplingParams; the seed is among the engine's flags."""
    return [
        Flag(["--max-tokens"], type=int, help="At most so many new tokens."),
        Flag(["--temperature"], type=float, help="0 always takes the likeliest token; higher is more varied."),
        Flag(["--top-k"], type=int, help="Choose among the k likeliest tokens."),
        Flag(["--top-p"], type=float, help="Choose among the likeliest tokens of this total probability."),
        Flag(["--stop"], multiple=True, help="End the answer before this text; may be repeated."),
    ]


def sampling_changes(ctx: click.Context, config: EngineConfig) -> dict[str, Any]:
    """What the command line changes of the model's own SamplingParams. Raises click.UsageError for a wrong value."""
    changes = {name: ctx.params[name] for name in _SAMPLING if ctx.params[name] not in (None, ())}
    if config.seed is not None:
        changes["seed"] = config.seed
    try:
        SamplingParams(**changes)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), ctx) from error
    return changes


def _flag(option: Field[Any], hint: Any) -> click.Option:
    name = option.name.replace("_", "-")
    value_type = _value_type(option.name, hint)
    declaration = f"--{name}/--no-{name}" if value_type is bool else f"--{name}"
    short = [_SHORT_FLAGS[option.name]] if option.name in _SHORT_FLAGS else []
    text = option.metadata["help"]
    if option.default is not None and option.default is not MISSING and option.default != "auto":
        text = f"{text}  [default: {_shown(option.name, option.default)}]"
    return Flag(
        [*short, declaration, _PREFIX + option.name], default=None, help=text,
        **({} if value_type is bool else {"type": value_type}),
    )  # fmt: skip


def _shown(name: str, default: Any) -> str:
    """A default as the help shows it."""
    if name in _SIZES:
        return f"{default / 2**30:g}GiB"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _alias(alias: str, target: str, value_type: Any) -> click.Option:
    name = alias.replace("_", "-")
    declaration = f"--{name}/--no-{name}" if value_type is bool else f"--{name}"
    kind = {} if value_type is bool else {"type": value_type}
    return click.Option([declaration, _PREFIX + alias], default=None, hidden=True, **kind)


def _value_type(name: str, hint: Any) -> Any:
    """The click type of a field: `int | None` is int, a size is Size."""
    if name in _SIZES:
        return Size()
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def _target(name: str) -> str:
    return ALIASES[name][0] if name in ALIASES else name


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
