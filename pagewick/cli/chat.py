"""`pagewick chat`: a conversation in the terminal, or one response for each message from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.arguments import EngineCommand
from pagewick.cli.chatting.commands import SHORT_HELP, Commands, LeaveChat, completions
from pagewick.cli.chatting.conversation import ChatModel, Conversation
from pagewick.cli.chatting.line_input import LineEditor, history_path, read_message
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.terminal_text import harmless, shown_on
from pagewick.cli.text_input import STDIN, opened_text
from pagewick.cli.typed_flags import typed_flags
from pagewick.config import EngineConfig
from pagewick.errors import ContextLengthError, PagewickError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import FrameType

    from rich.console import Console

    from pagewick.cli.chatting.response_display import ResponseDisplay


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--system", help="System message that begins every conversation.")
@click.option(
    "--thinking/--no-thinking", default=None, help="Whether a model that can think does so before it answers."
)
@click.option("--show-thinking", is_flag=True, help="Show thoughts, and not only how long they took.")
@click.option("--plain", is_flag=True, help="Show responses as plain text, not as Markdown.")
@click.option("--url", help="Talk to the OpenAI-compatible server at this URL: http://host:port/v1, or unix:PATH.")
@click.option(
    "--api-key-env",
    help="Environment variable with the server's API key.  [default: PAGEWICK_API_KEY or OPENAI_API_KEY]",
)
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

    If stdin or stdout is not a terminal, each line of stdin is a message, and only the responses go to stdout.
    """
    if "api_key_env" in typed_flags(click.get_current_context()) and not url:
        raise click.UsageError("--api-key-env needs --url; a model in this process needs no key.")
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    settings = ChatSettings(sampling, thinking, show_thinking)
    with _opened_model(config, url, api_key_env, is_announced=is_interactive) as model:
        conversation = Conversation(model, settings, system)
        try:
            if is_interactive:
                _talk(conversation, is_plain=plain)
            else:
                _answer_lines(conversation)
        except LeaveChat:
            return


def _opened_model(
    config: EngineConfig, url: str | None, api_key_env: str | None, *, is_announced: bool
) -> AbstractContextManager[ChatModel]:
    """Return the model to talk to, as a context that frees it at the end. Raises PagewickError."""
    if url is not None:
        from pagewick.cli.chatting.remote_model import RemoteModel
        from pagewick.cli.server_address import ServerAddress, api_key_from

        return nullcontext(RemoteModel.connect(ServerAddress.parse(url, api_key_from(api_key_env)), config.model))
    if is_announced:
        click.secho(f"Loading {config.model} ...", dim=True)
    from pagewick.cli.chatting.local_model import opened_local_model

    return opened_local_model(config)


def _answer_lines(conversation: Conversation) -> None:
    """Print responses to stdout and everything else to stderr.

    Raises the error of a response or a command: a script must not go on without it.
    """
    commands = Commands(conversation, lambda text: click.echo(harmless(text), err=True), raises=True)

    def read_line(_: bool) -> str:
        with opened_text(STDIN) as file:
            line = file.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    while True:
        try:
            line = read_message(read_line)
        except EOFError:
            return
        if message := commands.message_of(line):
            _print_response(conversation, message)


def _print_response(conversation: Conversation, message: str) -> None:
    """Print a response: unchanged to a file or a pipe, without control characters to a terminal."""
    thoughts = False
    with closing(conversation.say(message)) as pieces:
        for piece in pieces:
            if piece.kind == "text":
                click.echo(shown_on(sys.stdout, piece.text), nl=False)
            elif conversation.settings.show_thinking:
                thoughts = True
                click.echo(shown_on(sys.stderr, piece.text), nl=False, err=True)
    if thoughts:
        click.echo(err=True)
    click.echo()


def _talk(conversation: Conversation, *, is_plain: bool) -> None:
    """Talk until Ctrl-D, or Ctrl-C twice. Raises LeaveChat at /exit."""
    from rich.console import Console

    # Imported now, so that the first response does not wait for it.
    from pagewick.cli.chatting.response_display import ResponseDisplay

    console = Console(highlight=False)
    is_plain = is_plain or console.is_dumb_terminal
    console.print(harmless(conversation.model.name), style="bold", end="  ", markup=False)
    console.print(SHORT_HELP, style="dim", markup=False)
    commands = Commands(
        conversation, lambda text: console.print(harmless(text), style="dim", markup=False, emoji=False)
    )
    has_color = console.color_system is not None and not console.no_color
    editor = LineEditor(history_path(), completions, prompt_style="\x1b[1;36m" if has_color else "")
    num_interrupts = 0
    while True:
        try:
            line = read_message(editor.read_line)
            editor.remember(line)
            num_interrupts = 0
            if message := commands.message_of(line):
                show_thoughts = conversation.settings.show_thinking
                display = ResponseDisplay(console, is_plain=is_plain, show_thoughts=show_thoughts)
                num_interrupts = int(_show_response(console, display, conversation, message))
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
    """Yield a function that tells whether Ctrl-C was pressed, which also raises KeyboardInterrupt as usual.

    Python drops an exception that is raised during a destructor, and would forget that the user wants to stop.
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


def _show_response(console: Console, display: ResponseDisplay, conversation: Conversation, message: str) -> bool:
    """Show a response as it arrives, then its speed or its error; return whether Ctrl-C stopped it."""
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
        text = str(failure)
        if isinstance(failure, ContextLengthError):
            text = (
                f"{failure}\nThe conversation no longer fits the context, and your last message is not a part of it. "
                "/undo takes back the last exchange, /reset starts a new conversation."
            )
        console.print(harmless(text), style="red", markup=False, emoji=False)
        return is_stopped
    end = conversation.model.response_end
    remarks = [display.statistics(end)]
    if is_stopped:
        remarks.insert(0, "(stopped)")
    elif end.finish_reason == "length":
        remarks.insert(0, "(cut off: max_tokens or the context is used up)")
    if line := " ".join(remark for remark in remarks if remark):
        console.print(line, style="dim", markup=False, emoji=False)
    return is_stopped
