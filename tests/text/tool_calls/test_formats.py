"""Every format: calls in a family's published form are parsed back, wherever the text is cut, and no text is lost."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from pagewick.outputs import PartDelta, PartKind
from pagewick.text.part_splitter import PartSplitter
from pagewick.text.tool_calls.formats import BY_NAME
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.reading import MAX_DEPTH
from tests.deep import IS_DEEP
from tests.text.tool_calls.families import (
    CALLS,
    FAMILIES,
    OFFER,
    SHORT_CALLS,
    TOOLS,
    Family,
    NoTokens,
    format_with,
    tool,
)
from tests.text.tool_calls.forms import Call, hermes

BY_FAMILY = {family.name + ("_json" if family.parser == "json" else ""): family for family in FAMILIES}
each_family = pytest.mark.parametrize("name", BY_FAMILY)


class Read:
    """A response that has been split. fed: what the splitter was given; whole: all text that it returned.

    shown: the text of these that is no call's; calls: (name, arguments as JSON).
    """

    def __init__(self, splitter: PartSplitter, pieces: Sequence[str]) -> None:
        self.fed, self.shown, self.whole, self.ids = "".join(pieces), "", "", []
        self.calls: list[tuple[str, str]] = []
        for place in range(len(pieces) + 1):
            for run in splitter.feed(pieces[place]) if place < len(pieces) else splitter.flush():
                if isinstance(run, PartDelta):
                    self._add(run)
                else:
                    self.whole += run[1]
                    self.shown += run[1] if run[0] is PartKind.TEXT else ""

    def _add(self, part: PartDelta) -> None:
        assert part.call is not None
        if part.call.index == len(self.calls):
            self.calls.append((part.call.name, ""))
            self.ids.append(part.call.call_id)
        assert part.call.index == len(self.calls) - 1 and part.call.call_id == self.ids[-1]
        name, arguments = self.calls[-1]
        self.calls[-1] = name, arguments + part.text

    @property
    def parsed(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def read(
    family: Family,
    text: str,
    *cuts: int,
    has_tokens: bool = False,
    offer: ToolOffer = OFFER,
    is_guided: bool = False,
) -> Read:
    form = format_with(family, has_tokens=has_tokens)
    splitting = form.splitting([], offer, is_guided=is_guided)
    assert splitting is not None
    splitter = splitting.splitter()
    if has_tokens:
        words = dict(zip(splitter.marks.values(), form.form.words, strict=True))
        for mark, word in sorted(words.items(), key=lambda pair: -len(pair[1])):
            text = text.replace(word, mark)
    ends = [*cuts, len(text)]
    return Read(splitter, [text[a:b] for a, b in zip([0, *ends], ends, strict=False)])


def calls_of(family: Family) -> list[Call]:
    return CALLS[: family.max_calls]


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    ("name", "before"),
    # Calls without a marker are the whole response.
    [
        (name, before)
        for name, family in BY_FAMILY.items()
        for before in ("", "I look.")
        if not (before and family.is_bare)
    ],
)
def test_calls_are_read_back(name: str, has_tokens: bool, before: str) -> None:
    family = BY_FAMILY[name]
    found = read(family, f"{before}\n\n{family.write(calls_of(family))}\n", has_tokens=has_tokens)
    assert found.parsed == calls_of(family)
    assert found.shown == before
    assert len({*found.ids}) == len(found.ids)


@each_family
@pytest.mark.parametrize("is_guided", [False, True])
def test_a_cut_changes_nothing(name: str, is_guided: bool) -> None:
    family = BY_FAMILY[name]
    calls = SHORT_CALLS[: family.max_calls]
    text = ("" if family.is_bare else "Well <t [TOOL {\n") + family.write(calls)
    whole = read(family, text, is_guided=is_guided)
    assert whole.parsed == calls and whole.whole == text
    for cut in range(len(text) + 1):
        found = read(family, text, cut, is_guided=is_guided)
        assert (found.shown, found.calls, found.whole) == (whole.shown, whole.calls, text), cut
    every = read(family, text, *range(1, len(text)), is_guided=is_guided)
    assert (every.shown, every.calls, every.whole) == (whole.shown, whole.calls, text)


@each_family
def test_a_response_that_breaks_off_loses_no_text(name: str) -> None:
    """Without a grammar, an incomplete call is text; with one, its arguments are those so far."""
    family = BY_FAMILY[name]
    text = family.write(SHORT_CALLS[:1])
    for end in range(len(text)):
        found = read(family, text[:end])
        assert found.whole == text[:end]
        assert found.shown == text[:end] or found.parsed == SHORT_CALLS[:1]
        begun = read(family, text[:end], is_guided=True)
        assert begun.whole == text[:end]
        if begun.calls:
            assert read(family, text, is_guided=True).calls[0][1].startswith(begun.calls[0][1])
        else:
            assert begun.shown == text[:end]


# The most characters that `mutated` adds.
MAX_ADDED = 4 * (9 + 12)


def mutated(text: str, rng: random.Random) -> str:
    """Delete, double, swap or insert some pieces."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.randint(1, 12))
        some = rng.choice('{}[]"\\,:<>|\n \ud810é')
        piece = rng.choice(["", text[a:b] * 2, text[b : b + 9] + text[a:b], some, "<tool"])
        text = text[:a] + piece + text[b:]
    return text


def written_length(family: Family, name: str, arguments: str) -> int:
    """Return the length of a call that is written anew for each argument, since a broken one may repeat a name."""
    pairs = json.loads(arguments, object_pairs_hook=list)
    return sum(len(family.write([(name, one)])) for one in ({}, *({key: value} for key, value in pairs)))


@each_family
def test_broken_calls_are_text(name: str) -> None:
    """Each text that is fed is emitted or belongs to a valid call of an offered tool; nothing raises.

    What belongs to calls is not longer than they are written, and than what the mutations add to them.
    """
    family, rng = BY_FAMILY[name], random.Random(f"{name}{os.getpid() if IS_DEEP else ''}")
    text = "Well: " * (not family.is_bare) + family.write(calls_of(family))
    for _ in range(10_000 if IS_DEEP else 20):
        broken = mutated(text, rng)
        cuts = sorted(rng.randrange(len(broken) + 1) for _ in range(rng.randrange(4)))
        has_tokens = rng.random() < 0.2
        found = read(family, broken, *cuts, has_tokens=has_tokens)
        assert found.whole == found.fed and (has_tokens or found.fed == broken)
        for called, arguments in found.parsed:
            assert called in OFFER.by_name and isinstance(arguments, dict)
        written = sum(written_length(family, *call) for call in found.calls)
        assert len(found.whole.strip()) - len(found.shown) <= bool(found.calls) * (written + MAX_ADDED)
        assert found.calls or found.shown == found.whole
        guided = read(family, broken, *cuts, is_guided=True)
        assert guided.whole == guided.fed == broken and all(name in OFFER.by_name for name, _ in guided.calls)


@each_family
def test_calls_of_other_tools_are_text(name: str) -> None:
    family = BY_FAMILY[name]
    text = family.write([("unknown", {"city": "x"})])
    found = read(family, text)
    assert not found.calls and found.shown == text
    text = family.write(CALLS[1:2])
    assert read(family, text, offer=ToolOffer(TOOLS[:1])).shown == text


@each_family
def test_one_call_where_one_is_allowed(name: str) -> None:
    family = BY_FAMILY[name]
    found = read(family, family.write(calls_of(family)), offer=ToolOffer(TOOLS, is_parallel=False))
    assert found.parsed[:1] == CALLS[:1] and len(found.calls) <= 1


@each_family
def test_deep_arguments_end_in_text(name: str) -> None:
    family = BY_FAMILY[name]
    deep: Any = 1
    for _ in range(MAX_DEPTH + 3):
        deep = [deep]
    found = read(family, family.write([("mix-it_2", {"flag": True, "xs": deep})]))
    assert found.whole and (not found.calls or found.parsed)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}', '{"city": "x"}'),
        ('{"id": [1, {"a": null}], "name": "get_weather", "parameters": {"city":"a\n\tb"}}', '{"city":"a\\n\\tb"}'),
    ],
)
def test_json_as_models_write_it(text: str, arguments: str) -> None:
    found = read(FAMILIES[0], f"<tool_call>{text}</tool_call>")
    assert [one for _, one in found.calls] == [arguments]


def test_half_a_character_in_arguments_stays_an_escape() -> None:
    half, whole = (json.dumps(f'{{"city": "é{escape}"}}') for escape in (r"\ud800", r"\ud83d\ude00"))
    text = f'{{"name": "get_weather", "arguments": {half}}}'
    assert read(FAMILIES[0], f"<tool_call>{text}</tool_call>").calls == [("get_weather", r'{"city": "\u00e9\ud800"}')]
    text = f'{{"name": "get_weather", "arguments": {whole}}}'
    assert read(FAMILIES[0], f"<tool_call>{text}</tool_call>").calls == [("get_weather", '{"city": "é😀"}')]


def test_a_call_whose_arguments_have_a_wrong_name_is_text() -> None:
    for field in ('"argments": {"city": "x"}', '"input": "x"', '"args": [1]'):
        text = f'<tool_call>{{"id": "1", "type": "function", "name": "get_weather", {field}}}</tool_call>'
        found = read(FAMILIES[0], text)
        assert found.shown == text and not found.calls


def test_the_closing_tag_may_be_missing_at_the_end() -> None:
    assert read(FAMILIES[0], hermes(CALLS[1:2]).removesuffix("</tool_call>")).parsed == CALLS[1:2]
    assert read(FAMILIES[0], hermes(CALLS[1:2]).removesuffix("tool_call>")).parsed == CALLS[1:2]


def test_a_valid_call_behind_a_broken_one_is_found() -> None:
    found = read(FAMILIES[0], '<tool_call>\n{"name": <tool_call>{"name": "now", "arguments": {}}</tool_call> done')
    assert found.parsed == [("now", {})] and found.shown == '<tool_call>\n{"name":  done'


@pytest.mark.parametrize("name", ["pythonic", "gemma_3"])
def test_a_name_may_end_as_calls_of_built_in_tools_do(name: str) -> None:
    family, offer = BY_FAMILY[name], ToolOffer([tool("phone.call", {"to": {"type": "string"}}), tool("now", {})])
    for called, found in (("phone.call", "phone.call"), ("now.call", "now"), ("phone.call.call", "phone.call")):
        assert read(family, family.write([(called, {})]), offer=offer).parsed == [(found, {})]
    assert not read(family, family.write([("phone", {})]), offer=offer).calls


def test_all_formats_are_tested() -> None:
    # These mark all parts of a response, and have tests of their own.
    marked = {"openai", "solar_open", "functionary_v32", "muse_glimmer", "kimi_k3"}
    assert {family.parser for family in FAMILIES} | marked == BY_NAME.keys()


def test_text_without_calls_is_passed_on_at_once() -> None:
    splitting = format_with(FAMILIES[0], has_tokens=False).splitting([], OFFER)
    assert splitting is not None
    splitter = splitting.splitter()
    assert splitter.feed("Hello <b") == [(PartKind.TEXT, "Hello <b")] and splitter.kind is PartKind.TEXT
    assert splitter.feed(" <tool") == [] and splitter.kind is None
    assert splitter.feed("x \n") == [(PartKind.TEXT, " "), (PartKind.TEXT, "<toolx")]
    assert splitter.flush() == [(PartKind.TEXT, " \n")]
    bare = format_with(BY_FAMILY["pythonic"], has_tokens=True).splitting([], OFFER)
    assert bare is not None and not NoTokens.added_tokens
    assert bare.splitter().feed("no") == [(PartKind.TEXT, "no")]
