"""Translates structural tags to Lark. They describe a response in parts, in one of the two forms that vLLM takes.

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}
    {"format": {"type": "triggered_tags", "triggers": ["<f"],
                "tags": [{"begin": "<f>", "content": {...}, "end": "</f>"}]}}

The text between triggered tags is free, but has no trigger in it: a trigger begins a tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagewick.text.grammars.limits import cannot

# All fields that the description may have, one of `structures`, and a format or tag, by its type. Those of a
# response_format that describe it are among them.
_TOP = frozenset({"type", "format", "structures", "triggers", "name", "description", "strict"})
_STRUCTURE = frozenset({"begin", "schema", "end"})
_FIELDS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset({"type", "value"}),
    "json_schema": frozenset({"type", "json_schema"}),
    "regex": frozenset({"type", "pattern"}),
    "any_text": frozenset({"type"}),
    "sequence": frozenset({"type", "elements"}),
    "or": frozenset({"type", "elements"}),
    "tag": frozenset({"type", "begin", "content", "end"}),
    "triggered_tags": frozenset({"type", "triggers", "tags", "at_least_one", "stop_after_first"}),
}
_JsonRule = Callable[[Any], str]
_RegexRule = Callable[[str], str]


def lark_of_tags(given: Mapping[str, Any], json_rule: _JsonRule, regex_rule: _RegexRule) -> str:
    """Return the Lark of a structural tag. json_rule, regex_rule: make the right side of a rule.

    Raises InvalidRequestError for a description that has another form, or a field that is unknown and not empty.
    """
    _check_fields(given, _TOP, "")
    maker = _Maker(json_rule, regex_rule)
    kind, form = given.get("type", "structural_tag"), given.get("format")
    if kind != "structural_tag":
        raise cannot(f"structural_tag has the type {str(kind)[:32]!r}; it must be 'structural_tag'")
    if form is None:
        structures = _entries(given, "structures")
        for one in structures:
            _check_fields(one, _STRUCTURE, " in structures")
        tags = [
            {**_ends_of(one), "content": {"type": "json_schema", "json_schema": one.get("schema", {})}}
            for one in structures
        ]
        form = {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}
    return "\n".join([f"start: {maker.make(form)}", *maker.rules])


class _Maker:
    """Makes rules; `rules` has those that others refer to."""

    def __init__(self, json_rule: _JsonRule, regex_rule: _RegexRule) -> None:
        self.rules: list[str] = []
        self._json_rule = json_rule
        self._regex_rule = regex_rule
        self._num_names = 0

    def make(self, form: Any) -> str:
        """Return the right side of a rule for a format."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if isinstance(kind, str) and kind in _FIELDS:
            _check_fields(form, _FIELDS[kind], f" in a format of type {kind}")
        match kind:
            case "const_string":
                return _literal(_text(form, "value"))
            case "json_schema":
                return self._named(self._json_rule(form.get("json_schema", {})))
            case "regex":
                return self._named(self._regex_rule(_text(form, "pattern")))
            case "any_text":
                return "/(?s:.*)/"
            case "sequence":
                return " ".join(self.make(one) for one in _entries(form, "elements"))
            case "or":
                return self._named(" | ".join(self.make(one) for one in _entries(form, "elements")))
            case "tag":
                return self._tag(form, _text(form, "begin"))
            case "triggered_tags":
                return self._triggered(form)
        raise cannot(
            f"structural_tag has a format of type {str(kind)[:32]!r}; supported are const_string, json_schema, regex, "
            "any_text, sequence, or, tag and triggered_tags"
        )

    def _tag(self, tag: Mapping[str, Any], begin: str) -> str:
        """Return the rule of a tag. begin: the rest of its beginning, after what the trigger has matched."""
        content, end = tag.get("content"), _text(tag, "end")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            return f"{_literal(begin)} {self._named(f'/(?s:.*)/ {_literal(end)}', attribute='[lazy]')}"
        return f"{_literal(begin)} {self.make(content)} {_literal(end)}"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers, tags = form.get("triggers"), _entries(form, "tags")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise cannot("structural_tag needs triggers, a list of texts")
        for tag in tags:
            _check_fields(tag, _FIELDS["tag"], " in tags")
        choices = []
        for trigger in triggers:
            rest = [
                self._tag(tag, begin.removeprefix(trigger))
                for tag in tags
                if (begin := _text(tag, "begin")).startswith(trigger)
            ]
            if rest:
                before = self._named(f"/(?s:.*)/ {_literal(trigger)}", attribute="[lazy]")
                choices.append(f"{before} {self._named(' | '.join(rest))}")
        if orphan := next((tag for tag in tags if not str(tag.get("begin")).startswith(tuple(triggers))), None):
            raise cannot(f"structural_tag has no trigger with which {str(orphan.get('begin'))[:80]!r} begins")
        tag = self._named(" | ".join(choices))
        # The text at the end has no trigger either, or an unfinished tag would pass for text.
        alternatives = "|".join("".join(f"\\x{{{ord(char):x}}}" for char in one) for one in triggers)
        rest_of_text = self._named(f"/(?s:.*)/ & ~/(?s:.*)({alternatives})(?s:.*)/", is_terminal=True)
        repeated = f"{tag}{'+' if form.get('at_least_one') else '*'}"
        if form.get("stop_after_first"):
            return tag if form.get("at_least_one") else f"({tag} | {rest_of_text})"
        return f"{repeated} {rest_of_text}"

    def _named(self, rule: str, *, attribute: str = "", is_terminal: bool = False) -> str:
        """Add a rule, and return its name."""
        self._num_names += 1
        name = f"{'PART' if is_terminal else 'part'}_{self._num_names}"
        self.rules.append(f"{name}{attribute}: {rule}")
        return name


def _check_fields(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raise InvalidRequestError for an unknown field, which would restrict less than the client thinks."""
    for name, value in given.items():
        if name not in known and value not in (None, False, "", [], {}):
            message = f"structural_tag has the unknown field {str(name)[:64]!r}{where}"
            raise cannot(f"{message}; leave it out, or give one of {', '.join(sorted(known))}")


def _ends_of(structure: Mapping[str, Any]) -> dict[str, Any]:
    return {name: structure[name] for name in ("begin", "end") if name in structure}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _text(form: Mapping[str, Any], name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise cannot(f"structural_tag needs {name}, a text")
    return value


def _entries(form: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        raise cannot(f"structural_tag needs {name}, a list of objects")
    return value
