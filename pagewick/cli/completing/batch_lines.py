"""The lines of a batch: what comes in, and what goes out.

In is OpenAI's batch format, {"custom_id", "method", "url", "body"}, or the body alone: a line with a "prompt" or with
"messages", and sampling fields beside them. Out is OpenAI's format for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
# Names of a line that are not fields of a request.
_ENVELOPE = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """is_simple: the line was no envelope; its answer may be as long as the context, as with `complete --prompt`."""

    custom_id: str
    url: str
    body: dict[str, Any]
    is_simple: bool = False


@dataclass(frozen=True, slots=True)
class BatchMistake:
    """A line that is no request, and why."""

    custom_id: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What the server would say to a request: the status and the body, which is JSON."""

    custom_id: str
    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.status != 200


BatchLine = BatchRequest | BatchMistake


def read_batch(lines: Iterable[str], defaults: Mapping[str, Any]) -> Iterator[BatchLine]:
    """A request or a mistake for every line that is not empty. defaults: fields for bodies that have them not.

    A line without a custom_id gets its number, from 1: "line-7".
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parse_line(line, f"line-{number}", defaults)


def parse_line(line: str, name: str, defaults: Mapping[str, Any]) -> BatchLine:
    """name: the custom_id of a line without one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchMistake(name, f"the line is not valid JSON: {error}")
    if not isinstance(content, dict):
        return BatchMistake(name, "the line must be a JSON object")
    custom_id = content.get("custom_id", name)
    if not isinstance(custom_id, str):
        return BatchMistake(name, "custom_id must be a string")
    if "body" in content or "url" in content:
        return _parse_envelope(content, custom_id, defaults)
    body = {key: value for key, value in content.items() if key not in _ENVELOPE}
    if ("prompt" in body) == ("messages" in body):
        return BatchMistake(custom_id, 'the line needs "prompt" or "messages", or "url" and "body"')
    url = CHAT_URL if "messages" in body else COMPLETIONS_URL
    return _request(BatchRequest(custom_id, url, _with_defaults(body, defaults), is_simple=True))


def _parse_envelope(content: Mapping[str, Any], custom_id: str, defaults: Mapping[str, Any]) -> BatchLine:
    if unknown := sorted(content.keys() - set(_ENVELOPE)):
        return BatchMistake(custom_id, f"{unknown[0]} has no meaning beside url and body; put it into the body")
    if content.get("method", "POST") != "POST":
        return BatchMistake(custom_id, f"method must be POST; got {content['method']!r}")
    url, body = content.get("url"), content.get("body")
    if not isinstance(url, str) or not url.startswith("/v1/"):
        return BatchMistake(custom_id, f"url must be a path like {CHAT_URL}; got {url!r}")
    if not isinstance(body, dict):
        return BatchMistake(custom_id, "body must be a JSON object")
    fields = defaults if url in (CHAT_URL, COMPLETIONS_URL) else {}
    return _request(BatchRequest(custom_id, url, _with_defaults(body, fields)))


def _request(request: BatchRequest) -> BatchLine:
    if request.body.get("stream"):
        return BatchMistake(request.custom_id, "the answers of a batch are not streamed; leave out stream")
    return request


def _with_defaults(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the line leaves open; max_completion_tokens is another name of max_tokens."""
    missing = {name: value for name, value in defaults.items() if body.get(name) is None}
    if body.get("max_completion_tokens") is not None:
        missing.pop("max_tokens", None)
    return {**body, **missing}


def format_answer(answer: BatchAnswer | BatchMistake, answer_id: str) -> bytes:
    """A line of the output. answer_id: its "id", unique among all."""
    line: dict[str, Any] = {"id": answer_id, "custom_id": answer.custom_id, "response": None, "error": None}
    if isinstance(answer, BatchMistake):
        line["error"] = {"code": "invalid_line", "message": answer.message}
    else:
        line["response"] = {"status_code": answer.status, "request_id": answer_id, "body": json.loads(answer.body)}
    return json.dumps(line).encode() + b"\n"
