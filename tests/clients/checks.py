"""Shared by the scripts in Python: the server's address, requests over plain HTTP, and checks."""

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
    """Return the server's response over plain HTTP, which a client's result is compared with."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(API + path, json.dumps({"model": MODEL, **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def plainly(messages: list[dict[str, str]], **fields: Any) -> Any:
    """Return the likeliest response to a conversation, over plain HTTP."""
    return post("/chat/completions", messages=messages, temperature=0, **fields)


def text_of(response: Any) -> str:
    text: str = response["choices"][0]["message"]["content"]
    return text


def check(what: str, is_so: bool, seen: object = "") -> None:
    """Print whether a check passed; the script goes on either way, and a failed check makes it fail at its end."""
    if is_so:
        print(f"  {what}", flush=True)
    else:
        print(f"  FAILED: {what}: {seen!r}", flush=True)
        failed.append(what)


def check_equal(what: str, seen: object, wanted: object) -> None:
    check(what, seen == wanted, f"{seen!r} instead of {wanted!r}")


def check_raises(what: str, kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    """Check for the client's own exception, with these words of the server's message in its text."""
    try:
        seen = call()
    except Exception as error:
        # Exactly this class: a client's exceptions inherit from each other.
        check(f"{what}: {kind.__name__}", type(error) is kind and all(word in str(error) for word in words), error)
    else:
        check(f"{what}: {kind.__name__}", False, seen)


def finish() -> NoReturn:
    """End the script, with status 1 if a check failed."""
    sys.exit(1 if failed else 0)
