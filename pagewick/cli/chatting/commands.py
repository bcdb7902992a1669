"""The words of a chat that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from pagewick.cli.chatting.conversation import Conversation
from pagewick.errors import PagewickError

# What the chat does after a command; "retry" asks the message in `Commands.message` again.
Next = Literal["stay", "leave", "retry"]
Say = Callable[[str], None]


class _Command(NamedTuple):
    usage: str
    meaning: str


COMMANDS = {
    "help": _Command("/help", "this list"),
    "reset": _Command("/reset", "start a new conversation; the system message and the settings stay"),
    "undo": _Command("/undo", "take back the last message and its answer"),
    "retry": _Command("/retry", "ask the last message again"),
    "system": _Command("/system TEXT", "set the system message; without TEXT show it, with - remove it"),
    "set": _Command("/set NAME VALUE", "change a setting, as in /set temperature 0.5; without VALUE show it"),
    "thoughts": _Command("/thoughts", "show what the model thought before its last answer"),
    "save": _Command("/save FILE", "write the conversation: Markdown, or JSON if the name ends in .json"),
    "load": _Command("/load FILE", "go on with a conversation that was saved as JSON"),
    "exit": _Command("/exit", "leave; so do Ctrl-D, and Ctrl-C twice"),
}
SHORT_HELP = "/help lists the commands, /reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
LONG_MESSAGES = 'A line that ends with \\ goes on on the next one; """ begins and ends a message of several lines.'
ESCAPED = "A message that begins with a slash is written with two."
_OTHER_NAMES = {"quit": "exit", "?": "help"}


def is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def unescaped(message: str) -> str:
    """Of two slashes at the start one was to say that this is no command."""
    return message.removeprefix("/") if message.startswith("//") else message


class Commands:
    """Carries out commands on a conversation. say: where what they have to tell goes.

    message: what "retry" is to ask.
    """

    def __init__(self, conversation: Conversation, say: Say) -> None:
        self.message = ""
        self._conversation = conversation
        self._say = say

    def run(self, line: str) -> Next:
        """Carry out a line that is_command. A mistake is told and changes nothing."""
        word, _, argument = line[1:].partition(" ")
        name = _OTHER_NAMES.get(word, word)
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, [*COMMANDS, *_OTHER_NAMES], n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
            self._say(f"There is no command /{word}; {hint}")
            return "stay"
        try:
            action: Callable[[str], Next | None] = getattr(self, f"_{name}")
            return action(argument.strip()) or "stay"
        except PagewickError as error:
            self._say(str(error))
            return "stay"

    def _help(self, _: str) -> None:
        width = max(len(one.usage) for one in COMMANDS.values())
        for one in COMMANDS.values():
            self._say(f"{one.usage:{width}}  {one.meaning}")
        self._say(f"{LONG_MESSAGES}\n{ESCAPED} Ctrl-C stops an answer.")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._say("A new conversation.")

    def _undo(self, _: str) -> None:
        message = self._conversation.undo()
        self._say("There is nothing to take back." if message is None else f"Taken back: {_shortened(message)}")

    def _retry(self, _: str) -> Next:
        message = self._conversation.undo()
        if message is None:
            self._say("There is nothing to ask again.")
            return "stay"
        if self._conversation.settings.repeats_itself:
            self._say("With this temperature or seed the answer is the same; /set temperature 1 or /set seed default.")
        self.message = message
        return "retry"

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "-" else text
        system = self._conversation.system
        self._say("There is no system message." if system is None else f"The system message is: {system}")

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        settings = self._conversation.settings
        if value.strip():
            settings.change(name, value.strip())
        lines = list(settings.describe(self._conversation.model.defaults))
        wanted = [line for line in lines if line.startswith(f"{name.replace('-', '_')} =")] if name else lines
        if not wanted:
            settings.change(name, "default")
        for line in wanted:
            self._say(line)

    def _thoughts(self, _: str) -> None:
        self._say(self._conversation.thoughts.strip() or "There were no thoughts before the last answer.")

    def _save(self, name: str) -> None:
        path = _path(name, "save")
        self._conversation.save(path)
        self._say(f"Saved to {path}.")

    def _load(self, name: str) -> None:
        path = _path(name, "load")
        self._conversation.load(path)
        self._say(f"Loaded {len(self._conversation.messages)} messages from {path}.")

    def _exit(self, _: str) -> Next:
        return "leave"


def _path(name: str, command: str) -> Path:
    if not name:
        raise PagewickError(f"/{command} needs the name of a file: /{command} talk.json")
    return Path(name)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
