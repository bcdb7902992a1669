"""Conversations that the server keeps, so that a client sends only new messages.

A session has the messages of its finished requests, each followed by its response. A request that fails, or whose
client leaves, changes nothing. Sessions are kept in memory, separately for each API key.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from pagewick.errors import InvalidRequestError
from pagewick.outputs import PartDelta, PartKind, join_parts, text_of
from pagewick.server.core.limits import MAX_MESSAGES
from pagewick.server.errors import ApiError
from pagewick.text.content_parts import num_image_chars
from pagewick.text.output_stream import ChoiceDelta

MAX_SESSIONS = 1024
# Sizes are those of the messages as JSON. Images have a limit of their own: one may be as large as a long conversation.
MAX_SESSION_BYTES = 2**20
MAX_SESSION_IMAGE_BYTES = 32 * 2**20
MAX_TOTAL_BYTES = 128 * 2**20
# Roles that a client may send again with every request; the latest messages count.
INSTRUCTIONS = ("system", "developer")

Message = dict[str, Any]


class ConversationStore(Protocol):
    """The recorded sessions of a server, in this process or in another one; see Conversations for the arguments."""

    async def begin(
        self, owner: str, session_id: str, new: Sequence[Message], *, is_continuation: bool
    ) -> Recording: ...
    async def messages(self, owner: str, session_id: str) -> list[Message] | None: ...
    async def forget(self, owner: str, session_id: str) -> bool: ...


@dataclass(slots=True)
class _Session:
    messages: list[Message] = field(default_factory=list)
    num_bytes: int = 0
    used_at: float = 0.0
    is_busy: bool = False


class Conversations:
    """The recorded sessions. owner: the only one who can read, continue or forget them."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()

    def begin(self, owner: str, session_id: str, new: Sequence[Message], *, is_continuation: bool = False) -> Recording:
        """Return a recording of one request, which the caller must close.

        is_continuation: the response goes on from the last message instead of being a message of its own.
        Raises ApiError (409) while another request of the session runs, InvalidRequestError if it has become too long.
        """
        self._forget_old()
        key = (owner, session_id)
        session = self._sessions.setdefault(key, _Session())
        if session.is_busy:
            message = f"another request of session {session_id!r} is running; wait until it is answered"
            raise ApiError(409, message, param="session_id", code="session_busy")
        session.is_busy = True
        self._sessions.move_to_end(key)
        recording = Recording(
            _joined(session.messages, new), is_continuation, lambda kept: self._end(key, session, kept)
        )
        num_image_bytes = num_image_chars(recording.messages)
        num_bytes = _num_bytes(recording.messages) - num_image_bytes
        if len(recording.messages) > MAX_MESSAGES or num_bytes > MAX_SESSION_BYTES:
            recording.close()
            message = (
                f"the session has more than {MAX_MESSAGES} messages or {MAX_SESSION_BYTES} bytes; start another session"
            )
            raise InvalidRequestError(message, param="session_id")
        if num_image_bytes > MAX_SESSION_IMAGE_BYTES:
            recording.close()
            message = f"the session's images have more than {MAX_SESSION_IMAGE_BYTES} bytes; start another session"
            raise InvalidRequestError(message, param="session_id")
        return recording

    def messages(self, owner: str, session_id: str) -> list[Message] | None:
        """Return the session's messages; None if there is no such session."""
        self._forget_old()
        session = self._sessions.get((owner, session_id))
        return session.messages if session is not None and session.messages else None

    def forget(self, owner: str, session_id: str) -> bool:
        """Drop a session, and do not record a request under way. Returns whether there was such a session."""
        self._forget_old()
        session = self._sessions.pop((owner, session_id), None)
        return session is not None and bool(session.messages)

    def _end(self, key: tuple[str, str], session: _Session, messages: list[Message] | None) -> None:
        session.is_busy = False
        session.used_at = self._clock()
        if messages is not None:
            session.messages, session.num_bytes = messages, _num_bytes(messages)
            self._make_room()
        elif not session.messages and self._sessions.get(key) is session:
            del self._sessions[key]

    def _make_room(self) -> None:
        """Drop the sessions that were used longest ago; the latest one always stays."""
        num_bytes = sum(session.num_bytes for session in self._sessions.values())
        for key in [key for key, session in self._sessions.items() if not session.is_busy][:-1]:
            if len(self._sessions) <= MAX_SESSIONS and num_bytes <= MAX_TOTAL_BYTES:
                return
            num_bytes -= self._sessions.pop(key).num_bytes

    def _forget_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        for key in [key for key, one in self._sessions.items() if not one.is_busy and one.used_at < oldest]:
            del self._sessions[key]


class LocalConversations:
    """The ConversationStore of a server with one API process."""

    def __init__(self, ttl_s: float) -> None:
        self._sessions = Conversations(ttl_s)

    async def begin(self, owner: str, session_id: str, new: Sequence[Message], *, is_continuation: bool) -> Recording:
        return self._sessions.begin(owner, session_id, new, is_continuation=is_continuation)

    async def messages(self, owner: str, session_id: str) -> list[Message] | None:
        return self._sessions.messages(owner, session_id)

    async def forget(self, owner: str, session_id: str) -> bool:
        return self._sessions.forget(owner, session_id)


class Recording:
    """One request of a session. messages: the whole conversation, for its prompt.

    `observe` must see every delta of the only choice. Once the response is complete, the session keeps it.
    """

    def __init__(
        self, messages: list[Message], is_continuation: bool, end: Callable[[list[Message] | None], None]
    ) -> None:
        self.messages = messages
        self._is_continuation = is_continuation
        self._end: Callable[[list[Message] | None], None] | None = end
        self._parts: list[PartDelta] = []
        self._has_tokens = False

    def observe(self, delta: ChoiceDelta) -> None:
        join_parts(self._parts, delta.parts)
        self._has_tokens |= bool(delta.token_ids)
        if delta.finish_reason is not None:
            # With max_tokens 0 there is no response to keep.
            is_response = self._has_tokens and delta.finish_reason in ("stop", "length")
            self.keep(self._whole() if is_response else None)

    def close(self) -> None:
        """Keep nothing of the request, unless its response is complete already."""
        self.keep(None)

    def keep(self, messages: list[Message] | None) -> None:
        """End the request, and replace the session's messages; None keeps them. Only the first call counts."""
        if self._end is not None:
            end, self._end = self._end, None
            end(messages)

    def _whole(self) -> list[Message]:
        *before, last = self.messages
        if self._is_continuation:
            text, given = text_of(self._parts, PartKind.TEXT), last.get("content")
            whole = [*given, {"type": "text", "text": text}] if isinstance(given, list) else (given or "") + text
            return [*before, {**last, "content": whole}]
        return [*self.messages, assistant_message(self._parts)]


def assistant_message(parts: Sequence[PartDelta]) -> Message:
    """Return a whole response as a message of the form that OpenAI has and chat templates read."""
    message: Message = {"role": "assistant", "content": text_of(parts, PartKind.TEXT)}
    if reasoning := text_of(parts, PartKind.REASONING):
        message["reasoning_content"] = reasoning
    if refusal := text_of(parts, PartKind.REFUSAL):
        message["refusal"] = refusal
    calls = [(part.call, part.text) for part in parts if part.call is not None]
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in calls
        ]
    return message


def _joined(recorded: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """Append the new messages. Instructions at their beginning replace the recorded ones."""
    if new and new[0]["role"] in INSTRUCTIONS:
        recorded = recorded[_num_instructions(recorded) :]
        num_new = _num_instructions(new)
        return [*new[:num_new], *recorded, *new[num_new:]]
    return [*recorded, *new]


def _num_instructions(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages))


def _num_bytes(messages: list[Message]) -> int:
    return len(msgspec.json.encode(messages))
