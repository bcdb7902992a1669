"""`pagewick chat`: a conversation in the terminal, or one answer per message of a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import EngineCommand, Flag
from pagewick.cli.chatting.commands import SHORT_HELP, Commands, is_command, unescaped
from pagewick.cli.chatting.conversation import ChatModel, Conversation
from pagewick.cli.chatting.line_input import LineEditor, history_path, read_message
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.terminal_text import harmless, shown_on
from pagewick.config import EngineConfig
from pagewick.errors import ContextLengthError, PagewickError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import FrameType

    from rich.console import Console

    from pagewick.cli.chatting.answer_display import AnswerDisplay

WHAT_TO_DO = "/undo takes back the last exchange, /reset starts a new conversation"


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--system", cls=Flag, help="A system message to begin every conversation with.")
@click.option("--thinking/--no-thinking", cls=Flag, default=None, help="Whether a model that can think first does so.")
@click.option("--show-thinking", cls=Flag, is_flag=True, help="Show thoughts too, not only how long they took.")
@click.option("--plain", cls=Flag, is_flag=True, help="Show answers as they are written, not as Markdown.")
@click.option("--url", cls=Flag, help="Talk to the OpenAI-compatible server there: http://host:port/v1.")
@click.option("--api-key-env", help="Variable with the server's key  [default: PAGEWICK_API_KEY or OPENAI_API_KEY]")
def command(
    config: EngineConfig,
    system: str | None,
    thinking: bool | None,
    show_thinking: bool,
    plain: bool,
    url: str | None,
    api_key_env: str | None,
    sampling: dict[str, Any],
) -> None:
    """Talk to MODEL (default: the built-in one), or with --url to the model of a server.

    Without a terminal, each line of stdin is answered in turn, and only the answers are printed.
    """
    if api_key_env and not url:
        raise click.UsageError("--api-key-env needs --url; a model in this process needs no key.")
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    settings = ChatSettings(sampling, thinking, show_thinking)
    with _opened_model(config, url, api_key_env, say_so=is_interactive) as model:
        conversation = Conversation(model, settings, system)
        if is_interactive:
            _talk(conversation, is_plain=plain)
        else:
            _answer_lines(conversation)


def _opened_model(
    config: EngineConfig, url: str | None, api_key_env: str | None, *, say_so: bool
) -> AbstractContextManager[ChatModel]:
    """Who answers, from entering to leaving. Raises PagewickError."""
    if url is not None:
        from pagewick.cli.chatting.remote_model import RemoteModel
        from pagewick.cli.server_address import ServerAddress, own_api_key

        return nullcontext(RemoteModel.connect(ServerAddress.parse(url, own_api_key(api_key_env)), config.model))
    if say_so:
        click.secho(f"Loading {config.model} ...", dim=True)
    from pagewick.cli.chatting.local_model import opened_local_model

    return opened_local_model(config)


def _answer_lines(conversation: Conversation) -> None:
    """Answers on stdout, everything else on stderr. Raises what stops an answer: a script must not go on unawares."""
    commands = Commands(conversation, lambda text: click.echo(harmless(text), err=True))

    def read_line(_: bool) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    while True:
        try:
            message = read_message(read_line)
        except EOFError:
            return
        if is_command(message):
            after = commands.run(message)
            if after == "leave":
                return
            message = commands.message if after == "retry" else ""
        else:
            message = unescaped(message)
        if message:
            _print_answer(conversation, message)


def _print_answer(conversation: Conversation, message: str) -> None:
    """As it is to a file or a pipe, without control characters to a terminal."""
    thoughts = False
    with closing(conversation.say(message)) as pieces:
        for piece in pieces:
            if piece.kind == "answer":
                click.echo(shown_on(sys.stdout, piece.text), nl=False)
            elif conversation.settings.show_thinking:
                thoughts = True
                click.echo(shown_on(sys.stderr, piece.text), nl=False, err=True)
    if thoughts:
        click.echo(err=True)
    click.echo()


def _talk(conversation: Conversation, *, is_plain: bool) -> None:
    """Until /exit, Ctrl-D, or Ctrl-C twice."""
    from rich.console import Console

    # Now, not when the first answer waits for it.
    from pagewick.cli.chatting.answer_display import AnswerDisplay

    console = Console(highlight=False)
    is_plain = is_plain or console.is_dumb_terminal
    console.print(harmless(conversation.model.name), style="bold", end="  ", markup=False)
    console.print(SHORT_HELP, style="dim", markup=False)
    commands = Commands(
        conversation, lambda text: console.print(harmless(text), style="dim", markup=False, emoji=False)
    )
    has_color = console.color_system is not None and not console.no_color
    editor = LineEditor(history_path(), prompt_style="\x1b[1;36m" if has_color else "")
    num_interrupts = 0
    while True:
        try:
            message = read_message(editor.read_line)
            num_interrupts = 0
            if is_command(message):
                after = commands.run(message)
                if after == "leave":
                    return
                message = commands.message if after == "retry" else ""
            else:
                message = unescaped(message)
            if message:
                display = AnswerDisplay(console, is_plain=is_plain, show_thoughts=conversation.settings.show_thinking)
                num_interrupts = int(_show_answer(console, display, conversation, message))
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            num_interrupts += 1
            if num_interrupts > 1:
                return
            console.print("Ctrl-C again leaves.", style="dim")


@contextmanager
def remembered_interrupts() -> Iterator[Callable[[], bool]]:
    """Gives what tells whether Ctrl-C was pressed, which raises KeyboardInterrupt as ever.

    Python drops an exception that comes in the midst of a destructor, and with it the wish to stop.
    """
    was_interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: was_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _show_answer(console: Console, display: AnswerDisplay, conversation: Conversation, message: str) -> bool:
    """Show an answer as it comes, then its speed; return whether Ctrl-C stopped it. The conversation goes on."""
    is_stopped, failure = False, None
    console.show_cursor(False)
    try:
        with remembered_interrupts() as was_interrupted, closing(conversation.say(message)) as pieces:
            for piece in pieces:
                display.show(piece)
                if was_interrupted():
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        is_stopped = True
    except PagewickError as error:
        failure = error
    finally:
        try:
            display.finish()
        finally:
            console.show_cursor(True)
    if failure is not None:
        console.print(harmless(_explained(failure)), style="red", markup=False, emoji=False)
    else:
        _print_ending(console, display, conversation, is_stopped=is_stopped)
    return is_stopped


def _print_ending(console: Console, display: AnswerDisplay, conversation: Conversation, *, is_stopped: bool) -> None:
    ending = conversation.model.ending
    remarks = [display.statistics(ending)]
    if is_stopped:
        remarks.insert(0, "(stopped)")
    elif ending.finish_reason == "length":
        remarks.insert(0, "(cut off: max_tokens or the context is used up)")
    line = " ".join(remark for remark in remarks if remark)
    if line:
        console.print(line, style="dim", markup=False, emoji=False)


def _explained(error: PagewickError) -> str:
    if isinstance(error, ContextLengthError):
        return f"The conversation no longer fits, and the message was not sent. {error}\n{WHAT_TO_DO}."
    return str(error)
