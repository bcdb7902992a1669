"""What the scripts in Python share: the server's address, what it answers to plain HTTP, and what was checked."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any, NoReturn

URL = os.environ["PAGEWICK_URL"]
API = f"{URL}/v1"
KEY = os.environ["PAGEWICK_KEY"]
MODEL = "pagewick-demo"

failed: list[str] = []

QUESTION = "How do I change the port?"
PROMPT = "Pagewick is"
SYSTEM = "You are a helpful assistant."
# A conversation whose last question makes sense only after what comes before it.
TURNS = [
    {"role": "user", "content": "What is Pagewick?"},
    {"role": "assistant", "content": "Pagewick is an LLM inference and serving engine."},
    {"role": "user", "content": QUESTION},
]
# Longer than the built-in model's context of 2048 tokens.
TOO_LONG = "word " * 3000


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def post(path: str, **body: Any) -> Any:
    """The server's answer over plain HTTP: what a client has to make something of."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(API + path, json.dumps({"model": MODEL, **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def plainly(messages: list[dict[str, str]], **fields: Any) -> Any:
    """The likeliest answer to a conversation, over plain HTTP."""
    return post("/chat/completions", messages=messages, temperature=0, **fields)


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def check(what: str, is_so: bool, seen: object = "") -> None:
    """Say that it is so, or that it is not; the script goes on either way and fails at its end."""
    if is_so:
        print(f"  {what}", flush=True)
    else:
        print(f"  FAILED: {what}: {seen!r}", flush=True)
        failed.append(what)


def check_equal(what: str, seen: object, wanted: object) -> None:
    check(what, seen == wanted, f"{seen!r} where {wanted!r} was to be expected")


def check_raises(what: str, kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    """The client's own exception, with these words of the server's message in its text."""
    try:
        seen = call()
    except Exception as error:
        # Of this very kind: a client's exceptions inherit from each other.
        check(f"{what}: {kind.__name__}", type(error) is kind and all(word in str(error) for word in words), error)
    else:
        check(f"{what}: {kind.__name__}", False, seen)


def finish() -> NoReturn:
    """End the script: with 1 if anything was not as it should be."""
    sys.exit(1 if failed else 0)
