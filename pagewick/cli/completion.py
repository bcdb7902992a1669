"""`pagewick completion`: scripts for shells that complete commands, flags, their values, and models on this disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from pagewick.config import BUILTIN_MODEL, DEVICES, HUBS, SPECULATIVE_METHODS
from pagewick.number_formats import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS

SHELLS = ("bash", "zsh", "fish")
# Field -> the values of its flag.
VALUES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "kv_cache_dtype": (*KV_CACHE_DTYPES, "fp8"),
    "hub": HUBS,
    "quantization": QUANTIZATIONS,
    "speculative_method": SPECULATIVE_METHODS,
    "log_format": ("text", "json"),
}

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completer_of(name: str) -> Completer | None:
    """Return the function that completes the value of a field's flag; None if a value can be anything."""
    if name in ("model", "speculative_model", "tokenizer"):
        return complete_model
    if name not in VALUES:
        return None
    return lambda ctx, param, begun: [CompletionItem(value) for value in VALUES[name] if value.startswith(begun)]


def complete_model(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of the built-in model, of a model in a cache, of a directory, or of a GGUF file."""
    from pagewick.weights.cached_models import cached_models

    names = [BUILTIN_MODEL, *(cached.model for cached in cached_models(os.environ) if cached.path is not None)]
    # A directory of one word could also be a model's name, so that the shell would have to complete both.
    names += [file.parent.name for file in sorted(Path().glob("*/config.json"))]
    names += [str(file) for file in sorted(Path().glob("*.gguf"))]
    found = [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(begun)]
    return found or [CompletionItem(begun, type="file")]


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a script that completes commands, flags, values and models in SHELL.

    \b
    bash: put  eval "$(pagewick completion bash)"       into ~/.bashrc
    zsh:  put  eval "$(pagewick completion zsh)"        into ~/.zshrc
    fish: put  pagewick completion fish | source        into ~/.config/fish/config.fish
    """
    from pagewick.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(cli, {}, "pagewick", "_PAGEWICK_COMPLETE").source())
