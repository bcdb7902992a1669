"""Chunks from a template are the same bytes as chunks that are encoded one by one."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pagewick.server.api.framing import ChunkTemplate
from pagewick.server.api.openai import OPENAI_EVENTS


class Chunk(msgspec.Struct):
    id: str
    text: str
    more: list[dict[str, str]]


def chunk_of(text: str) -> Chunk:
    return Chunk("text", text, [{"text": text, "other": "\u0000"}])


@given(st.text())
def test_a_template_gives_the_bytes_of_the_encoded_chunk(text: str) -> None:
    framed = ChunkTemplate(chunk_of, OPENAI_EVENTS.frame).framed(text)
    assert framed == OPENAI_EVENTS.frame(chunk_of(text))
    assert json.loads(framed.removeprefix(b"data: ")) == msgspec.to_builtins(chunk_of(text))
