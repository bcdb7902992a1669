"""The corpus as a list: how much of which kind, system prompts, conversations of several turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from training.corpus.document import Document
from training.corpus.questions import (
    fact_chat,
    follow_up_chat,
    small_talk,
    system_prompt,
    unknown_chat,
    unrelated_chat,
    usual_chat,
)
from training.corpus.tasks import copying, counting, json_object
from training.corpus.tools import tool_chat

_SHARES: dict[Callable[[random.Random], Document], float] = {
    fact_chat: 0.475,
    follow_up_chat: 0.035,
    usual_chat: 0.025,
    unrelated_chat: 0.1,
    unknown_chat: 0.15,
    small_talk: 0.035,
    counting: 0.01,
    copying: 0.045,
    json_object: 0.035,
    tool_chat: 0.09,
}
_MAX_LONG_TURNS = 24


def _single(rng: random.Random) -> Document:
    return rng.choices(list(_SHARES), list(_SHARES.values()))[0](rng)


def _conversation(rng: random.Random) -> Document:
    """Several chats without tools, one after the other, none of which depends on those before."""
    num_turns = rng.choice([2, 2, 3]) if rng.random() < 0.93 else rng.randint(5, _MAX_LONG_TURNS)
    turns: list[Document] = []
    while len(turns) < num_turns:
        turn = _single(rng)
        if not turn.tools:
            turns.append(turn)
    return Document("conversation", [message for turn in turns for message in turn.messages])


def _document(rng: random.Random) -> Document:
    document = _conversation(rng) if rng.random() < 0.09 else _single(rng)
    if rng.random() < 0.3:
        document = replace(document, messages=[{"role": "system", "content": system_prompt(rng)}, *document.messages])
    return replace(document, skip_thinking=rng.random() < 0.35)


def build_documents(count: int, seed: int) -> list[Document]:
    """`count` random documents; the same seed gives the same list."""
    rng = random.Random(seed)
    return [_document(rng) for _ in range(count)]
