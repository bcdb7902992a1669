"""`pagewick complete --file` and `--batch`: every prompt or request in a file, however large."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pagewick.cli.completing.batch_lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    BatchLine,
    BatchMistake,
    BatchRequest,
    BatchResponse,
    BatchResult,
    format_result,
    read_batch,
)
from pagewick.cli.completing.batch_run import opened_responder, run_batch
from pagewick.cli.completing.output_file import OutputFile
from pagewick.cli.server_address import error_parts
from pagewick.cli.text_input import count_lines, opened_text
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.log import printable
from pagewick.option_checks import flag_of

# Fields without effect that the note on stderr names.
_MAX_NAMED = 10
_CHUNK_CHARS = 2**16
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\0": "\0"}

# Gets the number of tokens of a finished request.
OnFinished = Callable[[int], None]


@dataclass(slots=True)
class Tally:
    """How many requests of this run succeeded and failed.

    failed_before: custom_ids that failed in earlier runs whose output this one continues, and have not been repeated.
    ignored: fields of requests that had no effect, each with the custom_id of the first request that has it.
    """

    num_answered: int = 0
    num_failed: int = 0
    failed_before: set[str] = field(default_factory=set)
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def has_failures(self) -> bool:
        return self.num_failed > 0 or bool(self.failed_before)

    @property
    def text(self) -> str:
        before = f", {len(self.failed_before)} failed earlier and not repeated" if self.failed_before else ""
        return f"{self.num_answered} answered, {self.num_failed} failed{before}"


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
    # The usage in a response counts the tokens of all choices together.
    fields = {**fields, "return_token_ids": True} if as_json else fields
    with opened_text(name) as file, closing(OutputFile(output, can_resume=False)) as target:
        requests = _prompt_requests(split_prompts(file, separator), chat, fields)
        total = count_lines(name) if separator == "\n" else None
        write = json_lines if as_json else text_block
        with _progress_bar(total, 0, output) as on_finished:
            return _run(config, requests, target, write, on_finished, is_ordered=True)


def run_batch_file(
    config: EngineConfig, name: str, *, output: Path | None, resumes: bool, fields: Mapping[str, Any]
) -> Tally:
    """Respond to every line of a batch, in any order. fields: defaults of the lines. Raises PagewickError.

    resumes: lines that have a response in the output are left out; those that have an error there are repeated.
    """
    opened = opened_text(name, keeps_bytes=True)
    kinds: Counter[bool] = Counter()

    def wanted(line: BatchLine) -> bool:
        if isinstance(line, BatchRequest):
            kinds[line.takes_flags] += 1
        return line.custom_id not in target.done

    with opened as file, closing(OutputFile(output, can_resume=True, resumes=resumes)) as target:
        lines = filter(wanted, read_batch(file, fields))
        with _progress_bar(count_lines(name), len(target.done), output) as on_finished:
            tally = _run(config, lines, target, format_result, on_finished, is_ordered=False)
    if fields and kinds[False] and not kinds[True]:
        flags = ", ".join(map(flag_of, fields))
        where = f"lines of {CHAT_URL} and {COMPLETIONS_URL}"
        click.echo(f"note: flags without effect: {flags}; they are for {where}, and the batch has none", err=True)
    return tally


def text_block(request: BatchLine, result: BatchResult) -> bytes:
    """Return the prompt and its responses as text."""
    if result.error is not None:
        texts = [f"error: {_mistake(result)}"]
    else:
        texts = [_text_and_thoughts(choice)[0].strip() for choice in _body(result)["choices"]]
    return "\n".join([f"> {_prompt(request)}", *texts, "", ""]).encode("utf-8", "replace")


def json_lines(request: BatchLine, result: BatchResult) -> bytes:
    """Return a line of JSON for each response, or one with the error."""
    prompt = _prompt(request)
    if result.error is not None:
        return _json_line({"prompt": prompt, "error": _mistake(result)})
    body = _body(result)
    lines = []
    for index, choice in enumerate(body["choices"]):
        text, thoughts = _text_and_thoughts(choice)
        record: dict[str, Any] = {"prompt": prompt, "text": text, "finish_reason": choice["finish_reason"]}
        record |= {"reasoning": thoughts} if thoughts else {}
        record |= {"index": index} if len(body["choices"]) > 1 else {}
        record |= {"prompt_tokens": body["usage"]["prompt_tokens"], "completion_tokens": len(choice["token_ids"])}
        lines.append(_json_line(record))
    return b"".join(lines)


def _run(
    config: EngineConfig,
    lines: Iterable[BatchLine],
    target: OutputFile,
    write: Callable[[BatchLine, BatchResult], bytes],
    on_finished: OnFinished,
    *,
    is_ordered: bool,
) -> Tally:
    tally = Tally(failed_before=set(target.failed))

    def on_result(request: BatchLine, result: BatchResult) -> None:
        target.write(write(request, result))
        tally.failed_before.discard(request.custom_id)
        if isinstance(result, BatchResponse):
            for name in result.ignored:
                tally.ignored.setdefault(name, request.custom_id)
        if result.error is not None:
            tally.num_failed += 1
            on_finished(0)
        else:
            tally.num_answered += 1
            on_finished((_body(result).get("usage") or {}).get("completion_tokens") or 0)

    async def run() -> None:
        async with opened_responder(config) as (respond, max_in_flight):
            await run_batch(lines, respond, on_result, max_in_flight=max_in_flight, is_ordered=is_ordered)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        hint = "" if is_ordered else "; --resume continues the batch"
        click.echo(f"Stopped: {tally.text}{hint}.", err=True)
        raise
    if tally.ignored:
        click.echo(_shown_ignored(tally.ignored), err=True)
    return tally


def _shown_ignored(ignored: Mapping[str, str]) -> str:
    """Return a line that names fields without effect. ignored: as in Tally. Clients chose the names of requests."""
    named = [f"{name} (first in {printable(custom_id)[:80]})" for name, custom_id in ignored.items()]
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return f"note: fields without effect: {', '.join(named[:_MAX_NAMED])}{more}"


@contextmanager
def _progress_bar(total: int | None, num_done: int, output: Path | None) -> Iterator[OnFinished]:
    """Show a progress bar on stderr, if that is a terminal to which no responses are written.

    total: number of requests, if it is known. num_done: those that an earlier run finished.
    """
    if not sys.stderr.isatty() or (output is None and sys.stdout.isatty()):
        yield lambda num_tokens: None
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total, completed=num_done, speed="")
        start, num_tokens = time.perf_counter(), 0

        def on_finished(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            speed = num_tokens / max(time.perf_counter() - start, 1e-9)
            progress.update(task, advance=1, speed=f"{speed:,.0f} tokens/s")

        yield on_finished


def _prompt_requests(prompts: Iterable[str], chat: bool, fields: Mapping[str, Any]) -> Iterator[BatchRequest]:
    for number, prompt in enumerate(prompts, start=1):
        content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        url = CHAT_URL if chat else COMPLETIONS_URL
        yield BatchRequest(f"line-{number}", url, {**content, **fields}, is_simple=True)


def _prompt(request: BatchLine) -> str:
    assert isinstance(request, BatchRequest), "a file of prompts has no mistakes"
    body = request.body
    return str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])


def _body(result: BatchResult) -> dict[str, Any]:
    assert not isinstance(result, BatchMistake), "a mistake has no body"
    body: dict[str, Any] = json.loads(result.body)
    return body


def _mistake(result: BatchResult) -> str:
    """Return an error for people, without the code at its end."""
    text = result.error or ""
    return text if isinstance(result, BatchMistake) else error_parts(result.body)[0] or text


def _text_and_thoughts(choice: Mapping[str, Any]) -> tuple[str, str]:
    message = choice.get("message") or {"content": choice.get("text")}
    return message["content"] or "", message.get("reasoning_content") or ""


def _json_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def split_prompts(file: TextIO, separator: str) -> Iterator[str]:
    """Yield the texts between separators, without white space around them; omit empty ones."""
    held: list[str] = []
    # The end of the held text, in which a separator may have begun.
    end = ""
    # Chunks are lines, because a pipe that stays open returns no more than these.
    while chunk := file.readline(_CHUNK_CHARS):
        held.append(chunk)
        end += chunk
        if separator in end:
            *whole, end = "".join(held).split(separator)
            held = [end]
            yield from (text.strip() for text in whole if text.strip())
        end = end[max(0, len(end) - len(separator) + 1) :]
    if last := "".join(held).strip():
        yield last


def unescaped(separator: str) -> str:
    r"""Replace \n, \t and \0 in a separator by the characters that they mean. Raises ConfigError if it is empty.

    Every line break in it becomes a line feed, as in the text of a file.
    """
    for written, meant in _ESCAPES.items():
        separator = separator.replace(written, meant)
    separator = separator.replace("\r\n", "\n").replace("\r", "\n")
    if not separator:
        raise ConfigError("--separator must not be empty")
    return separator
