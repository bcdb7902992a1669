"""The first requests to a server, as commands to paste: what `pagewick serve` prints when it is ready."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pagewick.server.run import ReadyServer

QUESTION: Final = "What is Pagewick?"
BEGINNING: Final = "Pagewick is"
DOCUMENTS: Final = ("Pagewick serves language models.", "Candles have a wick.")
TEXTS: Final = ("Pagewick starts at once.", "The candle went out.")
# The commands name this variable, so that no key stands on a terminal or in a log.
KEY_VARIABLE: Final = "PAGEWICK_API_KEY"
# Before the path of a Unix socket, in the address of a server.
UNIX: Final = "unix:"


def curl(address: str) -> str:
    """Return the beginning of a curl command, up to the path. address: a URL, or unix:PATH for a Unix socket."""
    if address.startswith(UNIX):
        return f"curl --unix-socket {shlex.quote(address.removeprefix(UNIX))} http://localhost"
    return f"curl {address}"


class _Example(NamedTuple):
    """A request that suits a model. route: below /v1. call: of the client `openai`. answer: what to print of it."""

    route: str
    call: str
    fields: dict[str, Any]
    answer: str


def curl_line(served_model_name: str, server: ReadyServer) -> str:
    """Return a shell command that sends the model a request of the kind that it answers."""
    example = _example_for(server)
    headers = "-H 'content-type: application/json'"
    if server.needs_key:
        headers += f' -H "authorization: Bearer ${KEY_VARIABLE}"'
    body = {"model": served_model_name, **example.fields}
    return f"{curl(server.address)}/v1/{example.route} {headers} -d {shlex.quote(json.dumps(body))}"


def python_snippet(served_model_name: str, server: ReadyServer) -> str:
    """Return a program that does the same with the openai package."""
    example = _example_for(server)
    key = f'os.environ["{KEY_VARIABLE}"]' if server.needs_key else '"none"'
    fields = {"model": served_model_name, **example.fields}
    if example.call == "post":
        # The package knows no route of classifiers and rerankers, but sends any.
        arguments = f'"/{example.route}", cast_to=object, body={json.dumps(fields)}'
    else:
        arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    base_url, client, imported = server.address, "", ""
    if server.address.startswith(UNIX):
        path = json.dumps(server.address.removeprefix(UNIX))
        base_url, imported = "http://localhost", "import httpx\n"
        client = f", http_client=httpx.Client(transport=httpx.HTTPTransport(uds={path}))"
    return (
        f"{imported}{'import os' + chr(10) if server.needs_key else ''}"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{base_url}/v1", api_key={key}{client})\n'
        f"response = client.{example.call}({arguments})\n"
        f"print(response{example.answer})"
    )


def _example_for(server: ReadyServer) -> _Example:
    if server.info.num_labels and not server.info.label_activation:
        return _Example("classify", "post", {"input": [*TEXTS]}, '["data"]')
    if server.is_reranker:
        return _Example("rerank", "post", {"query": QUESTION, "documents": [*DOCUMENTS]}, '["results"]')
    if server.info.embedding:
        return _Example("embeddings", "embeddings.create", {"input": QUESTION}, ".data[0].embedding[:4]")
    if server.has_chat_template:
        messages = [{"role": "user", "content": QUESTION}]
        return _Example(
            "chat/completions", "chat.completions.create", {"messages": messages}, ".choices[0].message.content"
        )
    fields = {"prompt": BEGINNING, "max_tokens": 40}
    return _Example("completions", "completions.create", fields, ".choices[0].text")
