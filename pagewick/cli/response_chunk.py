"""ResponseChunk: one event of a response that an OpenAI-compatible server streams, with the fields that we use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class NotCompatibleError(ValueError):
    """An event is not JSON, or a field in it does not have OpenAI's type; the message names it."""


class Delta(msgspec.Struct):
    """A piece of a chat's response. reasoning_content: DeepSeek's name of thoughts; reasoning: that of newer vLLM."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """A piece of one choice. delta: in a chat; text: in a completion."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.thoughts)))


class Usage(msgspec.Struct):
    prompt_tokens: NumTokens | None = None
    completion_tokens: NumTokens | None = None


class ResponseChunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(ResponseChunk)


def read_chunk(data: bytes) -> ResponseChunk:
    """Decode an event. Raises NotCompatibleError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotCompatibleError(str(error)) from None
