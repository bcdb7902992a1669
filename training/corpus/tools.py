"""Chats with tools: a call over a varied schema, the answer after the tool's response, and no call where none fits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from training.corpus.document import Document, chat
from training.corpus.questions import UNKNOWN_ANSWER, fact_chat, small_talk, unknown_chat, unrelated_chat
from training.corpus.tasks import random_value, spoken
from training.corpus.values import NUMBERS, draw_argument, draw_value, written
from training.corpus.wording import disturb_lightly, expand, invented_word, read_toml, word_list

_JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PAGE_TOOLS = 0.45
_TWO_CALLS = 0.12
_WITHOUT_CALL = 0.2
_PLACEHOLDER = re.compile(r"<(\w+)>")
_PAIRS = ("{} {}", "{} {}", "{} {}", "{} = {}", "{}: {}", "{} is {}", "the {} {}")
_GENERIC_REQUESTS = (
    "{} with {}", "please {} with {}", "{}: {}", "can you {} with {}?", "i want to {} with {}", "{}, {}",
    "could you {}? {}", "{} where {}", "i need you to {}: {}", "help me {} with {}",
)  # fmt: skip


class Use(NamedTuple):
    """A request that needs a tool, the call's arguments, the tool's response and the final answer. The request has
    placeholders such as <city>, and `shown` tells what stands there; `is_open` if a text of any words ends it."""

    request: str
    shown: dict[str, str]
    arguments: dict[str, Any]
    response: str
    answer: str
    is_open: bool


class Tool(NamedTuple):
    """A tool in the API's shape, what it is about, how requests for it are drawn, and a pattern of the questions in
    other files that it would serve."""

    described: dict[str, Any]
    topic: str
    draw: Callable[[random.Random], Use]
    serves: str = ""

    @property
    def name(self) -> str:
        name: str = self.described["function"]["name"]
        return name


def _schema(name: str, description: str, types: dict[str, str], rng: random.Random) -> dict[str, Any]:
    properties: dict[str, dict[str, str]] = {key: {"type": kind} for key, kind in types.items()}
    if rng.random() < 0.3:
        for key, entry in properties.items():
            entry["description"] = f"The {key.replace('_', ' ')}."
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = read_toml("tools.toml")["tool"]
    return entries


def _filled(pattern: str, shown: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: shown[match.group(1)], pattern)


def _use(entry: dict[str, Any], types: dict[str, str], rng: random.Random) -> Use:
    """A random request for a tool of tools.toml."""
    kinds: dict[str, str] = entry["parameters"]
    arguments = {key: draw_argument(kind, types[key], rng) for key, kind in kinds.items()}
    quote = rng.choice(["", "", '"', "'"])
    shown = {key: written(value, kinds[key], quote, rng) for key, value in arguments.items()}
    request = expand(rng.choice(entry["requests"]), {}, rng)
    if "<elsewhere>" in request:
        shown["elsewhere"] = _elsewhere(arguments, rng)
    result = {key: draw_value(kind, rng) for key, kind in entry["result"].items()}
    response = json.dumps(result, ensure_ascii=False)
    if "plain" in entry and rng.random() < 0.35:
        response = _filled(rng.choice(entry["plain"]), {key: str(value) for key, value in result.items()})
    answer = entry["answer"].format(**arguments, **{f"result_{key}": value for key, value in result.items()})
    last = _PLACEHOLDER.search(request.rstrip("?.!").rpartition(" ")[2])
    is_open = last is not None and kinds.get(last.group(1)) == "text"
    return Use(request, shown, arguments, response, answer, is_open)


def _elsewhere(arguments: dict[str, Any], rng: random.Random) -> str:
    """Another city in the same request, which is not the argument."""
    while (city := str(draw_argument("city", "string", rng))) in arguments.values():
        pass
    return city


def _json_type(kind: str, number_type: str) -> str:
    if kind == "amount":
        return number_type
    return "integer" if kind in NUMBERS else "string"


def _natural(rng: random.Random, entry: dict[str, Any] | None = None) -> Tool:
    """A tool of tools.toml, a random one if none is given; some get another name."""
    entry = entry or rng.choice(_entries())
    number_type = "number" if rng.random() < 0.3 else "integer"
    types = {key: _json_type(kind, number_type) for key, kind in entry["parameters"].items()}
    name = entry["name"]
    if rng.random() < 0.3:
        name = rng.choice([f"{invented_word(rng)}_{name.split('_')[-1]}", invented_word(rng)])
    described = _schema(name, entry["description"], types, rng)
    return Tool(described, _topic(entry), lambda rng: _use(entry, types, rng), entry.get("serves", ""))


def _topic(entry: dict[str, Any]) -> str:
    return "weather" if "weather" in entry["name"] else str(entry["name"])


def page_schemas() -> list[dict[str, Any]]:
    """The functions that the chat page offers as its example."""
    schemas: list[dict[str, Any]] = read_toml("tools.toml")["page"]
    return schemas


def _page_tool(schema: dict[str, Any]) -> Tool:
    """A tool of the chat page's example, exactly as the page describes it."""
    entry = next(entry for entry in _entries() if entry["name"] == schema["name"])
    types = {key: value["type"] for key, value in schema["parameters"]["properties"].items()}
    described = {"type": "function", "function": schema}
    return Tool(described, _topic(entry), lambda rng: _use(entry, types, rng), entry["serves"])


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
        shown = {key: spoken(value) for key, value in arguments.items()}
        style: str = rng.choice(_PAIRS)
        pairs = [style.format(key.replace("_", " "), f"<{key}>") for key in arguments]
        listed = pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + " and " + pairs[-1]
        request = rng.choice(_GENERIC_REQUESTS).format(f"{verb} {rng.choice(['a', 'the'])} {noun}", listed)
        result = {rng.choice(["id", "result", "status", "total"]): random_value(rng)}
        answer = f"The {next(iter(result))} is {spoken(next(iter(result.values())))}."
        return Use(request, shown, arguments, json.dumps(result), answer, is_open=True)

    types = {key: _JSON_TYPES[kind] for key, kind in kinds.items()}
    description = f"{verb.capitalize()} {article} {noun}."
    return Tool(_schema(f"{verb}_{noun}", description, types, rng), f"{verb}_{noun}", draw)


def _value_of(kind: type, rng: random.Random) -> str | int | float | bool:
    while type(value := random_value(rng)) is not kind:
        pass
    return value


def _offered(rng: random.Random) -> list[Tool]:
    """The three tools of the chat page, or one to four others, no two for the same task and no name twice."""
    if rng.random() < _PAGE_TOOLS:
        of_page = [_page_tool(schema) for schema in page_schemas()]
        return of_page if rng.random() < 0.5 else rng.sample(of_page, len(of_page))
    tools: list[Tool] = []
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        tool = _natural(rng) if rng.random() < 0.6 else _generic(rng)
        if all(tool.topic != other.topic and tool.name != other.name for other in tools):
            tools.append(tool)
    return tools


def _request(uses: list[Use], rng: random.Random) -> str:
    """One text that asks for all uses, as somebody may type it. Its values stay as they are."""
    patterns = [_PLACEHOLDER.sub(rf"<{i}_\1>", use.request.rstrip("?.")) for i, use in enumerate(uses)]
    pattern = rng.choice([" and ", ", and ", " and also ", "; "]).join(patterns)
    if uses[-1].request.endswith("?"):
        pattern += "?"
    shown = {f"{i}_{key}": text for i, use in enumerate(uses) for key, text in use.shown.items()}
    return _filled(disturb_lightly(pattern, rng, has_tail=not uses[-1].is_open), shown)


def _called(tools: list[Tool], rng: random.Random) -> list[dict[str, Any]]:
    """The messages of one request: the call or two calls, the responses of the tools, the answer."""
    chosen = [rng.choice(tools) for _ in range(2 if rng.random() < _TWO_CALLS else 1)]
    uses = [tool.draw(rng) for tool in chosen]
    calls = [
        {"type": "function", "function": {"name": tool.name, "arguments": use.arguments}}
        for tool, use in zip(chosen, uses, strict=True)
    ]
    return [
        {"role": "user", "content": _request(uses, rng)},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": use.response} for use in uses),
        {"role": "assistant", "content": " ".join(use.answer for use in uses)},
    ]


def _declined(tools: list[Tool], rng: random.Random) -> Document | None:
    """A request for a tool that is not among those offered; often for one of the page's, which other chats have."""
    of_page = [schema["name"] for schema in page_schemas()]
    entries = [entry for entry in _entries() if rng.random() < 0.7 or entry["name"] in of_page]
    tool = _natural(rng, rng.choice(entries))
    if any(tool.topic == other.topic for other in tools):
        return None
    return chat("tool_unused", _request([tool.draw(rng)], rng), UNKNOWN_ANSWER)


def _without_call(tools: list[Tool], rng: random.Random) -> list[dict[str, Any]]:
    """A question that no offered tool serves, and its answer."""
    kind = rng.choices(["declined", "fact", "unrelated", "unknown", "small talk"], [30, 35, 15, 10, 10])[0]
    if kind == "fact":
        return fact_chat(rng).messages
    if kind == "small talk":
        return small_talk(rng).messages
    while True:
        if kind == "declined" and (document := _declined(tools, rng)) is not None:
            return document.messages
        document = unknown_chat(rng) if kind == "unknown" else unrelated_chat(rng)
        question = document.messages[0]["content"].lower()
        if not any(tool.serves and re.search(tool.serves, question) for tool in tools):
            return document.messages


def tool_chat(rng: random.Random) -> Document:
    """A chat in which tools are offered. Four of five requests need one, and up to four follow each other: every call
    is learnt, and the tools are read only once."""
    tools = _offered(rng)
    described = tuple(tool.described for tool in tools)
    messages: list[dict[str, Any]] = []
    others = tools
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        if rng.random() < _WITHOUT_CALL:
            messages += _without_call(tools, rng)
            continue
        messages += _called(others, rng)
        last_call = max(index for index, message in enumerate(messages) if message.get("tool_calls"))
        last_name = messages[last_call]["tool_calls"][-1]["function"]["name"]
        # Mostly another tool than before, so that the request decides and not the previous call.
        others = [tool for tool in tools if tool.name != last_name or rng.random() < 0.5] or tools
    calls = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    ends_with_call = bool(calls) and all(message["role"] != "user" for message in messages[calls[-1] :])
    if ends_with_call and rng.random() < 0.6:
        messages = messages[: calls[-1] + 1]
    return Document("tool_call" if calls else "tool_unused", messages, described)
