"""`pagewick complete --file` and `--batch`: every prompt or request of a file, however many."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import uvloop

from pagewick.cli.completing.batch_lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    BatchAnswer,
    BatchLine,
    BatchMistake,
    BatchRequest,
    format_answer,
    read_batch,
)
from pagewick.cli.completing.batch_run import opened_answerer, run_batch
from pagewick.cli.completing.output_file import OutputFile
from pagewick.cli.completing.progress import OnFinished, progress_bar
from pagewick.cli.completing.prompt_files import count_lines, lines_of, opened_text, split_prompts
from pagewick.config import EngineConfig

Format = Callable[[BatchRequest | BatchMistake, BatchAnswer | BatchMistake], bytes]


@dataclass(slots=True)
class Tally:
    """What has become of the requests of this run."""

    num_answered: int = 0
    num_failed: int = 0

    @property
    def text(self) -> str:
        return f"{self.num_answered} answered, {self.num_failed} failed"


def run_prompt_file(
    config: EngineConfig,
    name: str,
    *,
    separator: str,
    chat: bool,
    as_json: bool,
    output: Path | None,
    fields: Mapping[str, Any],
) -> Tally:
    """Complete every prompt of a file, in their order. fields: of every request. Raises PagewickError."""
    with ExitStack() as stack:
        file = stack.enter_context(opened_text(name))
        target = stack.enter_context(OutputFile(output, resumes=False))
        requests = _prompt_requests(split_prompts(file, separator), chat, fields)
        total = count_lines(name) if separator == "\n" else None
        on_finished = _progress(stack, total, 0, output)
        return _run(config, requests, target, json_line if as_json else text_block, on_finished, is_ordered=True)


def run_batch_file(
    config: EngineConfig, name: str, *, output: Path | None, resumes: bool, fields: Mapping[str, Any]
) -> Tally:
    """Answer every line of a batch, each as soon as it is done. fields: defaults of the lines. Raises PagewickError."""
    with ExitStack() as stack:
        file = stack.enter_context(opened_text(name))
        target = stack.enter_context(OutputFile(output, resumes=resumes))
        lines = (line for line in read_batch(lines_of(file), fields) if line.custom_id not in target.done)
        on_finished = _progress(stack, count_lines(name), len(target.done), output)
        return _run(config, lines, target, _batch_line, on_finished, is_ordered=False)


def text_block(request: BatchRequest | BatchMistake, answer: BatchAnswer | BatchMistake) -> bytes:
    """The prompt and its answers, to be read."""
    texts = [_error_text(answer)] if _is_failed(answer) else [text.strip() for text, _, _ in _choices(answer)]
    return "\n".join([f"> {_prompt(request)}", *texts, "", ""]).encode("utf-8", "replace")


def json_line(request: BatchRequest | BatchMistake, answer: BatchAnswer | BatchMistake) -> bytes:
    """A line of JSON for each answer, or one that says what is wrong."""
    prompt = _prompt(request)
    if _is_failed(answer):
        return _line({"prompt": prompt, "error": _error_text(answer)})
    usage = _body(answer)["usage"]
    choices = _choices(answer)
    lines = []
    for index, (text, thoughts, finish_reason) in enumerate(choices):
        record: dict[str, Any] = {"prompt": prompt, "text": text, "finish_reason": finish_reason}
        record |= {"reasoning": thoughts} if thoughts else {}
        record |= {"index": index} if len(choices) > 1 else {}
        # The server counts the tokens of all answers to a prompt together.
        name = "total_completion_tokens" if len(choices) > 1 else "completion_tokens"
        lines.append(_line(record | {"prompt_tokens": usage["prompt_tokens"], name: usage["completion_tokens"]}))
    return b"".join(lines)


def _batch_line(request: BatchRequest | BatchMistake, answer: BatchAnswer | BatchMistake) -> bytes:
    return format_answer(answer, f"batch_req_{uuid.uuid4().hex}")


def _run(
    config: EngineConfig,
    lines: Iterable[BatchLine],
    target: OutputFile,
    write: Format,
    on_finished: OnFinished,
    *,
    is_ordered: bool,
) -> Tally:
    tally = Tally()

    def on_answer(request: BatchRequest | BatchMistake, answer: BatchAnswer | BatchMistake) -> None:
        target.write(write(request, answer))
        tally.num_failed += _is_failed(answer)
        tally.num_answered += not _is_failed(answer)
        on_finished(0 if _is_failed(answer) else _num_tokens(answer))

    async def run() -> None:
        async with opened_answerer(config) as (answer, max_in_flight):
            await run_batch(lines, answer, on_answer, max_in_flight=max_in_flight, is_ordered=is_ordered)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        hint = "" if is_ordered else "; --resume goes on"
        click.echo(f"Stopped: {tally.text}{hint}.", err=True)
        raise
    return tally


def _progress(stack: ExitStack, total: int | None, num_done: int, output: Path | None) -> OnFinished:
    """Nothing where nobody looks, or where it would be written into the answers."""
    if not sys.stderr.isatty() or (output is None and sys.stdout.isatty()):
        return lambda num_tokens: None
    return stack.enter_context(progress_bar(total, num_done))


def _prompt_requests(prompts: Iterable[str], chat: bool, fields: Mapping[str, Any]) -> Iterator[BatchRequest]:
    for number, prompt in enumerate(prompts, start=1):
        content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        url = CHAT_URL if chat else COMPLETIONS_URL
        yield BatchRequest(f"line-{number}", url, {**content, **fields}, is_simple=True)


def _prompt(request: BatchRequest | BatchMistake) -> str:
    assert isinstance(request, BatchRequest), "prompts are never mistaken"
    body = request.body
    return str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])


def _is_failed(answer: BatchAnswer | BatchMistake) -> bool:
    return isinstance(answer, BatchMistake) or answer.is_error


def _error_text(answer: BatchAnswer | BatchMistake) -> str:
    if isinstance(answer, BatchMistake):
        return f"error: {answer.message}"
    return f"error: {json.loads(answer.body)['error']['message']}"


def _body(answer: BatchAnswer | BatchMistake) -> dict[str, Any]:
    assert isinstance(answer, BatchAnswer), "a mistake has no body"
    body: dict[str, Any] = json.loads(answer.body)
    return body


def _choices(answer: BatchAnswer | BatchMistake) -> list[tuple[str, str, str]]:
    """Text, thoughts and finish reason of each answer."""
    found = []
    for choice in _body(answer)["choices"]:
        message = choice.get("message") or {"content": choice.get("text")}
        thoughts = message.get("reasoning_content") or ""
        found.append((str(message["content"] or ""), str(thoughts), str(choice["finish_reason"])))
    return found


def _num_tokens(answer: BatchAnswer | BatchMistake) -> int:
    return int((_body(answer).get("usage") or {}).get("completion_tokens") or 0)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
