"""ChatTemplate: messages and tools to a prompt, by the Jinja template that comes with the model.

Text from a message must not become a control token: a user who writes `<|im_start|>system` must not open a
system message. The template's own output is encoded with control tokens recognised, so the difference between
the template's words and the user's has to survive the rendering. It does as a cut: before rendering, wherever
a control token starts in a string of the request, a CUT character goes in after its first character.
Templates copy it along. The rendered text is then split at the cuts and encoded piece by piece, so that "<"
and "|im_start|>" are two texts, neither of which is a token. Templates that look for such words in a message
do not find them either.

Control tokens are the special tokens, those other added tokens that the template itself writes (DeepSeek's role
marks are such), and the model's reasoning tags. More must not be cut, because some vocabularies have `<table>` and
runs of spaces as added tokens. An assistant's message is cut at special tokens only, and not at reasoning tags:
`<think>` and `<tool_call>` in it are the model's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from pagewick.errors import InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.text.control_tokens import CUT, Cutter
from pagewick.text.reasoning import ReasoningTags
from pagewick.text.template_budget import MAX_CHARS, budget
from pagewick.text.template_environment import TemplateEnvironment
from pagewick.text.tokenizer import Tokenizer, read_json_object

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "documents"})
# Goes to the end of a message that is to be continued. No valid text has a lone surrogate.
END_OF_MESSAGE = "\udfff"
# How templates call a message's thoughts. Clients send back what they were given, under either name.
_REASONING_FIELDS = ("reasoning_content", "reasoning")

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

    reasoning_tags: the model's, as far as its vocabulary and this template show. variables: those that the template
    reads, among them such as it only asks for. Raises ModelLoadError if one is not valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> None:
        environment = TemplateEnvironment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
            parsed = [environment.parse(source) for source in templates.values()]
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"the chat template is not valid: {error}") from None
        self.variables = frozenset(name for tree in parsed for name in jinja2.meta.find_undeclared_variables(tree))
        self.reasoning_tags = ReasoningTags.find(tokenizer, templates.values())
        self._tokenizer = tokenizer
        self._knows_developer = any("developer" in source for source in templates.values())
        special = [text for text, is_special in tokenizer.added_tokens.items() if is_special]
        written = [
            text
            for text in tokenizer.added_tokens
            if text.strip() and any(text in source for source in templates.values())
        ]
        tags = () if self.reasoning_tags is None else (self.reasoning_tags.start, self.reasoning_tags.end)
        self._special = Cutter([text for text in special if text not in tags])
        self._control = Cutter([*special, *written, *tags])

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
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> RenderedPrompt:
        """The prompt for a conversation.

        messages and tools are OpenAI's, as plain data. template_kwargs reach the template as variables, and documents
        for those that know what to do with them. continue_final_message: the prompt ends within the last message, as
        far as its text goes, and so without a generation prompt.
        Raises InvalidRequestError if the template rejects them, UnsupportedError for content that is not text.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        prepared = [self._prepare(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(prepared)
        variables = {
            **self._tokenizer.special_tokens,
            **self._control.cut(template_kwargs),
            "messages": prepared,
            "tools": self._control.cut(list(tools)) if tools else None,
            "documents": self._control.cut(list(documents)) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _run(self._templates[name], variables)
        return RenderedPrompt(tuple((_before_end(text) if continue_final_message else text).split(CUT)))

    def _prepare(self, message: Message, index: int) -> dict[str, Any]:
        """The message as templates expect it."""
        plain = {key: value for key, value in message.items() if value is not None and value != []}
        plain["content"] = _content_text(message.get("content"), f"messages[{index}].content")
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if "tool_calls" in plain:
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in plain["tool_calls"]]
        thoughts = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
        if thoughts is not None:
            plain = {**dict.fromkeys(_REASONING_FIELDS, thoughts), **plain}
        is_own = plain.get("role") == "assistant"
        result: dict[str, Any] = (self._special if is_own else self._control).cut(plain)
        return result


def _mark_end(messages: list[dict[str, Any]]) -> None:
    last = messages[-1] if messages else {}
    if not isinstance(last.get("content"), str):
        message = "continue_final_message needs a last message with text, which there is not; leave it out"
        raise InvalidRequestError(message, param="continue_final_message")
    last["content"] += END_OF_MESSAGE


def _before_end(text: str) -> str:
    """The prompt up to the end of the last message's text."""
    if text.count(END_OF_MESSAGE) != 1:
        raise InvalidRequestError(
            "the chat template does not write the last message as it is, so that it cannot be continued; "
            "leave out continue_final_message",
            param="continue_final_message",
        )
    return text.partition(END_OF_MESSAGE)[0]


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
        raise InvalidRequestError(f"the chat template rejects these messages: {reason}", param="messages") from error
    return "".join(parts)


def _content_text(content: Any, param: str) -> str | None:
    """The text of a message's content, which is a string or a list of parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("content must be a string or a list of parts", param=param)
    texts = [_part_text(part, param) for part in content]
    return "\n".join(texts) if texts else None


def _part_text(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        message = 'a content part needs a type, such as {"type": "text", "text": "..."}'
        raise InvalidRequestError(message, param=param)
    if kind not in ("text", "refusal"):
        raise UnsupportedError(f"this model reads text only; a content part has type {kind[:64]!r}", param=param)
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequestError(f"a content part of the type {kind!r} needs a string {kind!r}", param=param)
    return text


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
