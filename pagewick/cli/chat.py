"""`pagewick chat`: a conversation in the terminal, or one answer per line of a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import EngineCommand, Flag
from pagewick.config import EngineConfig
from pagewick.errors import ContextLengthError

if TYPE_CHECKING:
    from rich.console import Console

    from pagewick.llm import LLM
    from pagewick.sampling_params import SamplingParams

HELP = "/reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--system", cls=Flag, help="A system message to begin every conversation with.")
def command(config: EngineConfig, system: str | None, sampling: dict[str, Any]) -> None:
    """Talk to MODEL (default: the built-in one).

    Without a terminal, each line of stdin is answered in turn, and only the answers are printed.
    """
    from pagewick.llm import LLM

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        click.secho(f"Loading {config.model} ...", dim=True)
    with LLM(config=config) as llm:
        conversation = Conversation(llm, replace(llm.get_default_sampling_params(), **sampling), system)
        if is_terminal:
            _talk(conversation, config.model)
        else:
            _answer_lines(conversation)


class Conversation:
    """The messages so far and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    @property
    def num_answer_tokens(self) -> int:
        """Length of the last answer."""
        tokenizer = self._llm.get_tokenizer()
        return len(tokenizer.encode(self.messages[-1]["content"], add_special_tokens=False))

    def reset(self) -> None:
        self.messages = list(self._opening)

    def say(self, text: str) -> Generator[str]:
        """Add a user's message and yield the answer's pieces; an interrupted answer is kept as far as it came.

        Raises ContextLengthError, and forgets the message, if the conversation no longer fits.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._llm.stream(self.messages, self._params):
                answer += piece
                yield piece
        except ContextLengthError:
            self.messages.pop()
            raise
        finally:
            if self.messages[-1]["role"] == "user" and answer:
                self.messages.append({"role": "assistant", "content": answer})


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        if not obey(conversation, line.strip()):
            return
        if line.strip() and not line.startswith("/"):
            for piece in conversation.say(line.strip()):
                click.echo(piece, nl=False)
            click.echo()


def obey(conversation: Conversation, line: str) -> bool:
    """Carry out /reset; return False for /exit."""
    if line == "/reset":
        conversation.reset()
    return line not in ("/exit", "/quit")


def _talk(conversation: Conversation, model: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{model}[/bold]  [dim]{HELP}[/dim]")
    while True:
        try:
            line = console.input("[bold cyan]>[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not obey(conversation, line):
            return
        if line == "/reset":
            console.print("[dim]A new conversation.[/dim]")
        elif line.startswith("/"):
            console.print(f"[dim]{HELP}[/dim]")
        elif line:
            _show_answer(console, conversation, line)


def _show_answer(console: Console, conversation: Conversation, line: str) -> None:
    """Print an answer as it comes, then its speed. Ctrl-C stops it; the conversation goes on."""
    from rich.markup import escape

    start = time.perf_counter()
    first = None
    with closing(conversation.say(line)) as pieces:
        try:
            for piece in pieces:
                first = first or time.perf_counter()
                console.print(piece, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print("[dim] (stopped)[/dim]", end="")
        except ContextLengthError as error:
            console.print(f"[red]{escape(str(error))}[/red]\n[dim]/reset starts a new conversation.[/dim]")
            return
    console.print()
    if first is not None:
        num_tokens = conversation.num_answer_tokens
        speed = (num_tokens - 1) / (time.perf_counter() - first)
        console.print(f"[dim]{num_tokens} tokens, first after {first - start:.2f} s, then {speed:.0f} per second[/dim]")
