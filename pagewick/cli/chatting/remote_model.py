"""RemoteModel: a model of an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from pagewick.cli.chatting.conversation import Message, Piece, ResponseEnd
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.response_chunk import NotCompatibleError, ResponseChunk, read_chunk
from pagewick.cli.server_address import ServerAddress, error_of
from pagewick.cli.terminal_text import harmless
from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError, EngineError
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.text.reasoning import USUAL_TAGS, ReasoningSplitter, Stage, TextRun

MAX_EVENT_BYTES = 2**20


class RemoteModel:
    """A ChatModel over HTTP. name: what the server calls the model."""

    defaults: SamplingParams | None = None

    def __init__(self, address: ServerAddress, name: str) -> None:
        self.name = name
        self.response_end = ResponseEnd()
        self._address = address

    @classmethod
    def connect(cls, address: ServerAddress, wanted: str) -> RemoteModel:
        """Choose a model: the `wanted` one of the command line, or the server's first one if that names none.

        Raises ConfigError if the server cannot be reached or has no such model.
        """
        names = address.model_names()
        if wanted in names:
            return cls(address, wanted)
        if wanted != BUILTIN_MODEL:
            raise ConfigError(f"{address} has no model {wanted!r}; it has {harmless(', '.join(names[:8]))}")
        return cls(address, names[0])

    def ask(self, messages: Sequence[Message], settings: ChatSettings) -> Generator[Piece]:
        """Yield the pieces of the response. Raises ConfigError if the server is gone, and the errors of `error_of`."""
        self.response_end = ResponseEnd()
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings.as_request_fields(),
        }
        connection = self._address.connect()
        # Some servers leave the thoughts in the text, between the tags of the model, which are mostly these.
        splitter = ReasoningSplitter(*USUAL_TAGS, Stage.AWAITED)
        try:
            for chunk in self._events(connection, body):
                yield from self._pieces(chunk, splitter)
            yield from _pieces_of(splitter.flush())
        except (OSError, http.client.HTTPException) as error:
            raise self._address.unreachable(error) from None
        finally:
            connection.close()

    def _events(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> Iterator[ResponseChunk]:
        """Send the request and yield the chunks of its streamed response."""
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
                message = f"{self._address} sent an event that no OpenAI-compatible server sends: {error}"
                raise EngineError(message) from None
            if chunk.error:
                raise error_of(500, data)
            yield chunk
        raise EngineError(f"{self._address} ended the response early; the server's log may say why")

    def _pieces(self, chunk: ResponseChunk, splitter: ReasoningSplitter) -> Iterator[Piece]:
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self.response_end.num_tokens = chunk.usage.completion_tokens
        for choice in (chunk.choices or [])[:1]:
            self.response_end.finish_reason = choice.finish_reason or self.response_end.finish_reason
            if choice.delta is None:
                continue
            if choice.delta.thoughts:
                yield Piece("thoughts", choice.delta.thoughts)
            if choice.delta.content:
                yield from _pieces_of(splitter.feed(choice.delta.content))


def _pieces_of(runs: Iterable[TextRun]) -> Iterator[Piece]:
    for kind, text in runs:
        if kind is not PartKind.DROPPED:
            yield Piece("thoughts" if kind is PartKind.REASONING else "text", text)
