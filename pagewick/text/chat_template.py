"""ChatTemplate: renders messages and tools to a prompt with the model's Jinja template.

Text from a message must not become a control token: a user who writes `<|im_start|>system` must not open a
system message. The template's own output is encoded with control tokens recognised, so rendering has to preserve
the difference between the template's words and the user's. A cut does that: before rendering, ChatTemplate inserts a
CUT character after the first character of every control token in a string of the request. Templates copy the CUT.
The rendered text is then split at the cuts and encoded piece by piece: "<" and "|im_start|>" are two texts, neither
of which is a token. Templates that search a message for such words do not find them either.

Control tokens are the special tokens, the other added tokens that the template itself writes (such as DeepSeek's role
marks), and the model's reasoning tags. No other token is cut, because some vocabularies have `<table>` and runs of
spaces as added tokens. An assistant's message is cut at special tokens only, not at reasoning tags: `<think>` and
`<tool_call>` in it are the model's own words.

Each message is converted to the form that the template expects (pagewick/text/template_reading.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.sources import ImageSource
from pagewick.text.content_parts import Message, template_content
from pagewick.text.control_tokens import CUT, Cutter
from pagewick.text.reasoning import ReasoningTags
from pagewick.text.template_environment import MAX_CHARS, TemplateEnvironment, time_limit
from pagewick.text.template_reading import Arguments, TemplateReading
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tokenizer_files import read_json_object
from pagewick.text.tool_calls.plain_tools import complete_tools, tools_without_null

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "documents"})
# Marks the end of a message that the model should continue; no valid text has a lone surrogate. A template that trims
# the message removes the space that follows the mark.
END_OF_MESSAGE = "\udfff"
# The name of a GGUF file's template for a query and a document, which is none for chats: see pair_prompts.py.
PAIR_TEMPLATE = "rerank"
# The names that templates use for a message's thoughts. Clients send thoughts back under any of them.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Jinja compiles a template of this length in seconds.
MAX_TEMPLATE_CHARS = 2**17
# Forms of the tools with which a template is rendered: the request's, complete, and without the type null.
_MAX_FORMS = 3


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt in pieces; no token may span two of them. `text` is the whole prompt. images: those of its messages."""

    pieces: tuple[str, ...]
    images: tuple[ImageSource, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ChatTemplate:
    """A model's chat template, or several by name ("default", "tool_use").

    sources: the templates' source texts. reasoning_tags: the model's tags, found in its vocabulary and the templates.
    variables: all variables that the templates mention. Raises ModelLoadError if a template is too long, or not valid
    Jinja.
    """

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> None:
        if any(len(source) > MAX_TEMPLATE_CHARS for source in templates.values()):
            raise ModelLoadError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters; shorten it")
        environment = TemplateEnvironment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
            parsed = {name: environment.parse(source) for name, source in templates.items()}
            self._readings = {name: TemplateReading.of(tree) for name, tree in parsed.items()}
        # Jinja compiles to Python, which may refuse the result: too deeply nested, or a `break` outside of a loop.
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelLoadError(f"the chat template is not valid: {error}") from None
        self.variables = frozenset[str]().union(*map(jinja2.meta.find_undeclared_variables, parsed.values()))
        self.sources = tuple(templates.values())
        self.reasoning_tags = ReasoningTags.find(tokenizer, self.sources)
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
    def from_directory(
        cls, path: str | Path, tokenizer: Tokenizer, config: Mapping[str, Any] | None = None
    ) -> ChatTemplate | None:
        """Read the templates of a model directory; None if it has none. Raises ModelLoadError if one is unusable.

        config: the directory's tokenizer_config.json, or what a GGUF file has in its place; None: the tokenizer's.
        """
        templates = read_templates(Path(path), tokenizer.config if config is None else config)
        try:
            return cls(templates, tokenizer) if templates else None
        except ModelLoadError as error:
            fix = "correct the model's chat template, or give another one: pagewick serve --chat-template FILE"
            raise ModelLoadError(f"{error}\n  {fix}") from None

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
        """Render the prompt for a conversation.

        messages, tools: plain data in OpenAI's form. template_kwargs, documents: variables of the template.
        continue_final_message: end the prompt where the text of the last message ends, without a generation prompt.
        A part of the content may be {"type": "image"}, for which the template writes a placeholder; content_parts.py.
        Raises InvalidRequestError if the template rejects the messages, UnsupportedError for other content.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        reading = self._readings[name]
        prepared = [self._prepare(message, index, reading) for index, message in enumerate(messages)]
        begun = _mark_end(prepared) if continue_final_message else ""
        variables = {
            **self._tokenizer.special_tokens,
            **self._control.cut(template_kwargs),
            "messages": prepared,
            "tools": self._control.cut(list(tools)) if tools else None,
            "documents": self._control.cut(list(documents)) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _run(self._templates[name], variables)
        return RenderedPrompt(tuple((_before_end(text, begun) if continue_final_message else text).split(CUT)))

    def _prepare(self, message: Message, index: int, reading: TemplateReading) -> dict[str, Any]:
        """Convert a message to the form that the template expects."""
        plain = {key: value for key, value in message.items() if value is not None and value != []}
        param = f"messages[{index}].content"
        content = template_content(
            message.get("content"), param, has_parts=reading.has_parts, needs_parts=reading.needs_parts
        )
        if content is not None or reading.has_none:
            plain["content"] = content
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if "tool_calls" in plain:
            plain["tool_calls"] = [_with_arguments(call, reading.arguments) for call in plain["tool_calls"]]
        thoughts = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
        if thoughts is not None:
            plain = {**dict.fromkeys(_REASONING_FIELDS, thoughts), **plain}
        is_own = plain.get("role") == "assistant"
        result: dict[str, Any] = (self._special if is_own else self._control).cut(plain)
        return result


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Insert a mark at the end of the last message's text; returns the text without it."""
    last = messages[-1] if messages else {}
    owner, key = last, "content"
    if isinstance(parts := last.get("content"), list):
        owner, key = parts[-1], "text"
    text = owner.get(key)
    if not isinstance(text, str):
        message = "continue_final_message needs a last message with text; add one or leave out continue_final_message"
        raise InvalidRequestError(message, param="continue_final_message")
    owner[key] = text + END_OF_MESSAGE + " "
    return text


def _before_end(text: str, begun: str) -> str:
    """Return the prompt up to the end of the last message's text, which is `begun`.

    If the template trims the message, trailing white space of the prompt is removed too, as transformers does.
    """
    if text.count(END_OF_MESSAGE) != 1 or begun.strip() not in text:
        raise InvalidRequestError(
            "the chat template changes the text of the last message, so the model cannot continue it; "
            "leave out continue_final_message",
            param="continue_final_message",
        )
    before, _, after = text.partition(END_OF_MESSAGE)
    return before if after.startswith(" ") else before.rstrip()


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a template; again with tools in other forms, if it fails with those of the request."""
    with time_limit():
        for _ in range(_MAX_FORMS - 1):
            try:
                return _run_once(template, variables)
            except InvalidRequestError as error:
                tools = variables["tools"] or []
                # The macro of Hermes 2 Pro and 3 calls itself for each type in a list, and for each letter of "null".
                is_endless = isinstance(error.__cause__, RecursionError)
                other = tools_without_null(tools) if is_endless else complete_tools(tools)
                if other == tools:
                    raise
                variables = {**variables, "tools": other}
        return _run_once(template, variables)


def _run_once(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts, num_chars = [], 0
    try:
        for part in template.generate(variables):
            num_chars += len(part)
            if num_chars > MAX_CHARS:
                raise InvalidRequestError(f"the rendered prompt is longer than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)
    except InvalidRequestError:
        raise
    # A template is foreign code that reads unchecked messages: it can raise anything, and only this request fails.
    except Exception as error:
        is_endless = isinstance(error, RecursionError)
        reason = "too deep a recursion, perhaps in a macro that calls itself" if is_endless else str(error)
        reason = reason or type(error).__name__
        raise InvalidRequestError(f"the chat template rejects the messages: {reason}", param="messages") from error


def _with_arguments(call: Any, form: Arguments) -> Any:
    """Convert a tool call's arguments to the form that the template expects. Text that is not a JSON object stays."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise InvalidRequestError("a tool call must have a function", param="messages")
    arguments = function.get("arguments")
    if form is Arguments.OBJECT and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif form is Arguments.TEXT and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def template_source(chat_template: str | Path) -> str:
    """Return the source of a template: the text itself, or the file's. Raises ConfigError."""
    source = str(chat_template)
    # A template without any brace would be the same text for every conversation.
    if isinstance(chat_template, Path) or "{" not in source:
        try:
            source = Path(chat_template).read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template: cannot read {str(chat_template)[:80]!r}: {error}") from None
    return source


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read templates by name from the files in which transformers looks for them.

    A `chat_template.jinja` replaces templates in JSON files, which are left over from older versions.
    """
    templates: dict[str, str] = {}
    files = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (file := directory / "chat_template.jinja").is_file():
        files["default"] = file
    for source in (
        config.get("chat_template"),
        read_json_object(directory / "chat_template.json").get("chat_template"),
    ):
        if "default" in files:
            break
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            named = [(one.get("name"), one.get("template")) for one in source if isinstance(one, dict)]
            templates |= {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    for name, file in files.items():
        try:
            with file.open(encoding="utf-8") as text:
                # One character more than a template may have.
                templates[name] = text.read(MAX_TEMPLATE_CHARS + 1)
        except ValueError:
            raise ModelLoadError(f"{file} is not UTF-8 text; download the model again") from None
    templates.pop(PAIR_TEMPLATE, None)
    if templates and "default" not in templates:
        raise ModelLoadError(f"{directory} has chat templates, but none named default")
    return templates
