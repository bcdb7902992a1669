"""Kimi K3: sections for thoughts, text and calls, between tags whose brackets are tokens.

    I add.<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>response<|sep|>

The prompt ends with the tag that opens the first section.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.errors import UnsupportedError
from pagewick.outputs import PartKind
from pagewick.text.part_splitter import ChainedSplitter, PartSplitter, Run
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.alternatives import alternatives, choices_of, strings_and_others, type_of, types_within
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.plain_values import json_of
from pagewick.text.tool_calls.reading import END, NoCall, Reader, Reading, as_object, escaped
from pagewick.text.tool_calls.schema_types import types_of
from pagewick.text.tool_calls.splitter import CallFormat, CallSplitter, marks_of
from pagewick.text.tool_calls.written import WrittenCall, as_text

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_WORDS = (_OPEN, _CLOSE, _SEP, _END)
_KINDS = {"think": PartKind.REASONING, "response": PartKind.TEXT}
_TOOLS = "tools"
# A longer text between brackets is no tag. It would be searched again and again.
_MAX_TAG = 200
_MAX_HEAD = 1200
_CALL_HEAD = re.compile(r'call tool="([^"]*)"(?: index="\d+")?')
_KEY_HEAD = re.compile(r'argument key="([^"]*)" type="(\w+)"')
_JSON_HEAD = 'json type="object"'
_STRINGS = frozenset({"string"})


class SectionSplitter:
    """A PartSplitter for sections. It leaves out tags; calls, with all tags of theirs, are text here.

    begun: the end of the prompt.
    """

    is_over = False

    def __init__(self, ids: Mapping[str, int], begun: str) -> None:
        marks = marks_of(_WORDS, ids)
        self.marks = {ids[word]: mark for word, mark in marks.items()}
        self._begins = [marks.get(word, word) for word in (_OPEN, _CLOSE, _END)]
        self._sep = marks.get(_SEP, _SEP)
        opening, closing, end, sep = map(re.escape, (*self._begins, self._sep))
        inner = rf"(?:(?!{opening}|{closing}|{sep}).){{0,{_MAX_TAG}}}"
        self._tag = re.compile(rf"({opening}|{closing})({inner}){sep}|{end}", re.DOTALL)
        self._tools_end = f"{self._begins[1]}{_TOOLS}{self._sep}"
        self._held = ""  # what may become a tag
        self._is_in_tools = False
        found = next((kind for name, kind in _KINDS.items() if begun.endswith(f"{_OPEN}{name}{_SEP}")), None)
        self._kind = found or PartKind.TEXT

    @property
    def kind(self) -> PartKind | None:
        return None if self._held else self._kind

    def feed(self, marked: str) -> Sequence[Run]:
        runs: list[Run] = []
        self._held += marked
        while self._read_calls(runs) if self._is_in_tools else self._read_tag(runs):
            pass
        return [run for run in runs if run[1]]  # type: ignore[index]

    def flush(self) -> Sequence[Run]:
        held, self._held = self._held, ""
        return [(self._kind, held)] if held else []

    def _read_calls(self, runs: list[Run]) -> bool:
        place = self._held.find(self._tools_end)
        if place >= 0:
            place += len(self._tools_end)
        size = place if place >= 0 else len(self._held) - partial_match_len(self._held, [self._tools_end])
        runs.append((PartKind.TEXT, self._held[:size]))
        self._held = self._held[size:]
        self._is_in_tools = place < 0
        return not self._is_in_tools

    def _read_tag(self, runs: list[Run]) -> bool:
        tag = self._tag.search(self._held)
        if tag is None:
            begun = max(self._held.rfind(one) for one in self._begins[:2])
            may_be_tag = begun >= 0 and len(self._held) - begun <= len(_CLOSE) + _MAX_TAG + len(_SEP)
            size = begun if may_be_tag else len(self._held) - partial_match_len(self._held, self._begins)
            runs.append((self._kind, self._held[:size]))
            self._held = self._held[size:]
            return False
        runs.append((self._kind, self._held[: tag.start()]))
        self._held = self._held[tag.end() :]
        name, is_opening = (tag[2] or "").partition(" ")[0], tag[1] == self._begins[0]
        is_known = tag[1] is None or name in (*_KINDS, "message")
        self._is_in_tools = is_opening and tag[2] == _TOOLS
        runs.append((PartKind.DROPPED if is_known else self._kind, tag[0]))
        if is_known or self._is_in_tools:
            self._kind = _KINDS.get(name, PartKind.TEXT) if is_opening else PartKind.TEXT
        return True


def _splitter(offer: ToolOffer | None, ids: Mapping[str, int], streams: bool, begun: str) -> PartSplitter:
    sections = SectionSplitter(ids, begun)
    if offer is None:
        return sections
    return ChainedSplitter(sections, CallSplitter(KIMI_K3, offer, ids, streams=streams))


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from reader.word(_TOOLS)
    yield from reader.word(_SEP)
    while (yield from reader.blanks()) != END:
        if (yield from reader.one_of((_OPEN, _CLOSE))) == _CLOSE:
            yield from reader.word(_TOOLS, may_end=True)
            yield from reader.word(_SEP, may_end=True)
            return
        name = yield from _attribute(reader, _CALL_HEAD)
        reader.calls.begin(name)
        yield from _read_arguments(reader, offer.by_name[name])
        reader.calls.commit()


def _attribute(reader: Reader, head: re.Pattern[str]) -> Reading[str]:
    found = head.fullmatch((yield from reader.until((_SEP,), limit=_MAX_HEAD)))
    if found is None:
        raise NoCall
    return _unescaped(found[1])


def _read_arguments(reader: Reader, tool: Tool) -> Reading[None]:
    write, separator, is_whole = reader.calls.write, "{", False
    while True:
        yield from reader.blanks()
        if (yield from reader.one_of((_OPEN, _CLOSE))) == _CLOSE:
            yield from reader.word("call")
            yield from reader.word(_SEP)
            write("" if is_whole else "{}" if separator == "{" else "}")
            return
        head = yield from reader.until((_SEP,), limit=_MAX_HEAD)
        key = _KEY_HEAD.fullmatch(head)
        if head == _JSON_HEAD and separator == "{" and not is_whole:
            write(as_object((yield from reader.until((_last(reader, "json"),)))))
            is_whole = True
        elif key is not None and not is_whole:
            write(f'{separator}"{escaped(_unescaped(key[1]))}": ')
            yield from _read_value(reader, tool, _unescaped(key[1]), is_string=key[2] == "string")
            separator = ", "
        else:
            raise NoCall


def _read_value(reader: Reader, tool: Tool, key: str, *, is_string: bool) -> Reading[None]:
    write, last = reader.calls.write, _last(reader, "argument")
    types = types_of(tool.properties.get(key), tool.parameters)
    types = (types & _STRINGS if is_string else types - _STRINGS) or types
    if types != _STRINGS:
        write(json_of((yield from reader.until((last,))), types))
        return
    write('"')
    yield from reader.until((last,), lambda text: write(escaped(text)))
    write('"')


def _last(reader: Reader, name: str) -> str:
    return f"{reader.spell(_CLOSE)}{name}{reader.spell(_SEP)}"


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _attribute_text(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _label(value: Any) -> str:
    kind = type_of(value)
    return "number" if kind == "integer" else kind


def _written(calls: Sequence[WrittenCall]) -> str:
    bodies = []
    for place, call in enumerate(calls, 1):
        arguments = "".join(
            f'{_OPEN}argument key="{_attribute_text(key)}" type="{_label(value)}"{_SEP}{as_text(value)}'
            f"{_CLOSE}argument{_SEP}"
            for key, value in call.pairs.items()
        )
        head = f'{_OPEN}call tool="{_attribute_text(call.name)}" index="{place}"{_SEP}'
        bodies.append(f"{head}{arguments}{_CLOSE}call{_SEP}")
    return f"{_OPEN}{_TOOLS}{_SEP}{''.join(bodies)}{_CLOSE}{_TOOLS}{_SEP}"


def _grammar(writer: GrammarWriter) -> str:
    if writer.offer.has_form:
        message = (
            "this model's response begins within its thoughts or its text, and a grammar is not told where; leave out "
            "the response format"
        )
        raise UnsupportedError(message, param="response_format")
    text = "/(?s:.*)/"
    thoughts = writer.rule(f"{text} {writer.words(_CLOSE, 'think', _SEP, _OPEN, 'response', _SEP)}")
    end, message_end = writer.words(_CLOSE, "response", _SEP), writer.words(_CLOSE, "message", _SEP)
    calls = writer.calls(writer.call(lambda tool: _call_grammar(writer, tool)), "")
    tools = writer.rule(f"{writer.words(_OPEN, _TOOLS, _SEP)} {calls} {writer.words(_CLOSE, _TOOLS, _SEP)}")
    if writer.offer.is_required:
        return writer.lark(f"{thoughts}? {end} {tools} ({message_end})?")
    return writer.lark(f"{thoughts}? {text} ({end} {tools}? ({message_end})?)?")


def _call_grammar(writer: GrammarWriter, tool: Tool) -> str:
    pairs = [
        (_argument_grammar(writer, tool, key, schema), is_required)
        for key, schema, is_required in writer.named_arguments(tool)
    ]
    head = f'{writer.words(_OPEN, _head("call tool", tool.name) + " index=")} /"[1-9][0-9]{{0,3}}"/ {writer.word(_SEP)}'
    return f"{head} {writer.sequence(pairs, '')} {writer.words(_CLOSE, 'call', _SEP)}"


def _argument_grammar(writer: GrammarWriter, tool: Tool, key: str, schema: Any) -> str:
    strings, others = strings_and_others(schema, tool.parameters)
    last = writer.words("argument", _SEP)

    def opening(label: str) -> str:
        return writer.words(_OPEN, f'{_head("argument key", key)} type="{label}"', _SEP)

    ways = [f"{opening('string')} {writer.tagged(tool, strings, '', _CLOSE)} {last}"] if strings else []
    for one in alternatives(others, tool.parameters) if others or not ways else []:
        for kind in sorted(types_within(one) - _STRINGS):
            value = writer.value(tool, _only(one, kind))
            ways.append(f"{opening('number' if kind == 'integer' else kind)} {value} {writer.word(_CLOSE)} {last}")
    return writer.rule(" | ".join(ways))


def _only(option: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    choices = choices_of(option)
    if choices is None:
        return {**option, "type": kind}
    return {"enum": [one for one in choices if type_of(one) == kind]}


def _head(name: str, value: str) -> str:
    return f'{name}="{_attribute_text(value)}"'


KIMI_K3 = CallFormat(
    "kimi_k3",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=_WORDS,
    openers=(_OPEN,),
    own_splitter=_splitter,
)
