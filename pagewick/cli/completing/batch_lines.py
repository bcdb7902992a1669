"""The lines of a batch: requests in the input, responses in the output.

A line of the input is OpenAI's batch format, {"custom_id", "method", "url", "body"}, or the body alone: a "prompt" or
"messages", with sampling fields beside them. The output has OpenAI's format for both.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagewick.cli.text_input import is_decoded
from pagewick.errors import ConfigError

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
# Names in a line that are not fields of a request.
_ENVELOPE = ("custom_id", "method", "url", "body")
# A flag's field -> other names under which a line may give it.
_OTHER_NAMES = {"max_tokens": ("max_completion_tokens", "n_predict"), "repetition_penalty": ("repeat_penalty",)}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request. is_simple: the line was a body alone; its response may fill the context, as with `complete -p`."""

    custom_id: str
    url: str
    body: dict[str, Any]
    is_simple: bool = False

    @property
    def takes_flags(self) -> bool:
        """Whether flags about sampling are defaults of its fields."""
        return self.url in (CHAT_URL, COMPLETIONS_URL)


@dataclass(frozen=True, slots=True)
class BatchMistake:
    """A line that is not a request, and why."""

    custom_id: str
    error: str


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """The server's response to a request: the HTTP status and the body, which is JSON.

    ignored: the fields of the request that had no effect, as the server's header x-pagewick-ignored names them.
    """

    custom_id: str
    status: int
    body: bytes
    ignored: tuple[str, ...] = ()

    @property
    def error(self) -> str | None:
        """The error message; None if the request succeeded."""
        return None if self.status == 200 else str(json.loads(self.body)["error"]["message"])


BatchLine = BatchRequest | BatchMistake
BatchResult = BatchResponse | BatchMistake


def read_batch(lines: Iterable[str], defaults: Mapping[str, Any]) -> Iterator[BatchLine]:
    """Yield a request or a mistake for every line that is not empty. defaults: fields for bodies that lack them.

    A line without a custom_id is named by its number, from 1: "line-7". Raises ConfigError if the first line is not
    UTF-8: the file has another encoding, such as UTF-16, then, and no line can be read.
    """
    for number, line in enumerate(lines, start=1):
        if number == 1 and not is_decoded(line):
            raise ConfigError("the batch is not UTF-8; convert it first")
        if line.strip():
            yield _parse_line(line, f"line-{number}", defaults)


def has_field(body: Mapping[str, Any], field: str) -> bool:
    """Return whether a request gives a field, under any of its names."""
    return any(body.get(name) is not None for name in (field, *_OTHER_NAMES.get(field, ())))


def _parse_line(line: str, name: str, defaults: Mapping[str, Any]) -> BatchLine:
    if not is_decoded(line):
        return BatchMistake(name, "the line is not UTF-8; convert it")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchMistake(name, f"the line is not valid JSON: {error}")
    if not isinstance(content, dict):
        return BatchMistake(name, "the line must be a JSON object")
    custom_id = content.get("custom_id", name)
    if not isinstance(custom_id, str):
        return BatchMistake(name, "custom_id must be a string")
    is_simple = "body" not in content and "url" not in content
    if is_simple:
        body: Any = {key: value for key, value in content.items() if key not in _ENVELOPE}
        url: Any = CHAT_URL if "messages" in body else COMPLETIONS_URL
        mistake = None
        if ("prompt" in body) == ("messages" in body):
            mistake = 'the line needs "prompt" or "messages", or "url" and "body"'
    else:
        body, url = content.get("body"), content.get("url")
        mistake = _mistake_in_envelope(content)
    if mistake is None and body.get("stream"):
        mistake = "responses in a batch are not streamed; remove stream"
    if mistake is not None:
        return BatchMistake(custom_id, mistake)
    request = BatchRequest(custom_id, url, body, is_simple)
    if request.takes_flags:
        given = {field: value for field, value in defaults.items() if not has_field(body, field)}
        request = replace(request, body={**body, **given})
    return request


def _mistake_in_envelope(content: Mapping[str, Any]) -> str | None:
    url = content.get("url")
    if unknown := sorted(content.keys() - set(_ENVELOPE)):
        return f"{unknown[0]} has no meaning beside url and body; put it into the body"
    if content.get("method", "POST") != "POST":
        return f"method must be POST; got {content['method']!r}"
    if not isinstance(url, str) or not url.startswith("/v1/") or not url.isascii():
        return f"url must be a path like {CHAT_URL}; got {url!r}"
    return None if isinstance(content.get("body"), dict) else "body must be a JSON object"


def format_result(request: BatchLine, result: BatchResult) -> bytes:
    """Return a line of the output, with a new unique id."""
    line_id = f"batch_req_{uuid.uuid4().hex}"
    line: dict[str, Any] = {"id": line_id, "custom_id": request.custom_id, "response": None, "error": None}
    if isinstance(result, BatchMistake):
        line["error"] = {"code": "invalid_line", "message": result.error}
    else:
        body = json.loads(result.body)
        line["response"] = {"status_code": result.status, "request_id": line_id, "body": body}
    return json.dumps(line).encode() + b"\n"
