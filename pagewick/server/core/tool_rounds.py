"""ToolRounds: runs a chat whose model may call tools of the server's own, round after round.

A round is a response of the model with calls of such tools, and the results of these. The conversation then goes on
with both, in a further request for the engine, until the model answers or calls a tool of the client's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pagewick.errors import ContextLengthError, DeadlineExceededError
from pagewick.generation import Generation
from pagewick.log import get_logger
from pagewick.outputs import CompletionOutput, FinishReason, PartDelta
from pagewick.server.core.conversations import assistant_message
from pagewick.server.core.request import ChatRequest, Message
from pagewick.text.tool_calls.offer import ToolChoice

# A stop_reason: the model wanted to call tools of the server's once more than a request may.
ROUND_LIMIT = "tool_rounds"

StartRound = Callable[[ChatRequest], Awaitable[Generation]]

_logger = get_logger(__name__)


class ToolFailure(Exception):
    """A call of a tool has no result. The message is for the model, which may try again."""


class ServerTools(Protocol):
    """The tools that the server runs itself.

    definitions: in OpenAI's form, with names that differ. max_rounds: how often a request may call some. timeout_s: how
    long a call may take.
    """

    @property
    def definitions(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def max_rounds(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Return the result as a text. Raises ToolFailure."""
        ...


@dataclass(slots=True)
class ToolRun:
    """One call of a tool of the server's. index: among all of the request. round: from 0.

    arguments: as the model wrote them, which should be JSON. result: None while it runs.
    """

    index: int
    round: int
    call_id: str
    name: str
    arguments: str
    result: str | None = None
    is_error: bool = False


@dataclass(slots=True)
class ToolRounds:
    """The rounds of one request with one choice.

    chat: the request, whose tools include the server's. first: its Generation, which has not been entered. start: makes
    that of a later round. names: the server's tools that the request offers. request_id: for the log.

    generations: those so far; the caller runs the last one, then calls `run_calls`, until `is_over`. runs: the calls so
    far. finish_reason, stop_reason: of the response, once it is over.
    """

    tools: ServerTools
    chat: ChatRequest
    first: Generation
    start: StartRound
    names: frozenset[str]
    request_id: str
    generations: list[Generation] = field(default_factory=list)
    runs: list[ToolRun] = field(default_factory=list)
    is_over: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    _client_names: frozenset[str] = frozenset()
    _messages: list[Message] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _max_tokens: int | None = None

    def __post_init__(self) -> None:
        self.generations.append(self.first)
        self._client_names = frozenset(tool["function"]["name"] for tool in self.chat.tools) - self.names
        self._messages = list(self.chat.messages)
        self._max_tokens = self.first.params.max_tokens

    @property
    def choice(self) -> CompletionOutput:
        """The choice of the present round."""
        return self.generations[-1].output.outputs[0]

    def is_clients(self, name: str) -> bool:
        """Whether a call goes to the client. One that nobody has is answered here."""
        return name in self._client_names

    async def run_calls(self) -> AsyncGenerator[ToolRun]:
        """Run the server's tools that the round has called, at the same time, then prepare the next round.

        Yields each call when it begins, and again with its result. Raises what starting a request raises, and
        DeadlineExceededError.
        """
        choice = self.choice
        calls = [part for part in choice.parts if part.call is not None]
        own = [part for part in calls if part.call is not None and not self.is_clients(part.call.name)]
        runs = [
            ToolRun(index, len(self.generations) - 1, part.call.call_id, part.call.name, part.text)
            for index, part in enumerate(own, len(self.runs))
            if part.call is not None
        ]
        self.runs += runs
        if choice.finish_reason != "stop" or not runs:
            self._end(choice.finish_reason, choice.stop_reason)
            refusal = "the response ended before the call was complete"
        elif len(self.generations) > self.tools.max_rounds:
            self._end("length", ROUND_LIMIT)
            refusal = f"the request has had {self.tools.max_rounds} rounds of calls, which is the limit"
        else:
            async for run in self._results(runs):
                yield run
            if len(calls) > len(own):
                # The client has to give the results of its own before the model goes on.
                self._end(choice.finish_reason, choice.stop_reason)
            else:
                await self._begin_round(runs)
            return
        for run in runs:
            run.result, run.is_error = f"not run: {refusal}", True
            yield run

    def _end(self, finish_reason: FinishReason | None, stop_reason: str | int | None) -> None:
        self.is_over, self.finish_reason, self.stop_reason = True, finish_reason, stop_reason

    async def _results(self, runs: Sequence[ToolRun]) -> AsyncGenerator[ToolRun]:
        for run in runs:
            yield run
        tasks = [asyncio.create_task(self._run(run)) for run in runs]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, run: ToolRun) -> ToolRun:
        """Give the call its result. Raises DeadlineExceededError if the request's time ends first."""
        began = time.monotonic()
        left_s = self._time_left()
        timeout_s = self.tools.timeout_s if left_s is None else min(left_s, self.tools.timeout_s)
        try:
            run.result = await self._called(run, timeout_s)
        except ToolFailure as failure:
            run.result, run.is_error = str(failure), True
        self._time_left()
        outcome = "failed" if run.is_error else f"gave {len(run.result)} characters"
        took_ms = (time.monotonic() - began) * 1e3
        name = run.name if run.name in self.names else "an unknown one"
        _logger.info(
            "request %s: tool %s %s after %.0f ms", self.request_id, name, outcome, took_ms,
            extra={"request_id": self.request_id},
        )  # fmt: skip
        return run

    async def _called(self, run: ToolRun, timeout_s: float) -> str:
        if run.name not in self.names:
            known = ", ".join(sorted(self.names | self._client_names))[:1000]
            raise ToolFailure(f"there is no tool {run.name[:128]!r}; there are: {known}")
        try:
            arguments = json.loads(run.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolFailure(f"the arguments are not JSON: {error}; write the call again") from None
        if not isinstance(arguments, dict):
            raise ToolFailure("the arguments must be a JSON object; write the call again")
        return await self.tools.call(run.name, arguments, timeout_s)

    def _time_left(self) -> float | None:
        """Return the rest of the request's timeout in seconds; None if it has none. Raises DeadlineExceededError."""
        timeout_s = self.chat.serving.timeout_s
        if timeout_s is None:
            return None
        left_s = timeout_s - (time.monotonic() - self._began)
        if left_s <= 0:
            raise DeadlineExceededError(f"the request was not finished within its timeout of {timeout_s:g} s")
        return left_s

    async def _begin_round(self, runs: Sequence[ToolRun]) -> None:
        """Go on with the results, or end the response if the limit of tokens or the context is reached."""
        if len(self.generations) == 1 and self.chat.template.continue_final_message:
            self._messages[-1] = _continued(self._messages[-1], self.choice.parts)
        else:
            self._messages.append(assistant_message(self.choice.parts))
        self._messages += [
            {"role": "tool", "tool_call_id": run.call_id, "name": run.name, "content": run.result} for run in runs
        ]
        sampling = {name: value for name, value in self.chat.sampling.items() if name != "prompt_logprobs"}
        if self._max_tokens is not None:
            sampling["max_tokens"] = self._max_tokens - sum(one.stream.num_output_tokens for one in self.generations)
            if sampling["max_tokens"] <= 0:
                self._end("length", None)
                return
        # A tool that was asked for has been called.
        choice = ToolChoice("auto", self.chat.tool_choice.names, self.chat.tool_choice.is_parallel)
        chat = replace(
            self.chat,
            messages=self._messages,
            sampling=sampling,
            lowers_max_tokens=True,
            tool_choice=choice,
            template=replace(self.chat.template, continue_final_message=False, add_generation_prompt=None),
            serving=replace(self.chat.serving, timeout_s=self._time_left()),
        )
        try:
            self.generations.append(await self.start(chat))
        except ContextLengthError:
            # The results fill the context.
            self._end("length", None)


def _continued(last: Message, parts: Sequence[PartDelta]) -> dict[str, Any]:
    """Return the client's last message with what the model has added to it."""
    added, given = assistant_message(parts), last.get("content")
    text = added["content"]
    whole = [*given, {"type": "text", "text": text}] if isinstance(given, list) else (given or "") + text
    return {**added, **last, "content": whole, "tool_calls": added["tool_calls"]}
