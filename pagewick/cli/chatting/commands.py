"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable
from pathlib import Path

from pagewick.cli.chatting.conversation import Conversation
from pagewick.cli.chatting.settings import NAMES
from pagewick.cli.image_file import image_part
from pagewick.errors import PagewickError

# Usage -> meaning. The method `_name` of Commands carries out the command /name.
COMMANDS = {
    "/help": "list the commands",
    "/reset": "start a new conversation; the system message and the settings stay",
    "/undo": "take back the last message and its response",
    "/retry": "send the last message again",
    "/system TEXT": "set the system message; without TEXT show it, with - remove it",
    "/set NAME VALUE": "change a setting, as in /set temperature 0.5; without VALUE show it",
    "/image FILE": "attach an image to the next message; with - remove those that are attached",
    "/thoughts": "show the thoughts before the last response",
    "/save FILE": "write the conversation: Markdown, or JSON if the name ends in .json",
    "/load FILE": "continue a conversation that was saved as JSON",
    "/exit": "leave; so do Ctrl-D, and Ctrl-C twice",
}
SHORT_HELP = "/help lists the commands, /reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops a response."
LONG_MESSAGES = 'A line that ends with \\ continues on the next one; """ begins and ends a message of several lines.'
ESCAPED = "Write two slashes to begin a message with a slash."
_NAMES = [usage.split()[0].removeprefix("/") for usage in COMMANDS]
_OTHER_NAMES = {"quit": "exit", "?": "help"}


def completions(line: str, word: str) -> list[str]:
    """Return what may stand in place of the last word of a line: commands, names of settings, paths of files."""
    if not line.startswith("/") or line.startswith("//"):
        return []
    command, space, before = line.removesuffix(word).partition(" ")
    if not space:
        return [f"/{usage[1:].split()[0]}{' ' * (' ' in usage)}" for usage in COMMANDS if usage.startswith(word)]
    if command in ("/save", "/load", "/image"):
        return [f"{path}/" if os.path.isdir(path) else path for path in sorted(glob.glob(f"{glob.escape(word)}*"))]
    if command == "/set":
        wanted = [f"{name} " for name in NAMES] if not before.strip() else ["default", "on", "off"]
        return [name for name in wanted if name.startswith(word)]
    return []


class LeaveChat(Exception):
    """The user has asked to leave."""


class Commands:
    """Carries out commands on a conversation. say: shows their output.

    raises: mistakes in commands are raised as PagewickError, and not shown: nobody is there to correct them.
    """

    def __init__(self, conversation: Conversation, say: Callable[[str], None], *, raises: bool = False) -> None:
        self._conversation = conversation
        self._say = say
        self._raises = raises

    def message_of(self, line: str) -> str:
        """Return the message that a line sends to the model; if the line is a command, carry it out first.

        The message is empty for an empty line and for every command but /retry. A mistake in a command changes
        nothing. Raises LeaveChat for /exit.
        """
        if line.startswith("//") or not line.startswith("/"):
            return line.removeprefix("/")
        try:
            return self._carry_out(line)
        except PagewickError as error:
            if self._raises:
                raise
            self._say(str(error))
            return ""

    def _carry_out(self, line: str) -> str:
        word, _, argument = line[1:].partition(" ")
        name = _OTHER_NAMES.get(word, word)
        if name not in _NAMES:
            near = difflib.get_close_matches(name, [*_NAMES, *_OTHER_NAMES], n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
            raise PagewickError(f"There is no command /{word}; {hint}")
        action: Callable[[str], str | None] = getattr(self, f"_{name}")
        return action(argument.strip()) or ""

    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, meaning in COMMANDS.items():
            self._say(f"{usage:{width}}  {meaning}")
        self._say(f"{LONG_MESSAGES}\n{ESCAPED} Tab completes commands, Up recalls messages, Ctrl-C stops a response.")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._say("A new conversation.")

    def _undo(self, _: str) -> None:
        message = self._conversation.undo()
        if message is None:
            self._say("There is nothing to take back.")
        else:
            self._conversation.images = []
            line = " ".join(message.split())
            self._say(f"Taken back: {line if len(line) <= 60 else f'{line[:59]}…'}")

    def _retry(self, _: str) -> str | None:
        message = self._conversation.undo()
        if message is None:
            self._say("There is nothing to send again.")
        elif self._conversation.settings.repeats_itself:
            change = "/set temperature 1 or /set seed default"
            self._say(f"With this temperature or seed the response is the same; change it with {change}.")
        return message

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

    def _image(self, name: str) -> None:
        images = self._conversation.images
        if name == "-":
            images.clear()
        else:
            images.append(image_part(_path(name, "image", "photo.jpg")))
        number = {0: "No image goes", 1: "1 image goes"}.get(len(images), f"{len(images)} images go")
        self._say(f"{number} with the next message.")

    def _thoughts(self, _: str) -> None:
        self._say(self._conversation.thoughts.strip() or "There were no thoughts before the last response.")

    def _save(self, name: str) -> None:
        path = _path(name, "save")
        self._conversation.save(path)
        self._say(f"Saved to {path}.")

    def _load(self, name: str) -> None:
        path = _path(name, "load")
        self._conversation.load(path)
        number = len(self._conversation.messages)
        self._say(f"Loaded {number} message{'s' * (number != 1)} from {path}.")

    def _exit(self, _: str) -> None:
        raise LeaveChat


def _path(name: str, command: str, example: str = "talk.json") -> Path:
    if not name:
        raise PagewickError(f"/{command} needs the name of a file: /{command} {example}")
    return Path(name)
