"""The fields of a request that say which form its response must have; chat and completions have them.

OpenAI, vLLM, llama.cpp and vllm.rs have different names for the same things. A request gives one of them.
"""

from __future__ import annotations

from typing import Any, Literal

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.request_fields import ChoiceFields
from pagewick.structured_outputs import StructuredOutputsParams

Schema = dict[str, Any] | bool | str
_RESPONSE_FORMATS = "text, json_object, json_schema or structural_tag"
# The form of vllm.rs's constraint, in our words.
_FORMS = {"regex": "regex", "lark": "grammar", "grammar": "grammar", "json_schema": "json", "json": "json"}


class StructuredFields(ChoiceFields, kw_only=True):
    """response_format: OpenAI's; text, json_object, json_schema, or structural_tag.

    structured_outputs: vLLM's; an object with one of json, regex, choice, grammar, json_object and structural_tag.
    guided_json, guided_regex, guided_choice, guided_grammar, guided_json_object: its older names for these.
    guided_whitespace_pattern: a regular expression for the white space between the tokens of JSON.
    grammar: llama.cpp's name for a grammar, in GBNF or Lark. json_schema: its name for a JSON schema.
    constraint: vllm.rs's; the text of a constraint. constraint_type: its form, by default lark.
    """

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    constraint: str | None = None
    constraint_type: Literal["regex", "lark", "grammar", "json_schema", "json"] | None = None

    def sampling(self, **more: Any) -> dict[str, Any]:
        """Also return the form. Raises InvalidRequestError."""
        given = super().sampling(**more)
        return given if (form := self.form()) is None else {**given, "structured_outputs": form[1]}

    def names(self) -> dict[str, str]:
        """Return TextRequest.names."""
        names = super().names()
        return names if (form := self.form()) is None else {**names, "structured_outputs": form[0]}

    def form(self) -> tuple[str, StructuredOutputsParams] | None:
        """Return the field that asks for a form, and the form; None if none does.

        Raises InvalidRequestError for a wrong value, and for two fields.
        """
        forms = {name: values for name, values in self._forms().items() if values is not None}
        if len(forms) > 1:
            first, other = list(forms)[:2]
            raise InvalidRequestError(f"{other} cannot be combined with {first}; give one of them", param=other)
        for name, values in forms.items():
            if self.guided_whitespace_pattern is not None:
                values = {**values, "whitespace_pattern": self.guided_whitespace_pattern}
            try:
                made = StructuredOutputsParams.of(values)
            except InvalidRequestError as error:
                message = str(error) if str(error).startswith(name) else f"{name}: {error}"
                raise InvalidRequestError(message, param=name) from None
            assert made is not None, "there are values"
            return name, made
        if self.constraint_type is not None:
            raise InvalidRequestError("constraint_type needs a constraint", param="constraint_type")
        if self.guided_whitespace_pattern is not None:
            message = "guided_whitespace_pattern needs a form of JSON, such as guided_json; add it or leave this out"
            raise InvalidRequestError(message, param="guided_whitespace_pattern")
        return None

    def _forms(self) -> dict[str, dict[str, Any] | None]:
        """Return the fields of StructuredOutputsParams that each field of the request stands for; None if not given."""
        grammar_form = _FORMS[self.constraint_type or "lark"]
        return {
            "response_format": _of_response_format(self.response_format),
            "structured_outputs": self.structured_outputs,
            "guided_json": _given(json=self.guided_json),
            "guided_regex": _given(regex=self.guided_regex),
            "guided_choice": _given(choice=self.guided_choice),
            "guided_grammar": _given(grammar=self.guided_grammar),
            "guided_json_object": _given(json_object=self.guided_json_object or None),
            # llama.cpp's clients send an empty text for no grammar.
            "grammar": _given(**{grammar_form: self.grammar or None}),
            "json_schema": _given(json=self.json_schema),
            "constraint": _given(**{grammar_form: self.constraint}),
        }


def _given(**values: Any) -> dict[str, Any] | None:
    """Return the one value with its name; None if it is None."""
    return None if None in values.values() else values


def _of_response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or (kind := given.get("type")) == "text":
        return None
    if kind is None:
        message = f"response_format needs a type: {_RESPONSE_FORMATS}; leave it out if any text will do"
        raise InvalidRequestError(message, param="response_format")
    if kind == "json_object":
        # llama.cpp's and others' way to give a schema.
        return {"json": given["schema"]} if given.get("schema") else {"json_object": True}
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if schema is None:
            schema = given.get("schema")
        if schema is None:
            message = 'response_format needs a schema: {"type": "json_schema", "json_schema": {"schema": {...}}}'
            raise InvalidRequestError(message, param="response_format")
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": given}
    # LangChain knows the words before the colon.
    message = f"'response_format' of type {str(kind)[:32]!r} is not supported with this model: give {_RESPONSE_FORMATS}"
    raise UnsupportedError(message, param="response_format")
