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

WEATHER = "what is the weather in Rome?"
# Questions that the built-in model answers with a call of `add`, and its arguments.
SUMS = {
    "what is 2 plus 3?": {"a": 2, "b": 3},
    "sum of 7 and 8": {"a": 7, "b": 8},
    "how much is 2 plus 3?": {"a": 2, "b": 3},
    "add 12 and 30": {"a": 12, "b": 30},
    "12 + 30": {"a": 12, "b": 30},
    "calculate 4 + 5": {"a": 4, "b": 5},
}
# More tokens than a call has. The response cannot end before, so that it has two calls.
TWO_CALLS = {"min_tokens": 30}

# The tools that a client has run, with their arguments.
ran: list[tuple[str, dict[str, Any]]] = []


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather of a city."""
    ran.append(("get_weather", {"city": city}))
    return {"condition": "sunny", "temperature": 21}


def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    ran.append(("add", {"a": a, "b": b}))
    return {"sum": a + b}


def _tool(function: Callable[..., Any], **kinds: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": [*kinds], "additionalProperties": False}
    described = {"name": function.__name__, "description": function.__doc__, "parameters": schema}
    return {"type": "function", "function": described}


TOOLS = [_tool(get_weather, city="string"), _tool(add, a="integer", b="integer")]


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


def check_one_tool(what: str, converse: Callable[[str], str]) -> None:
    """Check that a client runs the tool that the model calls, and returns the model's last response.

    converse: answers a question with the client's help, and returns the last text.
    """
    ran.clear()
    text = converse(WEATHER)
    check_equal(f"{what}: the call", ran, [("get_weather", {"city": "Rome"})])
    check(f"{what}: the response has the result", "21" in text, text)


def check_two_tools(what: str, converse: Callable[[str], str]) -> None:
    """Check that a client runs both tools of one response with TWO_CALLS, and returns the model's last response.

    Only some questions make the built-in model call both.
    """
    for question in SUMS:
        ran.clear()
        text = converse(question)
        if {name for name, _ in ran} == {"add", "get_weather"}:
            break
    check(f"{what}: both calls", len(ran) == 2 and ("add", SUMS[question]) in ran, ran)
    check(f"{what}: the last response", isinstance(text, str) and len(text) > 5, text)


def finish() -> NoReturn:
    """End the script, with status 1 if a check failed."""
    sys.exit(1 if failed else 0)
