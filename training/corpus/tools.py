"""Chats with tools: a call over a varied schema, the answer after the tool's response, and no call where none fits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from training.corpus.document import Document, chat
from training.corpus.questions import UNKNOWN_ANSWER, fact_chat, unrelated_chat
from training.corpus.tasks import random_value, random_word, spoken
from training.corpus.wording import invented_word, read_toml, word_list

_JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NUMBERS = ("number", "small")
_TWO_CALLS = 0.12
_PAIRS = ("{} {}", "{} {}", "{} {}", "{} = {}", "{}: {}", "{} is {}", "the {} {}")
_GENERIC_REQUESTS = (
    "{} with {}", "please {} with {}", "{}: {}", "can you {} with {}?", "i want to {} with {}", "{}, {}",
    "could you {}? {}", "{} where {}", "i need you to {}: {}", "help me {} with {}",
)  # fmt: skip


class Use(NamedTuple):
    """A request that needs a tool, the call's arguments, the tool's response and the final answer."""

    request: str
    arguments: dict[str, Any]
    response: str
    answer: str


class Tool(NamedTuple):
    """A tool in the API's shape, what it is about, and how requests for it are drawn."""

    described: dict[str, Any]
    topic: str
    draw: Callable[[random.Random], Use]

    @property
    def name(self) -> str:
        name: str = self.described["function"]["name"]
        return name


def _value(kind: str, rng: random.Random) -> str | int:
    """A random value of a kind named in tools.toml."""
    choices: dict[str, list[str]] = read_toml("words.toml")["choices"]
    if kind in ("city", "person") and rng.random() < 0.4:
        # Invented values teach copying from the request instead of recalling a list.
        word = invented_word(rng).capitalize()
        return word if rng.random() < 0.8 else rng.choice(["San ", "New ", "Port ", "El ", "Saint "]) + word
    if kind == "person" or kind in choices:
        return rng.choice(word_list("names") if kind == "person" else choices[kind])
    if kind in _NUMBERS:
        return rng.randint(1, 60) if kind == "small" else rng.randint(0, rng.choice([20, 100, 1000, 9999]))
    words = [random_word(rng) for _ in range(rng.randint(1, 4))]
    return {
        "clock": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
        "symbol": "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVWXYZ") for _ in range(rng.randint(2, 4))),
        "email": f"{invented_word(rng)}@{rng.choice(['example.com', 'mail.org', 'example.org'])}",
        "path": rng.choice(["", "/tmp/", "docs/", "./"])
        + random_word(rng)
        + rng.choice([".txt", ".py", ".md", ".csv"]),
        "folder": f"{rng.choice(['/', './', '/home/'])}{words[0]}",
        "text": " ".join(words),
    }[kind]


def _schema(name: str, description: str, types: dict[str, str], rng: random.Random) -> dict[str, Any]:
    properties: dict[str, dict[str, str]] = {key: {"type": kind} for key, kind in types.items()}
    if rng.random() < 0.3:
        for key, entry in properties.items():
            entry["description"] = f"The {key.replace('_', ' ')}."
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _natural(rng: random.Random) -> Tool:
    entry = rng.choice(read_toml("tools.toml")["tool"])
    kinds: dict[str, str] = entry["parameters"]
    types = {key: "integer" if kind in _NUMBERS else "string" for key, kind in kinds.items()}
    name = entry["name"]
    if rng.random() < 0.3:
        name = rng.choice([f"{invented_word(rng)}_{name.split('_')[-1]}", invented_word(rng)])

    def draw(rng: random.Random) -> Use:
        arguments = {key: _value(kind, rng) for key, kind in kinds.items()}
        result = {key: _value(kind, rng) for key, kind in entry["result"].items()}
        quote = rng.choice(["", "", '"', "'"])
        shown = {key: f"{quote}{x}{quote}" if kinds[key] == "text" else x for key, x in arguments.items()}
        request = rng.choice(entry["requests"]).format(**shown)
        answer = entry["answer"].format(**arguments, **{f"result_{key}": value for key, value in result.items()})
        return Use(request, arguments, json.dumps(result), answer)

    topic = "weather" if "weather" in entry["name"] else entry["name"]
    return Tool(_schema(name, entry["description"], types, rng), topic, draw)


def _generic(rng: random.Random) -> Tool:
    """A tool made up on the spot: its name, parameters and values are all random."""
    verb, noun = (
        rng.choice(word_list("verbs")),
        rng.choice(word_list("nouns")) if rng.random() < 0.7 else invented_word(rng),
    )
    keys = rng.sample(word_list("keys"), rng.choice([1, 1, 2, 2, 3]))
    if rng.random() < 0.2:
        keys[-1] = f"{noun}_{keys[-1]}"
    kinds = {key: type(random_value(rng)) for key in keys}
    article = rng.choice(["a", "the"])

    def draw(rng: random.Random) -> Use:
        arguments = {key: _value_of(kind, rng) for key, kind in kinds.items()}
        style: str = rng.choice(_PAIRS)
        pairs = [style.format(key.replace("_", " "), spoken(value)) for key, value in arguments.items()]
        listed = pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + " and " + pairs[-1]
        request = rng.choice(_GENERIC_REQUESTS).format(f"{verb} {rng.choice(['a', 'the'])} {noun}", listed)
        result = {rng.choice(["id", "result", "status", "total"]): random_value(rng)}
        answer = f"The {next(iter(result))} is {spoken(next(iter(result.values())))}."
        return Use(request, arguments, json.dumps(result), answer)

    types = {key: _JSON_TYPES[kind] for key, kind in kinds.items()}
    description = f"{verb.capitalize()} {article} {noun}."
    return Tool(_schema(f"{verb}_{noun}", description, types, rng), f"{verb}_{noun}", draw)


def _value_of(kind: type, rng: random.Random) -> str | int | float | bool:
    while type(value := random_value(rng)) is not kind:
        pass
    return value


def _offered(rng: random.Random) -> list[Tool]:
    """One to three tools, no two for the same task and no name twice."""
    tools: list[Tool] = []
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        tool = _natural(rng) if rng.random() < 0.6 else _generic(rng)
        if all(tool.topic != other.topic and tool.name != other.name for other in tools):
            tools.append(tool)
    return tools


def _called(tools: list[Tool], rng: random.Random) -> list[dict[str, Any]]:
    """The messages of one request: the call or two calls, the responses of the tools, the answer."""
    chosen = [rng.choice(tools) for _ in range(2 if rng.random() < _TWO_CALLS else 1)]
    uses = [tool.draw(rng) for tool in chosen]
    request = rng.choice([" and ", ", and ", " and also ", "; "]).join(use.request.rstrip("?.") for use in uses)
    if uses[-1].request.endswith("?"):
        request += "?"
    if rng.random() < 0.5:
        request = request[0].upper() + request[1:]
    calls = [
        {"type": "function", "function": {"name": tool.name, "arguments": use.arguments}}
        for tool, use in zip(chosen, uses, strict=True)
    ]
    return [
        {"role": "user", "content": request},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": use.response} for use in uses),
        {"role": "assistant", "content": " ".join(use.answer for use in uses)},
    ]


def _declined(tools: list[Tool], rng: random.Random) -> Document | None:
    """A request for a tool that is not among those offered."""
    tool = _natural(rng)
    if any(tool.topic == other.topic for other in tools):
        return None
    return chat("tool_unused", tool.draw(rng).request, UNKNOWN_ANSWER)


def tool_chat(rng: random.Random) -> Document:
    """A chat in which tools are offered. Four of five have requests that need one, up to four in a row: every call is
    learnt, and the tools are read only once."""
    tools = _offered(rng)
    described = tuple(tool.described for tool in tools)
    if rng.random() < 0.2:
        draw = rng.random()
        plain = _declined(tools, rng) if draw < 0.3 else None
        plain = plain or (fact_chat(rng) if draw < 0.75 else unrelated_chat(rng))
        return replace(plain, kind="tool_unused", tools=described)
    messages: list[dict[str, Any]] = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        messages += _called(tools, rng)
    if rng.random() < 0.6:
        last_call = max(index for index, message in enumerate(messages) if message.get("tool_calls"))
        messages = messages[: last_call + 1]
    return Document("tool_call", messages, described)
