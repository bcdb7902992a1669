"""`pagewick completion`: scripts for shells that complete commands and flags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print a script that completes commands and flags in SHELL.

    \b
    bash: put  eval "$(pagewick completion bash)"       into ~/.bashrc
    zsh:  put  eval "$(pagewick completion zsh)"        into ~/.zshrc
    fish: put  pagewick completion fish | source        into ~/.config/fish/config.fish
    """
    from pagewick.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(cli, {}, "pagewick", "_PAGEWICK_COMPLETE").source())
