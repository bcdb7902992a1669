"""Checks of the flags of `pagewick bench`, before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from pagewick.cli.arguments import ENGINE_FLAGS, POSITIONAL
from pagewick.cli.typed_flags import typed_flags
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError

WORKLOAD_OPTIONS: Final = ("input_len", "output_len", "num_prompts", "concurrency")
SERVER_OPTIONS: Final = ("compare", "api_key_env", "endpoint", "request_rate", "timeout")
# A comparison needs more rounds: with fewer, other work on the machine decides the result.
MIN_COMPARED_ROUNDS: Final = 5


def is_workload(options: Mapping[str, Any]) -> bool:
    return any(options[name] is not None for name in ("url", "plot", *WORKLOAD_OPTIONS))


def check_options(options: Mapping[str, Any], *, shape: str | None, batch: int | None, repeats: int | None) -> None:
    """Raise click.UsageError for options that contradict each other, or that are typed and have no effect."""
    typed = typed_flags(click.get_current_context())
    plot = options["plot"]
    if plot is not None and str(plot) != "-" and plot.suffix.lower() != ".svg":
        raise click.UsageError(f"--plot writes an SVG file, not {plot}: the name must end in .svg.")
    if options["url"] is None:
        for name in SERVER_OPTIONS:
            if name in typed:
                raise click.UsageError(f"{typed[name]} needs --url.")
    elif "shape" in typed:
        raise click.UsageError("--shape has no meaning with --url: the server has its model.")
    elif plot is not None and options["request_rate"] is not None:
        raise click.UsageError("--plot varies the requests at the same time, and --request-rate ignores their number.")
    if batch is not None and (options["num_prompts"] is not None or options["concurrency"] is not None):
        raise click.UsageError("--batch sets --num-prompts and --concurrency; leave it out.")
    if not is_workload(options) and "ignore_eos" in typed:
        raise click.UsageError("--ignore-eos needs a workload: --url, --num-prompts or the like.")
    if options["url"] and options["compare"] and repeats is not None and repeats < MIN_COMPARED_ROUNDS:
        raise click.UsageError(f"--compare needs at least --repeats {MIN_COMPARED_ROUNDS}: less is not reliable.")


def check_model(config: EngineConfig) -> None:
    """Raise click.UsageError for a model on the command line, and what chooses its files: --shape takes its place."""
    ctx = click.get_current_context()
    typed = ENGINE_FLAGS.typed(ctx)
    names = ["model", "weight_file"]
    # These are for the files of other models, too.
    names += [] if config.tokenizer or config.speculative_model else ["revision", "hub"]
    source = ctx.get_parameter_source(ENGINE_FLAGS.prefix + POSITIONAL)
    given = [config.model] if source is ParameterSource.COMMANDLINE else []
    given += [typed[name] for name in names if name in typed]
    if given:
        raise click.UsageError(f"--shape measures random weights and no model: leave out {given[0]}, or --shape.")


def check_output(path: Path, flag: str) -> None:
    """Raise ConfigError if a file cannot be written, or replaced, at this place. flag: the one that names it."""
    directory = path.parent
    if not os.path.isdir(directory):
        raise ConfigError(f"cannot write {path}: the directory {directory} does not exist; make it, or change {flag}")
    if not os.access(path if os.path.exists(path) else directory, os.W_OK):
        raise ConfigError(f"cannot write {path}: you may not, or the disk is read-only; choose another {flag}")
