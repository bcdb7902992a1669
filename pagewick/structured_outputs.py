"""StructuredOutputsParams: the form that a response must have, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pagewick.errors import InvalidRequestError

MAX_CHOICES = 10_000
_JSON_FORMS = ("json", "json_object", "structural_tag")
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Has exactly one of the forms json, regex, choice, grammar, json_object and structural_tag.

    json: a JSON schema, as an object or a text. json_object: true for any JSON object. regex: an expression for the
        whole response. choice: the possible responses. grammar: a grammar in llguidance's Lark, or in llama.cpp's GBNF.
    structural_tag: free text, with parts of a given form after given triggers; docs/structured-output.md explains it.
    disable_any_whitespace: JSON without white space between its tokens. whitespace_pattern: a regular expression for
        that white space. disable_additional_properties: objects of a JSON schema have no properties that it does not
        name, even where the schema allows them.

    Raises InvalidRequestError, with the form as its param, for a wrong type, and for none or several forms.
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            message = f"structured_outputs needs exactly one of {', '.join(FORMS)}; got {' and '.join(given) or 'none'}"
            raise InvalidRequestError(message, param="structured_outputs")
        for name, (kinds, wanted) in _KINDS.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kinds):
                raise InvalidRequestError(f"{name} must be {wanted}", param=name)
            if value == "":
                raise InvalidRequestError(f"{name} must not be empty; leave it out", param=name)
        if self.choice is not None:
            _check_choices(self.choice)
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) and self.form not in _JSON_FORMS:
                raise InvalidRequestError(f"{name} applies to JSON, not to a {self.form}; leave it out", param=name)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            message = "whitespace_pattern contradicts disable_any_whitespace; give one of them"
            raise InvalidRequestError(message, param="whitespace_pattern")

    @property
    def form(self) -> str:
        """The name of the form that is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def is_json(self) -> bool:
        """Whether the whole response is JSON."""
        return self.form in ("json", "json_object")

    @classmethod
    def of(cls, values: object) -> StructuredOutputsParams | None:
        """Make the params from a mapping of their fields. Raises InvalidRequestError for an unknown name."""
        if values is None or isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise InvalidRequestError("structured_outputs must be an object", param="structured_outputs")
        known = [one.name for one in fields(cls)]
        # vLLM's name; here there is nothing to fall back to.
        values = {name: value for name, value in values.items() if name != "disable_fallback"}
        if (unknown := next((name for name in values if name not in known), None)) is not None:
            message = f"structured_outputs has no {str(unknown)[:64] or repr('')}; it has {', '.join(known)}"
            raise InvalidRequestError(message, param="structured_outputs")
        return cls(**values)


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "json": ((str, Mapping, bool), "a JSON schema, as an object or a text"),
    "regex": (str, "a text"),
    "choice": (tuple, "a list of texts"),
    "grammar": (str, "a text"),
    "json_object": (bool, "true or false"),
    "structural_tag": ((str, Mapping), "an object, or its JSON"),
    "disable_any_whitespace": (bool, "true or false"),
    "disable_additional_properties": (bool, "true or false"),
    "whitespace_pattern": (str, "a regular expression"),
}


def _check_choices(choices: tuple[Any, ...]) -> None:
    wrong = [one for one in choices if not isinstance(one, str) or not one]
    if wrong or not 1 <= len(choices) <= MAX_CHOICES:
        got = repr(wrong[0])[:64] if wrong else f"{len(choices)} of them"
        message = f"choice must have 1 to {MAX_CHOICES} texts, none of them empty; got {got}"
        raise InvalidRequestError(message, param="choice")
