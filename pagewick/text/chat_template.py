"""ChatTemplate: messages and tools to a prompt, by the Jinja template that comes with the model.

Text from a message must not become a control token: a user who writes `<|im_start|>system` must not open a
system message. The template's own output is encoded with control tokens recognised, so the difference between
the template's words and the user's has to survive the rendering. It does as a cut: before rendering, wherever
a control token starts in a string of the request, a CUT character goes in after its first character.
Templates copy it along. The rendered text is then split at the cuts and encoded piece by piece, so that "<"
and "|im_start|>" are two texts, neither of which is a token. Templates that look for such words in a message
do not find them either.

Control tokens are the special tokens, and those other added tokens that the template itself writes
(DeepSeek's role marks are such). More must not be cut, because some vocabularies have `<table>` and runs of
spaces as added tokens. An assistant's message is cut at special tokens only: `<think>` and `<tool_call>` in
it are the model's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from pagewick.errors import InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.text.template_environment import CUT, MAX_CHARS, TemplateEnvironment, budget
from pagewick.text.tokenizer import Tokenizer, read_json_object

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt in pieces that no token may span; `text` is what the model reads."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ChatTemplate:
    """A model's chat template, or several by name ("default", "tool_use").

    Raises ModelLoadError if one is not valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> None:
        environment = TemplateEnvironment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"the model's chat template is not valid: {error}") from None
        self._tokenizer = tokenizer
        self._knows_developer = any("developer" in source for source in templates.values())
        special = [text for text, is_special in tokenizer.added_tokens.items() if is_special]
        written = [
            text
            for text in tokenizer.added_tokens
            if text.strip() and any(text in source for source in templates.values())
        ]
        self._special = _Cutter(special)
        self._control = _Cutter([*special, *written])

    @classmethod
    def from_directory(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a model directory; None if it has none. Raises ModelLoadError if it is unusable."""
        templates = _read_templates(Path(path), tokenizer.config)
        return cls(templates, tokenizer) if templates else None

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> RenderedPrompt:
        """The prompt for a conversation.

        messages and tools are OpenAI's, as plain data. template_kwargs reach the template as variables.
        Raises InvalidRequestError if the template rejects them, UnsupportedError for content that is not text.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        variables = {
            **self._tokenizer.special_tokens,
            **self._control.cut(template_kwargs),
            "messages": [self._prepare(message, index) for index, message in enumerate(messages)],
            "tools": self._control.cut(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return RenderedPrompt(tuple(_run(self._templates[name], variables).split(CUT)))

    def _prepare(self, message: Message, index: int) -> dict[str, Any]:
        """The message as templates expect it."""
        plain = {key: value for key, value in message.items() if value is not None and value != []}
        plain["content"] = _content_text(message.get("content"), f"messages[{index}].content")
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if "tool_calls" in plain:
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in plain["tool_calls"]]
        is_own = plain.get("role") == "assistant"
        result: dict[str, Any] = (self._special if is_own else self._control).cut(plain)
        return result


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts, num_chars = [], 0
    try:
        with budget():
            for part in template.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_CHARS:
                    raise InvalidRequestError(f"the rendered prompt is longer than {MAX_CHARS} characters")
                parts.append(part)
    except InvalidRequestError:
        raise
    # A template is foreign code that meets unchecked messages: it can fail in any way, and always this
    # request alone.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(
            f"the model's chat template rejects these messages: {reason}", param="messages"
        ) from error
    return "".join(parts)


def _content_text(content: Any, param: str) -> str | None:
    """The text of a message's content, which is a string or a list of parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("content must be a string or a list of parts", param=param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise UnsupportedError(f"this model reads text only; a content part has type {kind!r}", param=param)
        texts.append(text)
    return "\n".join(texts) if texts else None


def _with_parsed_arguments(call: Any) -> Any:
    """The tool call with its arguments as an object: templates print them by themselves."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise InvalidRequestError("a tool call must have a function", param="messages")
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    return {**call, "function": {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}}


class _Cutter:
    """Puts a CUT into every place where one of the tokens starts, after its first character. Tokens may overlap."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = frozenset(tokens) - {""}
        self._lengths = sorted(set(map(len, self._tokens)))
        first_chars = "".join(sorted({re.escape(token[0]) for token in self._tokens}))
        self._first_char = re.compile(f"[{first_chars}]" if first_chars else "(?!)")

    def cut(self, value: Any) -> Any:
        """The value, plain data, with all its strings cut."""
        if isinstance(value, str):
            return self._first_char.sub(self._mark, str(value))
        if isinstance(value, Mapping):
            return {self.cut(key): self.cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cut(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise InvalidRequestError(f"messages must be plain data; got a {type(value).__name__}", param="messages")

    def _mark(self, match: re.Match[str]) -> str:
        text, start = match.string, match.start()
        # Some vocabularies have thousands of special tokens, but few lengths of them.
        is_token = any(text[start : start + length] in self._tokens for length in self._lengths)
        return match[0] + CUT if is_token else match[0]


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name, from the places where transformers looks for them, the later ones first served."""
    templates: dict[str, str] = {}
    for source in (
        config.get("chat_template"),
        read_json_object(directory / "chat_template.json").get("chat_template"),
    ):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates |= {entry["name"]: entry["template"] for entry in source if _is_named_template(entry)}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(file)
    if templates and "default" not in templates:
        raise ModelLoadError(f"{directory} has chat templates, but none named default")
    return templates


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError:
        raise ModelLoadError(f"{file} is not UTF-8 text; download the model again") from None
