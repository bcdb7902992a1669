"""RemoteModel: an OpenAI-compatible server answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from pagewick.cli.chatting.conversation import Ending, Message
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.chatting.thoughts import Piece, ThoughtSplitter
from pagewick.cli.server_address import ServerAddress, error_of
from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError, EngineError
from pagewick.sampling_params import SamplingParams

MAX_EVENT_BYTES = 2**20
# What servers call the thoughts; the first is DeepSeek's and vLLM's name, the second vLLM's later one.
_THOUGHTS = ("reasoning_content", "reasoning")


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
            raise ConfigError(f"{address} has no model {wanted!r}; it has {', '.join(names[:8])}")
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
        splitter = ThoughtSplitter()
        try:
            for chunk in self._events(connection, body):
                yield from self._pieces(chunk, splitter)
            yield from splitter.end()
        except (OSError, http.client.HTTPException) as error:
            raise self._address.unreachable(error) from None
        finally:
            connection.close()

    def _events(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
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
                chunk = json.loads(data)
            except (ValueError, RecursionError):
                raise EngineError(f"{self._address} sent an event that is not JSON") from None
            if not isinstance(chunk, dict):
                raise EngineError(f"{self._address} sent an event that is no object")
            if chunk.get("error"):
                raise error_of(500, data)
            yield chunk
        raise EngineError(f"{self._address} ended the answer early; the server's log may say why")

    def _pieces(self, chunk: dict[str, Any], splitter: ThoughtSplitter) -> Iterator[Piece]:
        usage = chunk.get("usage") or {}
        if usage.get("completion_tokens") is not None:
            self.ending.num_tokens = int(usage["completion_tokens"])
        for choice in (chunk.get("choices") or [])[:1]:
            self.ending.finish_reason = choice.get("finish_reason") or self.ending.finish_reason
            delta = choice.get("delta") or {}
            thoughts = next((delta[name] for name in _THOUGHTS if delta.get(name)), "")
            if thoughts:
                yield Piece("thoughts", thoughts)
            if delta.get("content"):
                yield from splitter.feed(delta["content"])
