"""GrammarWriter: writes the grammar of responses with calls, in llguidance's Lark with embedded JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.text.grammars.json_schema import prepared_schema
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.tool_calls.alternatives import alternatives, choices_of, types_within
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.references import with_root
from pagewick.text.tool_calls.text_patterns import ANY_TEXT, literal, text_pattern, unkept_keyword
from pagewick.text.tool_calls.written import as_text

# JSON as models write it: at most one space after a comma or a colon. Unlimited white space would never have to end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# The name of the grammar of responses without calls, if they have a form of their own.
ANSWER = "answer"


class GrammarWriter:
    """Collects the rules of one grammar. ids: the markers that are tokens, with their ids."""

    def __init__(self, offer: ToolOffer, ids: Mapping[str, int], limits: GrammarLimits) -> None:
        self.offer = offer
        self._limits = limits
        self._ids = ids
        self._rules: list[str] = []
        for tool in offer.tools:
            with _naming(tool):
                limits.check_depth(tool.parameters)

    def word(self, text: str) -> str:
        """Return an expression for a marker, or for any other text."""
        return f"<[{self._ids[text]}]>" if text in self._ids else json.dumps(text, ensure_ascii=False)

    def words(self, *texts: str) -> str:
        return " ".join(map(self.word, texts))

    @property
    def names(self) -> str:
        """A regular expression for the tools' names."""
        return "|".join(literal(tool.name) for tool in self.offer.tools)

    def rule(self, body: str, attribute: str = "") -> str:
        """Add a rule; return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def json(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON that fits a schema. Unless the tool is strict, keywords that cannot be kept are left out.

        Raises InvalidRequestError for a schema beyond the limits, or that cannot be kept exactly.
        """
        with _naming(tool):
            prepared = prepared_schema(schema, self._limits, is_lenient=not tool.is_strict)
        options = {**_SPACING, "lenient": not tool.is_strict}
        return self.rule(f"%json {json.dumps({**prepared, 'x-guidance': options})}")

    def arguments(self, tool: Tool) -> str:
        """Add a rule for the arguments of a tool as JSON."""
        return self.json(tool, tool.schema)

    def value(self, tool: Tool, schema: Any) -> str:
        """Add a rule for one argument as JSON. schema: the argument's, within the tool's."""
        return self.json(tool, with_root(schema if isinstance(schema, Mapping) else {}, tool.parameters))

    def named_arguments(self, tool: Tool) -> list[tuple[str, Any, bool]]:
        """Return the name and schema of each argument, and whether it is required.

        Raises UnsupportedError for a strict tool whose arguments depend on each other.
        """
        if tool.is_strict and len(tool.forms) > 1:
            message = (
                "this model writes arguments one by one, where alternatives of all parameters cannot be kept; "
                f"leave anyOf and oneOf out of the strict tool {tool.name!r}"
            )
            raise UnsupportedError(message, param="tools")
        required = tool.required
        return [(key, schema, key in required) for key, schema in tool.properties.items()]

    def tagged(
        self,
        tool: Tool,
        schema: Any,
        pad: str,
        end: str,
        *,
        quotes: tuple[str, str] | None = None,
        is_beside_marker: bool = False,
    ) -> str:
        """Return an expression for one argument and the marker after it, where strings have no quotes.

        quotes: texts that may be around a string. Without them, it does not begin like the first one.
        is_beside_marker: other values begin with the marker, so that no string but the empty one does.

        Raises UnsupportedError for a strict tool with a keyword that cannot be kept in a text without quotes.
        """
        options = alternatives(schema, tool.parameters)
        texts = [one for one in options if "string" in types_within(one)]
        found: list[str] = []
        if texts and not any("$ref" in one for one in options):
            if any(choices_of(one) is None for one in texts):
                self._check_kept(tool, options)
                pattern, last = text_pattern(options), end if end in self._ids else pad + end
                text = self._text(pattern, last, quotes) if not is_beside_marker else self._text_beside(pattern, end)
                return f"{self.word(pad)} {text}" if pad else text
            choices = dict.fromkeys(as_text(value) for one in options for value in choices_of(one) or ())
            found = [self.word(f"{pad}{choice}{pad}") for choice in choices]
            options = [one for one in options if choices_of(one) is None]
            schema = {"anyOf": options}
        if options or not found:
            around = [self.word(pad)] * bool(pad)
            found.append(" ".join([*around, self.value(tool, schema), *around]))
        return f"({' | '.join(found)}) {self.word(end)}"

    def _text(self, pattern: str, end: str, quotes: tuple[str, str] | None) -> str:
        if quotes is None:
            return self.text_until(end, pattern)
        opening, closing = quotes
        quoted = self.text_until(end, pattern + literal(closing))
        plain = f"([^{literal(opening[0])}](?s:.*))?" if pattern == ANY_TEXT else pattern
        return self.rule(f"{self.word(opening)} {quoted} | {self.text_until(end, plain)}")

    def _text_beside(self, pattern: str, end: str) -> str:
        if end in self._ids:
            return self.text_until(end, pattern)
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: /{pattern}{literal(end)}/ & ~/{literal(end)}(?s:.*)/")
        text = self.rule(name, "[lazy]")
        return self.rule(f"{text} | {self.word(end)}") if pattern == ANY_TEXT else text

    def _check_kept(self, tool: Tool, options: Sequence[Mapping[str, Any]]) -> None:
        if tool.is_strict and (wrong := unkept_keyword(options)) is not None:
            message = (
                f"this model writes arguments without quotes, where {wrong!r} cannot be kept; leave it out of "
                f"the strict tool {tool.name!r}"
            )
            raise UnsupportedError(message, param="tools")

    def sequence(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return an expression for parts in their order. The second of each pair: whether the part is required."""
        between = self.word(separator) if separator else ""
        behind, whole = '""', '""'
        for part, is_required in reversed(parts):
            first = self.rule(f"{part} {behind}")
            whole = first if is_required else self.rule(f"{first} | {whole}")
            behind = self.rule(f"{between} {first}" if is_required else f"{between} {first} | {behind}")
        return whole

    def envelope(self, tool: Tool, *, name: str = "name", arguments: str = "arguments") -> str:
        """Return an expression for a call that is a JSON object."""
        opening = f'{{"{name}": {json.dumps(tool.name)}, "{arguments}": '
        return f'{self.word(opening)} {self.arguments(tool)} "}}"'

    def text_until(self, end: str, pattern: str = ANY_TEXT) -> str:
        """Add a rule for text up to a marker, and the marker."""
        if end in self._ids:
            return self.rule(f"/{pattern}/ {self.word(end)}")
        return self.rule(f"/{pattern}{literal(end)}/", "[lazy]")

    def text_without(self, excluded: Sequence[str]) -> str:
        """Add a terminal for a text, not empty, that none of the regular expressions matches as a whole."""
        self._rules.append("TEXT: /(?s:.+)/" + "".join(f" & ~/{one}/" for one in excluded))
        return "TEXT"

    def call(self, of_tool: Callable[[Tool], str]) -> str:
        """Add a rule for a call of any tool."""
        return self.rule(" | ".join(map(of_tool, self.offer.tools)))

    def calls(self, call: str, separator: str) -> str:
        """Return an expression for as many calls as the response may have. separator: an expression."""
        return f"{call} ({separator} {call})*" if self.offer.is_parallel else call

    def grammar(
        self, calls: str, openers: Sequence[str], start: str = "", *, opened: Mapping[str, str] | None = None
    ) -> str:
        """Return the whole grammar.

        calls: an expression for all calls, without the opener. openers: the first one is written where a call is
        required, and each begins calls in a text. start: a regular expression for texts that begin calls without
        an opener; empty if there are none. opened: the expressions behind openers that need others than `calls`.
        If a response without calls has a form, the grammar refers to it as ANSWER.
        """
        behind = {one: body for one, body in (opened or {}).items() if one in openers}
        calls = self.rule(calls) if len(behind) < max(1, len(openers)) else ""
        bodies = {opener: self.rule(behind[opener]) if opener in behind else calls for opener in openers}
        if self.offer.has_form:
            ways = [calls] * bool(start) + [f"{self.word(opener)} {body}" for opener, body in bodies.items()]
            return self.lark(" | ".join([*ways, f"@{ANSWER}"]))
        if self.offer.is_required:
            return self.lark(calls if start else f"{self.word(openers[0])} {bodies[openers[0]]}")
        others = [opener for opener in openers if opener not in self._ids]
        excluded = [f"(?s:.*){literal(opener)}(?s:.*)" for opener in others] + [start] * bool(start)
        text = self.text_without(excluded)
        ways = [f"{text}?"] + [calls] * bool(start)
        ways += [f"{text}? {self.word(opener)} {bodies[opener]}" for opener in openers if opener in self._ids]
        # Beside texts that begin calls themselves, a text up to a marker of letters would be matched too far.
        for body in dict.fromkeys(bodies[opener] for opener in others if not start):
            ends = "|".join(literal(opener) for opener in others if bodies[opener] == body)
            ways.append(f"{self.rule(f'/(?s:.*)({ends})/', '[lazy]')} {body}")
        return self.lark(" | ".join(ways))

    def lark(self, start: str) -> str:
        """Return the whole grammar. start: the expression for a response."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


@contextmanager
def _naming(tool: Tool) -> Generator[None]:
    """Name the tool in errors about its schema."""
    try:
        yield
    except InvalidRequestError as error:
        reason = str(error).removeprefix("structured_outputs cannot be honoured: ")
        raise InvalidRequestError(f"tool {tool.name!r} cannot be honoured: {reason}", param="tools") from None
