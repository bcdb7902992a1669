"""A Generation as a message of Anthropic's API, at once or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pagewick.generation import Generation, Listener
from pagewick.outputs import CompletionOutput, PartDelta, PartKind, ToolCall
from pagewick.server.api.anthropic.responses import (
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from pagewick.server.api.framing import Following, NamedEvent
from pagewick.server.api.partial_json import read_input
from pagewick.text.output_stream import ChoiceDelta

# Clients require a signature and send it back with the thought; some drop a thought whose signature is empty.
SIGNATURE = "unsigned"


@dataclass(frozen=True, slots=True)
class MessageResponse:
    """The response to a request.

    max_tokens: the client's. shows_thoughts: whether blocks of thoughts have their text.
    """

    generation: Generation
    id: str
    model: str
    max_tokens: int
    shows_thoughts: bool = True

    async def whole(self) -> Message:
        async with self.generation:
            await self.generation.pass_to(Listener(lambda delta: None))
        blocks = [self._block(part) for part in self.choice.parts if part.text or part.call is not None]
        return self.message(blocks, *self.end())

    async def chunks(self) -> AsyncGenerator[Following | NamedEvent]:
        async with self.generation:
            yield Following(self.generation, _Events(self).of)
        yield named(MessageStop())

    @property
    def choice(self) -> CompletionOutput:
        return self.generation.output.outputs[0]

    def message(self, content: list[ContentBlock], reason: StopReason | None, sequence: str | None) -> Message:
        return Message(self.id, "assistant", self.model, content, reason, sequence, self.usage())

    def usage(self) -> MessageUsage:
        output = self.generation.output
        num_cached = output.num_cached_tokens
        return MessageUsage(
            input_tokens=len(output.prompt_token_ids) - num_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=num_cached,
            output_tokens=self.generation.stream.num_output_tokens,
            output_tokens_details=OutputTokensDetails(self.choice.num_reasoning_tokens),
        )

    def end(self) -> tuple[StopReason, str | None]:
        """Return why the response has ended, and the stop sequence that ended it, if one did."""
        choice = self.choice
        if choice.finish_reason == "length":
            is_clients = len(choice.token_ids) >= self.max_tokens
            return ("max_tokens" if is_clients else "model_context_window_exceeded"), None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        if any(part.call is not None for part in choice.parts):
            return "tool_use", None
        is_refusal = any(part.kind is PartKind.REFUSAL for part in choice.parts)
        return ("refusal" if is_refusal else "end_turn"), None

    def _block(self, part: PartDelta) -> ContentBlock:
        if part.call is not None:
            return ToolUseBlock(part.call.call_id, part.call.name, read_input(part.text))
        if part.kind is PartKind.REASONING:
            return ThinkingBlock(part.text if self.shows_thoughts else "", SIGNATURE)
        return TextBlock(part.text)


class _Events:
    """Makes the events of deltas. A block begins with the first piece of its part, and ends before that of the next."""

    def __init__(self, response: MessageResponse) -> None:
        self._response = response
        self._num_blocks = 0
        self._open: tuple[PartKind, ToolCall | None] | None = None  # tells the part of the open block from others
        self._is_started = False

    def of(self, delta: ChoiceDelta) -> list[NamedEvent]:
        events: list[Event] = []
        if not self._is_started:
            self._is_started = True
            events.append(MessageStart(self._response.message([], None, None)))
        for part in delta.parts:
            if part.text or part.call is not None:
                events += self._part(part)
        if delta.finish_reason is not None:
            events += self._close()
            events.append(MessageDelta(MessageEnd(*self._response.end()), self._response.usage()))
        return [named(event) for event in events]

    def _part(self, part: PartDelta) -> list[Event]:
        events: list[Event] = []
        if self._open != (part.kind, part.call):
            events += self._close()
            self._open = (part.kind, part.call)
            events.append(ContentBlockStart(self._num_blocks, _empty_block(part)))
            if not self._num_blocks:
                # As Anthropic's server does.
                events.append(Ping())
            self._num_blocks += 1
        index = self._num_blocks - 1
        if part.call is not None:
            events += [ContentBlockDelta(index, InputJsonDelta(part.text))] if part.text else []
        elif part.kind is not PartKind.REASONING:
            events.append(ContentBlockDelta(index, TextDelta(part.text)))
        elif self._response.shows_thoughts:
            events.append(ContentBlockDelta(index, ThinkingDelta(part.text)))
        return events

    def _close(self) -> list[Event]:
        """Return the events that end the open block, if there is one."""
        if self._open is None:
            return []
        index, (kind, _) = self._num_blocks - 1, self._open
        self._open = None
        end: list[Event] = [ContentBlockStop(index)]
        return [ContentBlockDelta(index, SignatureDelta(SIGNATURE)), *end] if kind is PartKind.REASONING else end


def named(event: Event) -> NamedEvent:
    """Clients tell events apart by their names, which are also the types in their data."""
    return NamedEvent(str(event.__struct_config__.tag), event)


def _empty_block(part: PartDelta) -> ContentBlock:
    if part.call is not None:
        return ToolUseBlock(part.call.call_id, part.call.name, {})
    return ThinkingBlock("", "") if part.kind is PartKind.REASONING else TextBlock("")
