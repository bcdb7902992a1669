"""OutputItems: the items of a response as they grow, and the events that report their growth."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from pagewick.outputs import PartDelta, PartKind, ToolCall
from pagewick.server.api.chat_response import content_logprobs
from pagewick.server.api.responses import ContentLogprob
from pagewick.server.api.responses_api.objects import (
    ContentPart,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputRefusal,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs

# Kind of a part -> the word in the types of its events.
_WORDS = {PartKind.TEXT: "output_text", PartKind.REFUSAL: "refusal", PartKind.REASONING: "reasoning_text"}
_ENCODED = "pagewick:"


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def encoded_thoughts(text: str) -> str:
    """Return thoughts as a client sends them back in encrypted_content. They are only encoded: they are no secret."""
    return _ENCODED + base64.b64encode(text.encode()).decode()


def decoded_thoughts(encoded: str) -> str | None:
    """Return the thoughts that `encoded_thoughts` has encoded; None if another server has made them."""
    if not encoded.startswith(_ENCODED):
        return None
    try:
        return base64.b64decode(encoded.removeprefix(_ENCODED), validate=True).decode()
    except ValueError:
        return None


class OutputItems:
    """items: those that are complete. encodes_thoughts: whether thoughts are also in encrypted_content.

    namespaces: see Offer.
    """

    def __init__(
        self, *, wants_logprobs: bool, encodes_thoughts: bool, namespaces: Mapping[str, tuple[str, str]]
    ) -> None:
        self.items: list[OutputItem] = []
        self._wants_logprobs = wants_logprobs
        self._encodes_thoughts = encodes_thoughts
        self._namespaces = namespaces
        self._num_events = 0
        self._open: _OpenItem | None = None
        self._positions: list[PositionLogprobs] = []

    def feed(self, delta: ChoiceDelta) -> list[ResponseEvent]:
        """Return the events of a delta."""
        if delta.logprobs and self._wants_logprobs:
            self._positions += delta.logprobs
        events: list[ResponseEvent] = []
        for part in delta.parts:
            events += self._events_of(part)
        if delta.finish_reason is not None:
            is_whole = delta.finish_reason == "stop"
            if is_whole and all(isinstance(item, ReasoningItem) for item in self.so_far()):
                events += self._events_of(PartDelta(PartKind.TEXT))  # every complete response has a message or a call
            events += self._close("completed" if is_whole else "incomplete")
        return events

    def so_far(self) -> list[OutputItem]:
        """Return the items with one that is not complete."""
        return self.items if self._open is None else [*self.items, self._open.item("incomplete")]

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        """Return the next event; each has a higher number than the one before."""
        number, self._num_events = self._num_events, self._num_events + 1
        return ResponseEvent(type=kind, sequence_number=number, **fields)

    def _events_of(self, part: PartDelta) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if self._open is None or not self._open.goes_on_with(part):
            events += self._close("completed")
            self._open = _OpenItem(part.kind, part.call, self._namespaces, encodes_thoughts=self._encodes_thoughts)
            events.append(self._of_item("added", self._open.item("in_progress")))
        opened = self._open
        if part.kind is PartKind.TOOL_CALL:
            if part.text:
                opened.pieces.append(part.text)
                events.append(self._of_part("response.function_call_arguments.delta", delta=part.text))
            return events
        if opened.part_kind is not part.kind:
            events += self._close_part()
            opened.begin_part(part.kind)
            events.append(self._of_part("response.content_part.added", opened.part()))
        if part.text:
            events.append(self._grow(part))
        return events

    def _grow(self, part: PartDelta) -> ResponseEvent:
        opened = self._open
        assert opened is not None, "a part has an item"
        opened.pieces.append(part.text)
        if part.kind is not PartKind.TEXT:
            return self._of_part(f"response.{_WORDS[part.kind]}.delta", delta=part.text)
        logprobs = self._take_logprobs()
        return self._of_part("response.output_text.delta", delta=part.text, logprobs=logprobs)

    def _take_logprobs(self) -> list[ContentLogprob]:
        assert self._open is not None, "a text has an item"
        taken, self._positions = content_logprobs(self._positions), []
        self._open.logprobs += taken
        return taken

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        """Return the events that end the open item, if there is one."""
        opened = self._open
        if opened is None:
            return []
        events = self._close_part()
        item = opened.item(status)
        if isinstance(item, FunctionCallItem):
            done = "response.function_call_arguments.done"
            events.append(self._of_part(done, arguments=item.arguments, name=item.name))
        events.append(self._of_item("done", item))
        self.items.append(item)
        self._open = None
        return events

    def _close_part(self) -> list[ResponseEvent]:
        opened = self._open
        if opened is None or opened.part_kind is None:
            return []
        if opened.part_kind is PartKind.TEXT:
            self._take_logprobs()
        part, done = opened.part(), f"response.{_WORDS[opened.part_kind]}.done"
        match part:
            case OutputText():
                first = self._of_part(done, text=part.text, logprobs=part.logprobs)
            case OutputRefusal():
                first = self._of_part(done, refusal=part.refusal)
            case ReasoningText():
                first = self._of_part(done, text=part.text)
        events = [first, self._of_part("response.content_part.done", part)]
        opened.end_part()
        return events

    def _of_item(self, verb: str, item: OutputItem) -> ResponseEvent:
        return self.event(f"response.output_item.{verb}", output_index=len(self.items), item=item)

    def _of_part(self, kind: str, part: ContentPart | None = None, **fields: Any) -> ResponseEvent:
        opened = self._open
        assert opened is not None, "a part has an item"
        if part is not None:
            fields["part"] = part
        if opened.part_kind is not None:
            fields["content_index"] = len(opened.parts)
        return self.event(kind, output_index=len(self.items), item_id=opened.item_id, **fields)


class _OpenItem:
    """The item that grows. parts: its complete parts. pieces, logprobs: those of the part that grows, or of a call."""

    def __init__(
        self,
        kind: PartKind,
        call: ToolCall | None,
        namespaces: Mapping[str, tuple[str, str]],
        *,
        encodes_thoughts: bool,
    ) -> None:
        prefix = {PartKind.REASONING: "rs", PartKind.TOOL_CALL: "fc"}.get(kind, "msg")
        self.item_id = new_id(prefix)
        self.part_kind: PartKind | None = None
        self.parts: list[ContentPart] = []
        self.pieces: list[str] = []
        self.logprobs: list[ContentLogprob] = []
        self._call = call
        self._namespaces = namespaces
        self._is_thought = kind is PartKind.REASONING
        self._encodes_thoughts = encodes_thoughts

    def goes_on_with(self, part: PartDelta) -> bool:
        """Whether a part belongs to this item: a message has texts and refusals, any other item is one part."""
        return self._call == part.call and self._is_thought == (part.kind is PartKind.REASONING)

    def begin_part(self, kind: PartKind) -> None:
        self.part_kind, self.pieces, self.logprobs = kind, [], []

    def end_part(self) -> None:
        self.parts.append(self.part())
        self.part_kind = None

    def part(self) -> ContentPart:
        """Return the part that grows, as it is now."""
        text = "".join(self.pieces)
        if self.part_kind is PartKind.REASONING:
            return ReasoningText(text)
        if self.part_kind is PartKind.REFUSAL:
            return OutputRefusal(text)
        return OutputText(text=text, logprobs=[*self.logprobs])

    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now."""
        if self._call is not None:
            namespace, name = self._namespaces.get(self._call.name, (UNSET, self._call.name))
            return FunctionCallItem(
                id=self.item_id,
                status=status,
                call_id=self._call.call_id,
                name=name,
                namespace=namespace,
                arguments="".join(self.pieces),
            )
        parts: Sequence[Any] = self.parts if self.part_kind is None else [*self.parts, self.part()]
        if not self._is_thought:
            return MessageItem(id=self.item_id, status=status, content=list(parts))
        encoded = None
        if self._encodes_thoughts and status != "in_progress":
            encoded = encoded_thoughts("".join(part.text for part in parts))
        return ReasoningItem(id=self.item_id, status=status, content=list(parts), encrypted_content=encoded)
