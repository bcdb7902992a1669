"""RemoteModel: an OpenAI-compatible server answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from pagewick.cli.answer_chunk import AnswerChunk, NotCompatibleError, read_chunk
from pagewick.cli.chatting.conversation import Ending, Message, Piece
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.server_address import ServerAddress, error_of
from pagewick.cli.terminal_text import harmless
from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError, EngineError
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.text.reasoning import KNOWN_TAGS, ReasoningSplitter, Stage, TextRun

MAX_EVENT_BYTES = 2**20
# Of servers that leave the thoughts in the text; most models have these tags.
_TAGS = KNOWN_TAGS[0]


class RemoteModel:
    """A ChatModel over HTTP. name: what the server calls the model."""

    defaults: SamplingParams | None = None

    def __init__(self, address: ServerAddress, name: str) -> None:
        self.name = name
        self.ending = Ending()
        self._address = address

    @classmethod
    def connect(cls, address: ServerAddress, wanted: str) -> RemoteModel:
        """wanted: the model that the command line names; where it names none, the server's first one is taken.

        Raises ConfigError if the server is not there, or has no such model.
        """
        names = address.model_names()
        if not names:
            raise ConfigError(f"{address} serves no model")
        if wanted in names:
            return cls(address, wanted)
        if wanted != BUILTIN_MODEL:
            raise ConfigError(f"{address} has no model {wanted!r}; it has {harmless(', '.join(names[:8]))}")
        return cls(address, names[0])

    def ask(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[Piece]:
        """Raises ConfigError if the server is gone, and what `error_of` makes of its errors."""
        self.ending = Ending()
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings.as_request_fields(),
        }
        connection = self._address.connect()
        splitter = ReasoningSplitter(*_TAGS, Stage.AWAITED)
        try:
            for chunk in self._events(connection, body):
                yield from self._pieces(chunk, splitter)
            yield from _pieces_of(splitter.flush())
        except (OSError, http.client.HTTPException) as error:
            raise self._address.unreachable(error) from None
        finally:
            connection.close()

    def _events(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> Iterator[AnswerChunk]:
        """The chunks of a streamed answer."""
        path = f"{self._address.path}/chat/completions"
        connection.request("POST", path, json.dumps(body).encode(), self._address.headers)
        response = connection.getresponse()
        if response.status != 200:
            raise error_of(response.status, response.read(MAX_EVENT_BYTES))
        while line := response.readline(MAX_EVENT_BYTES):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                chunk = read_chunk(data)
            except NotCompatibleError as error:
                message = f"{self._address} sent an event that is not one of an OpenAI-compatible server: {error}"
                raise EngineError(message) from None
            if chunk.error:
                raise error_of(500, data)
            yield chunk
        raise EngineError(f"{self._address} ended the answer early; the server's log may say why")

    def _pieces(self, chunk: AnswerChunk, splitter: ReasoningSplitter) -> Iterator[Piece]:
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self.ending.num_tokens = chunk.usage.completion_tokens
        for choice in (chunk.choices or [])[:1]:
            self.ending.finish_reason = choice.finish_reason or self.ending.finish_reason
            if choice.delta is None:
                continue
            if choice.delta.thoughts:
                yield Piece("thoughts", choice.delta.thoughts)
            if choice.delta.content:
                yield from _pieces_of(splitter.feed(choice.delta.content))


def _pieces_of(runs: Iterable[TextRun]) -> Iterator[Piece]:
    for kind, text in runs:
        if kind is not PartKind.DROPPED:
            yield Piece("thoughts" if kind is PartKind.REASONING else "answer", text)
