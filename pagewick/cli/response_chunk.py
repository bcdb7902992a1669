"""ResponseChunk: one event of an answer that an OpenAI-compatible server streams, with the fields that we use."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class NotCompatibleError(ValueError):
    """An event is no JSON, or something in it is not of the type that OpenAI's servers give it; the text says what."""


class Delta(msgspec.Struct):
    """reasoning_content: DeepSeek's and vLLM's name of the thoughts; reasoning: vLLM's later one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """delta: of a chat's answer; text: of a completion."""

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
    """Raises NotCompatibleError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotCompatibleError(str(error)) from None
