"""Conversation: the messages so far, who answers them, and the files they are saved to."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pagewick.cli.chatting.settings import ChatSettings
from pagewick.errors import ConfigError
from pagewick.sampling_params import SamplingParams

Message = dict[str, str]

_TITLES = {"system": "System", "user": "You", "assistant": "Model"}


class Piece(NamedTuple):
    """A part of what a model says."""

    kind: Literal["thoughts", "answer"]
    text: str


@dataclass(slots=True)
class Ending:
    """How an answer ended. num_tokens: of thoughts and answer; None if the server does not say.

    finish_reason: None if it is not known.
    """

    num_tokens: int | None = None
    finish_reason: str | None = None


class ChatModel(Protocol):
    """Who answers. `ending` speaks of the last answer; `defaults` is None where only a server knows them.

    `ask` raises ContextLengthError if the messages do not fit, and other PagewickErrors.
    """

    name: str
    defaults: SamplingParams | None
    ending: Ending

    def ask(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[Piece]: ...


class Conversation:
    """turns: the messages after the system message, a user's first. thoughts: those of the last answer.

    files: what /save may overwrite, because this conversation was saved to it or loaded from it.
    """

    def __init__(self, model: ChatModel, settings: ChatSettings, system: str | None) -> None:
        self.model = model
        self.settings = settings
        self.system = system
        self.turns: list[Message] = []
        self.thoughts = ""
        self._files: set[Path] = set()

    @property
    def messages(self) -> list[Message]:
        """As a model is asked: the system message, if there is one, and all turns."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def say(self, text: str) -> Generator[Piece]:
        """Add a user's message and yield the answer's pieces; an interrupted answer is kept as far as it came.

        Raises what the model raises, and forgets the message if it got no answer.
        """
        self.turns.append({"role": "user", "content": text})
        self.thoughts = ""
        answer, is_over = "", False
        try:
            with closing(self.model.ask(self.messages, self.settings)) as pieces:
                for piece in pieces:
                    if piece.kind == "thoughts":
                        self.thoughts += piece.text
                    else:
                        answer += piece.text
                    yield piece
            is_over = True
        finally:
            # Templates want a user's message and an answer in turn.
            if answer or is_over:
                self.turns.append({"role": "assistant", "content": answer})
            else:
                self.turns.pop()

    def reset(self) -> None:
        self.turns, self.thoughts = [], ""

    def undo(self) -> str | None:
        """Take back the last message and its answer; return the message, None if there is none."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                self.thoughts = ""
                return message["content"]
        return None

    def save(self, path: Path) -> None:
        """Write it as Markdown, or, if the name ends in .json, as the body of a request to /v1/chat/completions.

        Raises ConfigError, also for a file that is there already and is not this conversation's.
        """
        path = _whole_path(path)
        try:
            if path.exists() and path not in self._files:
                raise ConfigError(f"{path} is there already; choose another name, or remove it first")
            _write_whole(path, self._as_json() if path.suffix == ".json" else self._as_markdown())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from None
        except UnicodeEncodeError:
            raise ConfigError(f"cannot write {path}: the conversation holds half a character; /undo it") from None
        self._files.add(path)

    def load(self, path: Path) -> None:
        """Go on with a conversation that `save` wrote as JSON, or with a list of messages. Raises ConfigError."""
        if path.suffix.lower() in (".md", ".markdown"):
            instead = f"save with /save {path.with_suffix('.json')} to go on later"
            raise ConfigError(f"/load reads JSON only, not the Markdown of {path}; {instead}")
        path = _whole_path(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        # No text, no JSON, or a number of thousands of digits.
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{path} is not JSON; /load reads what /save wrote to a name that ends in .json"
            ) from None
        system, turns = _messages_in(content, path)
        self.reset()
        self.system, self.turns = system, turns
        self._files.add(path)

    def _as_json(self) -> str:
        body = {"model": self.model.name, "messages": self.messages, **self.settings.as_request_fields()}
        return json.dumps(body, indent=2, ensure_ascii=False) + "\n"

    def _as_markdown(self) -> str:
        return "".join(f"## {_TITLES[one['role']]}\n\n{one['content'].strip()}\n\n" for one in self.messages)


def _whole_path(path: Path) -> Path:
    """From the root on. Raises ConfigError for what names no file."""
    if "\0" in str(path):
        raise ConfigError("the name of a file cannot hold the character U+0000")
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such home directory; write the whole path") from None


def _messages_in(content: Any, path: Path) -> tuple[str | None, list[Message]]:
    """The system message and the others. Raises ConfigError for what is not a conversation of texts."""
    messages = content.get("messages") if isinstance(content, Mapping) else content
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'{path} has no conversation; it must be a list of messages, or have one as "messages"')
    plain: list[Message] = []
    for number, message in enumerate(messages):
        is_text = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        allowed = ("user", "assistant") if number else tuple(_TITLES)
        if not is_text or message.get("role") not in allowed:
            raise ConfigError(
                f"{path}: message {number + 1} must have the role {' or '.join(allowed)} and a text as content"
            )
        plain.append({"role": message["role"], "content": message["content"]})
    if plain[0]["role"] == "system":
        return plain[0]["content"], plain[1:]
    return None, plain


def _write_whole(path: Path, text: str) -> None:
    """Beside its place and then renamed: what was there before is never half overwritten. For the user's eyes only."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
