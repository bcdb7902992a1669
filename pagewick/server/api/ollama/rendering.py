"""A Generation as a response of Ollama's API, at once or as pieces, each with an object of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from pagewick.generation import Generation, Listener, run_all
from pagewick.outputs import PartDelta, PartKind, ToolCall
from pagewick.pooling_params import PoolingParams
from pagewick.server.api.framing import Following
from pagewick.server.api.ollama.responses import (
    GeneratedToken,
    OllamaAnswer,
    OllamaCall,
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaFunction,
    OllamaText,
    TokenAlternative,
    timestamp,
)
from pagewick.server.api.partial_json import read_input
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs

_NS = 1e9


@dataclass(slots=True)
class Piece:
    """Some of a response: the text, the thoughts and the calls that have come since the piece before it."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)
    logprobs: list[GeneratedToken] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.thinking or self.calls)


@dataclass(frozen=True, slots=True)
class Form:
    """How a response is written. model: the name in the request. is_chat: /api/chat, or else /api/generate.

    wants_logprobs: report log-probabilities. began: time.monotonic() at the request.
    """

    model: str
    is_chat: bool
    wants_logprobs: bool = False
    began: float = field(default_factory=time.monotonic)
    created_at: str = field(default_factory=lambda: now())

    def object(self, piece: Piece, **ending: Any) -> OllamaChat | OllamaText:
        """Return the object with a piece. ending: LastFields, for the last one."""
        common: dict[str, Any] = {"model": self.model, "created_at": self.created_at, "done": bool(ending), **ending}
        if piece.logprobs:
            common["logprobs"] = piece.logprobs
        if not self.is_chat:
            return OllamaText(**common, response=piece.text, thinking=piece.thinking or UNSET)
        answer = OllamaAnswer("assistant", piece.text, piece.thinking or UNSET, piece.calls or UNSET)
        return OllamaChat(**common, message=answer)


@dataclass(frozen=True, slots=True)
class OllamaResponse:
    """The response to a request."""

    generation: Generation
    form: Form

    async def whole(self) -> OllamaChat | OllamaText:
        pieces, made = _Pieces(self.form), list[Piece]()
        async with self.generation:
            await self.generation.pass_to(Listener(lambda delta: made.extend(pieces.of(delta))))
        whole = Piece(
            # Joined at once: to add to a text that something else refers to copies all of it.
            "".join(piece.text for piece in made),
            "".join(piece.thinking for piece in made),
            [call for piece in made for call in piece.calls],
            [token for piece in made for token in piece.logprobs],
        )
        return self.form.object(whole, **self.ending())

    async def chunks(self) -> AsyncGenerator[Following | OllamaChat | OllamaText]:
        pieces = _Pieces(self.form)

        def chunks_of(delta: ChoiceDelta) -> Iterator[OllamaChat | OllamaText]:
            return map(self.form.object, pieces.of(delta))

        async with self.generation:
            yield Following(self.generation, chunks_of, None if self.form.wants_logprobs else self.text_chunk)
        yield self.form.object(Piece(), **self.ending())

    def text_chunk(self, index: int, text: str) -> OllamaChat | OllamaText:
        return self.form.object(Piece(text))

    def ending(self) -> dict[str, Any]:
        output = self.generation.output
        return {
            "done_reason": "length" if output.outputs[0].finish_reason == "length" else "stop",
            "total_duration": since(self.form.began),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": round(output.prefill_s * _NS),
            "eval_count": self.generation.stream.num_output_tokens,
            # Clients divide by it.
            "eval_duration": max(1, round(output.decode_s * _NS)),
        }


class _Pieces:
    """Makes pieces of deltas. A call is part of a piece once all of it has come."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._call: ToolCall | None = None
        self._arguments: list[str] = []
        self._positions: list[PositionLogprobs] = []

    def of(self, delta: ChoiceDelta) -> list[Piece]:
        if self._form.wants_logprobs:
            self._positions += delta.logprobs or []
        pieces: list[Piece] = []
        for part in delta.parts:
            if self._call is not None and part.call != self._call:
                pieces.append(self._take_call())
            pieces.append(self._piece(part))
        if delta.finish_reason is not None and self._call is not None:
            pieces.append(self._take_call())
        pieces = [piece for piece in pieces if not piece.is_empty]
        if self._positions and (pieces or delta.finish_reason is not None):
            pieces = pieces or [Piece()]
            pieces[0].logprobs, self._positions = [_token(one) for one in self._positions], []
        return pieces

    def _piece(self, part: PartDelta) -> Piece:
        if part.call is not None:
            self._call = part.call
            self._arguments.append(part.text)
            return Piece()
        return Piece(thinking=part.text) if part.kind is PartKind.REASONING else Piece(part.text)

    def _take_call(self) -> Piece:
        assert self._call is not None
        function = OllamaFunction(self._call.index, self._call.name, read_input("".join(self._arguments)))
        call = OllamaCall(self._call.call_id, function)
        self._call, self._arguments = None, []
        return Piece(calls=[call])


@dataclass(frozen=True, slots=True)
class OllamaVectors:
    """The response to a request for vectors. is_one: /api/embeddings, whose response has one vector only."""

    generations: Sequence[Generation]
    params: PoolingParams
    model: str
    at_once: int
    is_one: bool
    began: float = field(default_factory=time.monotonic)

    async def whole(self) -> OllamaEmbeddings | OllamaEmbedding:
        """Run the requests to their end. Other requests run between the encoding of vectors."""
        await run_all(self.generations, self.at_once)
        vectors: list[Raw] = []
        for generation in self.generations:
            vectors.append(Raw(msgspec.json.encode(self.params.vector(generation.output.pooled).tolist())))
            await asyncio.sleep(0)
        if self.is_one:
            return OllamaEmbedding(vectors[0])
        return OllamaEmbeddings(
            model=self.model,
            embeddings=vectors,
            total_duration=since(self.began),
            load_duration=0,
            prompt_eval_count=sum(len(one.output.prompt_token_ids) for one in self.generations),
        )


def now() -> str:
    return timestamp(datetime.now(UTC))


def since(began: float) -> int:
    """Return the nanoseconds since a time.monotonic()."""
    return round((time.monotonic() - began) * _NS)


def _token(position: PositionLogprobs) -> GeneratedToken:
    chosen = position.chosen
    others = [TokenAlternative(one.token, one.logprob, list(one.shown)) for one in position.top]
    return GeneratedToken(chosen.token, chosen.logprob, list(chosen.shown), others)
