"""Grammar: the texts that a response may be, made from the form that a request asks for.

All forms become llguidance's variant of Lark, whose `%json` holds a schema. The model's thoughts come before the
response, so the whole grammar is: thoughts, if the model thinks, and then the response.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.gbnf import is_gbnf, lark_of_gbnf
from pagewick.text.grammars.json_schema import prepared_schema
from pagewick.text.grammars.limits import GrammarLimits, cannot, read_json
from pagewick.text.grammars.structural_tag import lark_of_tags
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage

# White space between the tokens of JSON: a space, or a line break and an indentation. Without a bound, a small model
# may write nothing else.
WHITESPACE_PATTERN = r"\x20|\x0D?\x0A[\x20\x09]{0,40}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """lark: a grammar in llguidance's Lark, whose rule `start` is the response. param: names it in errors.

    answer: the grammar that the rules refer to as `@answer`. excluded: beginnings that no response may have.
    """

    lark: str
    param: str = "structured_outputs"
    answer: Grammar | None = None
    excluded: tuple[str, ...] = ()


def grammar_of(
    wanted: StructuredOutputsParams, limits: GrammarLimits, spacing: Mapping[str, Any] | None = None
) -> Grammar:
    """Return the grammar of a form. spacing: llguidance's options for white space in JSON, where others decide them.

    Raises InvalidRequestError for a form that is wrong, beyond the limits, or demands another spacing.
    """
    if spacing is not None and wanted.is_json:
        if wanted.disable_any_whitespace or wanted.whitespace_pattern is not None:
            name = "disable_any_whitespace" if wanted.disable_any_whitespace else "whitespace_pattern"
            reason = f"{name} cannot be combined with tools here, since this model's calls are JSON without a marker"
            raise cannot(f"{reason}; leave it out")
        lark = _of_json(wanted, limits, spacing)
    else:
        lark = _text_of(wanted, limits)
    if len(lark) > limits.max_size:
        raise cannot(f"it has {len(lark)} bytes, more than the limit of {limits.max_size} (--max-grammar-size)")
    return Grammar(lark)


def _text_of(wanted: StructuredOutputsParams, limits: GrammarLimits) -> str:
    try:
        lark = _MAKERS[wanted.form](wanted, limits)
        lark.encode()
    except UnicodeEncodeError:
        raise cannot("it has half of a surrogate pair, which is no character; write the whole character") from None
    return lark


def whole_grammar(grammar: Grammar, reasoning: Reasoning | None) -> str:
    """Return llguidance's form of a grammar, with the thoughts that may precede the response.

    reasoning: the state at the end of the prompt; None if thoughts are nothing special.
    """
    parts = [{"lark_grammar": grammar.lark}]
    if reasoning is not None and reasoning.stage != Stage.OVER:
        parts = [{"lark_grammar": _thoughts(reasoning)}, {"name": "response", "lark_grammar": grammar.lark}]
    if grammar.answer is not None:
        parts.append({"name": "answer", "lark_grammar": grammar.answer.lark})
    return json.dumps({"grammars": parts})


def _thoughts(reasoning: Reasoning) -> str:
    """Return the grammar of thoughts and then the response. White space around thoughts is no part of the response."""
    tags = reasoning.tags
    is_open = reasoning.stage in (Stage.OPENED, Stage.INSIDE)
    start = "start: thought @response" if is_open else "start: (/\\n?/ opening thought)? @response"
    return f"{start}\n{_tag_rules(tags)}\n"


def _tag_rules(tags: ReasoningTags) -> str:
    opening = " ".join(f"<[{token_id}]>" for token_id in tags.start_ids)
    breaks = r"/[\r\n]{0,8}/"
    if tags.are_tokens:
        # Free text has no special tokens, so it ends before the tag.
        return f"opening: {opening}\nthought: /(?s:.*)/ <[{tags.end_ids[0]}]> {breaks}"
    return f"opening: {opening}\nthought: closed {breaks}\nclosed[lazy]: /(?s:.*)/ {json.dumps(tags.end)}"


def _of_json(wanted: StructuredOutputsParams, limits: GrammarLimits, spacing: Mapping[str, Any] | None = None) -> str:
    schema = {"type": "object"} if wanted.json_object else wanted.json
    if isinstance(schema, str):
        schema = read_json(schema, "the JSON schema", limits)
    return f"start: {json_rule(schema, wanted, limits, spacing)}"


def json_rule(
    schema: Any,
    wanted: StructuredOutputsParams,
    limits: GrammarLimits,
    spacing: Mapping[str, Any] | None = None,
) -> str:
    """Return the part of a Lark rule that stands for JSON with this schema. Raises InvalidRequestError."""
    closes = wanted is not None and wanted.disable_additional_properties
    schema = prepared_schema(schema, limits, closes_objects=closes)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        # A client's own x-guidance could switch off the refusal of what llguidance does not support.
        schema = {**schema, "x-guidance": spacing or _json_options(wanted)}
    return f"%json {json.dumps(schema)}"


def _json_options(wanted: StructuredOutputsParams | None) -> dict[str, Any]:
    if wanted is not None and wanted.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = WHITESPACE_PATTERN
    if wanted is not None and wanted.whitespace_pattern is not None:
        pattern = wanted.whitespace_pattern
    return {"whitespace_pattern": pattern}


def _of_regex(wanted: StructuredOutputsParams, limits: GrammarLimits) -> str:
    return f"start: {_regex_rule(wanted.regex or '')}"


def _regex_rule(regex: str) -> str:
    made = json.loads(LLMatcher.grammar_from_regex(regex))
    lark: str = made["grammars"][0]["lark_grammar"]
    return lark.removeprefix("start: ")


def _of_choice(wanted: StructuredOutputsParams, limits: GrammarLimits) -> str:
    # One lexeme: as alternatives of a rule, thousands of texts would exceed the parser's limits.
    choices = sorted(set(wanted.choice or ()))
    return f"start: {_regex_rule('|'.join(_escaped(choice) for choice in choices))}"


def _escaped(text: str) -> str:
    """Return a regular expression for a text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _of_grammar(wanted: StructuredOutputsParams, limits: GrammarLimits) -> str:
    text = wanted.grammar or ""
    limits.check_brackets(text)
    return lark_of_gbnf(text) if is_gbnf(text) else text


def _of_structural_tag(wanted: StructuredOutputsParams, limits: GrammarLimits) -> str:
    given = wanted.structural_tag
    if isinstance(given, str):
        given = read_json(given, "structural_tag", limits)
    if not isinstance(given, dict):
        raise cannot("structural_tag must be an object")
    return lark_of_tags(given, lambda schema: json_rule(schema, wanted, limits), _regex_rule)


_MAKERS = {
    "json": _of_json,
    "json_object": _of_json,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "structural_tag": _of_structural_tag,
}
