"""Chats with tools: a call over a varied schema, the answer after the tool's response, and no call where none fits."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, NamedTuple

from training.corpus.document import Document
from training.corpus.questions import fact_chat, unrelated_chat
from training.corpus.tasks import random_value, spoken
from training.corpus.wording import invented_word, proper_case, read_toml, word_list

_JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


class ToolUse(NamedTuple):
    """A tool, a request that needs it, the call, the tool's response and the final answer."""

    tool: dict[str, Any]
    request: str
    arguments: dict[str, Any]
    response: str
    answer: str


def _value(kind: str, rng: random.Random) -> str | int:
    """A random value of a kind named in tools.toml."""
    choices: dict[str, list[str]] = read_toml("words.toml")["choices"]
    if kind in ("city", "person") and rng.random() < 0.4:
        # Invented values teach copying from the request instead of recalling a list.
        return invented_word(rng).capitalize()
    if kind == "person" or kind in choices:
        return rng.choice(word_list("names") if kind == "person" else choices[kind])
    if kind in ("number", "small"):
        return rng.randint(1, 60) if kind == "small" else rng.randint(0, rng.choice([20, 100, 1000, 9999]))
    words = [
        rng.choice(word_list("words")) if rng.random() < 0.6 else invented_word(rng) for _ in range(rng.randint(1, 4))
    ]
    return {
        "clock": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
        "symbol": "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVWXYZ") for _ in range(rng.randint(2, 4))),
        "email": f"{words[0]}@{rng.choice(['example.com', 'mail.org', 'example.org'])}",
        "path": rng.choice(["", "/tmp/", "docs/", "./"]) + words[0] + rng.choice([".txt", ".py", ".md", ".csv"]),
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


def _natural(rng: random.Random) -> ToolUse:
    entry = rng.choice(read_toml("tools.toml")["tool"])
    arguments = {key: _value(kind, rng) for key, kind in entry["parameters"].items()}
    result = {key: _value(kind, rng) for key, kind in entry["result"].items()}
    types = {key: _JSON_TYPES[type(value)] for key, value in arguments.items()}
    name = entry["name"]
    if rng.random() < 0.3:
        name = rng.choice([f"{invented_word(rng)}_{name.split('_')[-1]}", invented_word(rng)])
    quote = rng.choice(["", "", '"', "'"])
    kinds = entry["parameters"]
    shown = {key: f"{quote}{x}{quote}" if kinds[key] == "text" else x for key, x in arguments.items()}
    request = rng.choice(entry["requests"]).format(**shown)
    answer = entry["answer"].format(**arguments, **{f"result_{key}": value for key, value in result.items()})
    return ToolUse(_schema(name, entry["description"], types, rng), request, arguments, json.dumps(result), answer)


def _generic(rng: random.Random) -> ToolUse:
    """A tool made up on the spot: its name, parameters and values are all random."""
    verb, noun = (
        rng.choice(word_list("verbs")),
        rng.choice(word_list("nouns")) if rng.random() < 0.7 else invented_word(rng),
    )
    keys = rng.sample(word_list("keys"), rng.choice([1, 1, 2, 2, 3]))
    if rng.random() < 0.2:
        keys[-1] = f"{noun}_{keys[-1]}"
    arguments = {key: random_value(rng) for key in keys}
    types = {key: _JSON_TYPES[type(value)] for key, value in arguments.items()}
    pairs = [f"{key.replace('_', ' ')} {spoken(value)}" for key, value in arguments.items()]
    listed = pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + " and " + pairs[-1]
    frame = rng.choice(["{} with {}", "please {} with {}", "{}: {}", "can you {} with {}?", "i want to {} with {}"])
    request = frame.format(f"{verb} {rng.choice(['a', 'the'])} {noun}", listed)
    result = {rng.choice(["id", "result", "status", "total"]): random_value(rng)}
    answer = f"The {next(iter(result))} is {spoken(next(iter(result.values())))}."
    tool = _schema(f"{verb}_{noun}", f"{verb.capitalize()} {rng.choice(['a', 'the'])} {noun}.", types, rng)
    return ToolUse(tool, request, arguments, json.dumps(result), answer)


def _tool_use(rng: random.Random) -> ToolUse:
    return _natural(rng) if rng.random() < 0.6 else _generic(rng)


def _offered(wanted: ToolUse | None, rng: random.Random) -> tuple[dict[str, Any], ...]:
    """The wanted tool among up to two others, in random order, no name twice."""
    by_name: dict[str, dict[str, Any]] = {} if wanted is None else {wanted.tool["function"]["name"]: wanted.tool}
    seen = set() if wanted is None else {wanted.tool["function"]["description"]}
    for _ in range(rng.choice([0, 0, 1, 1, 2]) + (wanted is None)):
        tool = _tool_use(rng).tool["function"]
        if tool["name"] not in by_name and not _alike(tool["description"], seen):
            by_name[tool["name"]] = {"type": "function", "function": tool}
            seen.add(tool["description"])
    tools = list(by_name.values())
    rng.shuffle(tools)
    return tuple(tools)


def _alike(description: str, others: set[str]) -> bool:
    """Two weather tools side by side would make the right call ambiguous."""
    return any(("weather" in description and "weather" in other) or description[:6] == other[:6] for other in others)


def tool_chat(rng: random.Random) -> Document:
    """A chat in which tools are offered; four of five requests need one."""
    if rng.random() < 0.2:
        plain = fact_chat(rng) if rng.random() < 0.6 else unrelated_chat(rng)
        return replace(plain, kind="tool_unused", tools=_offered(None, rng))
    use = _tool_use(rng)
    request = proper_case(use.request) if rng.random() < 0.5 else use.request
    call = {"type": "function", "function": {"name": use.tool["function"]["name"], "arguments": use.arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": request},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if rng.random() < 0.4:
        messages += [{"role": "tool", "content": use.response}, {"role": "assistant", "content": use.answer}]
    return Document("tool_call", messages, _offered(use, rng))
