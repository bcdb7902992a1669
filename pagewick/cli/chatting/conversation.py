"""Conversation: the messages so far, the model that responds to them, and the files they are saved to."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.image_file import with_images
from pagewick.cli.replacing_file import replacing
from pagewick.cli.text_input import read_text
from pagewick.errors import ConfigError
from pagewick.sampling_params import SamplingParams

# The content is a text, or for a user's message with images a list of parts in OpenAI's form.
Message = dict[str, Any]

_TITLES = {"system": "System", "user": "You", "assistant": "Model"}


class Piece(NamedTuple):
    """A part of a response."""

    kind: Literal["thoughts", "text"]
    text: str


@dataclass(slots=True)
class ResponseEnd:
    """How a response ended. num_tokens: of its thoughts and its text, None if the server does not count them.

    finish_reason: None if it is not known.
    """

    num_tokens: int | None = None
    finish_reason: str | None = None


class ChatModel(Protocol):
    """A model to talk to. response_end: of the last response. defaults: None where only a server knows them.

    `ask` raises ContextLengthError if the messages do not fit, and other PagewickErrors.
    """

    name: str
    defaults: SamplingParams | None
    response_end: ResponseEnd

    def ask(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[Piece]: ...


class Conversation:
    """A chat. turns: the messages after the system message, a user's first. thoughts: those of the last response.

    images: parts of a message in OpenAI's form, for the next message.
    """

    def __init__(self, model: ChatModel, settings: ChatSettings, system: str | None) -> None:
        self.model = model
        self.settings = settings
        self.system = system
        self.turns: list[Message] = []
        self.images: list[dict[str, Any]] = []
        self.thoughts = ""
        # Files that /save may overwrite, because this conversation was saved to them or loaded from them.
        self._files: set[Path] = set()

    @property
    def messages(self) -> list[Message]:
        """The messages that the model gets: the system message, if there is one, and all turns."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def say(self, message: str) -> Generator[Piece]:
        """Add a user's message and yield the pieces of the response; a part of an interrupted response is kept.

        The message takes the images that wait for it. Raises the model's errors, and forgets the message if it got no
        response; its images wait again then.
        """
        images, self.images = self.images, []
        self.turns.append({"role": "user", "content": with_images(message, images)})
        self.thoughts = ""
        text, is_over = "", False
        try:
            with closing(self.model.ask(self.messages, self.settings)) as pieces:
                for piece in pieces:
                    if piece.kind == "thoughts":
                        self.thoughts += piece.text
                    else:
                        text += piece.text
                    yield piece
            is_over = True
        finally:
            # Chat templates need a user's message and a response in turn.
            if text or is_over:
                self.turns.append({"role": "assistant", "content": text})
            else:
                self.turns.pop()
                self.images = images + self.images

    def reset(self) -> None:
        self.turns, self.images, self.thoughts = [], [], ""

    def undo(self) -> str | None:
        """Remove the last message and its response; return the message's text, or None if there is none.

        The next message gets the images of the one that was removed, and no others.
        """
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                self.thoughts = ""
                self.images = [part for part in _parts_of(message) if part["type"] != "text"]
                return _text_of(message)
        return None

    def save(self, path: Path) -> None:
        """Write the chat as Markdown, or, if the name ends in .json, as a body for /v1/chat/completions.

        Raises ConfigError, also if the file exists and is not this conversation's.
        """
        path = _whole_path(path)
        try:
            if path.exists() and path not in self._files:
                raise ConfigError(f"{path} exists already; choose another name, or remove it first")
            if path.suffix == ".json":
                body = {"model": self.model.name, "messages": self.messages, **self.settings.as_request_fields()}
                text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
            else:
                parts = [f"## {_TITLES[one['role']]}\n\n{_shown(one).strip()}\n\n" for one in self.messages]
                text = "".join(parts)
            with replacing(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from None
        except UnicodeEncodeError:
            reason = "the conversation contains half of a surrogate pair; take the message back with /undo"
            raise ConfigError(f"cannot write {path}: {reason}") from None
        self._files.add(path)

    def load(self, path: Path) -> None:
        """Continue a conversation that `save` wrote as JSON, or a list of messages. Raises ConfigError."""
        if path.suffix.lower() in (".md", ".markdown"):
            instead = f"save with /save {path.with_suffix('.json')} to go on later"
            raise ConfigError(f"/load reads JSON only, not the Markdown of {path}; {instead}")
        path = _whole_path(path)
        try:
            content = json.loads(read_text(path))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        # The file is not text or not JSON, or has a number of thousands of digits.
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{path} is not JSON; /load reads what /save wrote to a name that ends in .json"
            ) from None
        system, turns = _messages_in(content, path)
        self.reset()
        self.system, self.turns = system, turns
        self._files.add(path)


def _parts_of(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _text_of(message: Message) -> str:
    return "".join(part.get("text", "") for part in _parts_of(message))


def _shown(message: Message) -> str:
    """Return the message for a reader; an image is only named."""
    return "\n\n".join(part.get("text", "[image]") for part in _parts_of(message))


def _is_content(message: Mapping[str, Any]) -> bool:
    """Whether the content is a text, or for a user's message what `with_images` makes."""
    content = message.get("content")
    if not isinstance(content, list) or message["role"] != "user":
        return isinstance(content, str)
    *images, text = content or [None]
    return _is_text_part(text) and all(map(_is_image_part, images))


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_image_part(part: Any) -> bool:
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, dict) else None
    return isinstance(url, str) and url.startswith("data:")


def _whole_path(path: Path) -> Path:
    """Return the absolute path. Raises ConfigError if it cannot be the name of a file."""
    if "\0" in str(path):
        raise ConfigError("the name of a file cannot contain the character U+0000")
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such home directory; write the absolute path") from None


def _messages_in(content: Any, path: Path) -> tuple[str | None, list[Message]]:
    """Return the system message and the turns. Raises ConfigError for anything but a conversation of texts."""
    messages = content.get("messages") if isinstance(content, Mapping) else content
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f'{path} has no conversation; it must be a list of messages, or an object with the list as "messages"'
        )
    plain: list[Message] = []
    for number, message in enumerate(messages):
        allowed = ("user", "assistant") if number else tuple(_TITLES)
        if not isinstance(message, Mapping) or message.get("role") not in allowed or not _is_content(message):
            raise ConfigError(
                f"{path}: message {number + 1} must have the role {' or '.join(allowed)} and a text as content; a "
                "user's may have images before it"
            )
        plain.append({"role": message["role"], "content": message["content"]})
    if plain[0]["role"] == "system":
        return plain[0]["content"], plain[1:]
    return None, plain
