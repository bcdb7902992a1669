"""PromptEncoder: turns texts, conversations and infill requests into token ids, for LLM and AsyncEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack

from pagewick.engine.messages import ImageInput
from pagewick.errors import InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.images.sources import ImageSource
from pagewick.text.chat_template import RESERVED_VARIABLES, ChatTemplate, RenderedPrompt
from pagewick.text.content_parts import Message, check_images, check_roles, take_images
from pagewick.text.image_prompts import MULTI_MODAL_DATA, ImageReader, PlacedImage, PromptTokens
from pagewick.text.infill import Infill, InfillTokens
from pagewick.text.part_splitter import PartFormat
from pagewick.text.reasoning import ReasoningTags
from pagewick.text.thinking_switches import BUDGET_VARIABLE, has_switch, with_switches
from pagewick.text.tokenizer import Tokenizer, check_truncated
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named, format_of
from pagewick.text.tool_calls.smollm import SMOLLM_3_CODE
from pagewick.text.tool_calls.template_support import TemplateTools, ToolPrompts
from pagewick.text.tool_variables import tool_variables
from pagewick.text.truncation import tokens_to_keep

# Limit for a template in a request: no time limit applies to its compilation. The longest known templates have 40,000.
MAX_CACHED_TEMPLATES = 8


class ChatOptions(TypedDict, total=False):
    """Options for rendering a conversation, with their defaults.

    add_generation_prompt (True): end the prompt with the beginning of the assistant's message. continue_final_message
    (False): end it within the last message instead. chat_template: source of a template that replaces the model's.
    chat_template_kwargs: variables of the template. documents: plain data for templates that read documents.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None


def with_budget(how: ChatOptions, thinking_budget: int | None) -> ChatOptions:
    """Return options by which the template, too, gets to know the budget of thoughts, unless they tell it one."""
    given = how.get("chat_template_kwargs") or {}
    is_number = isinstance(thinking_budget, int) and not isinstance(thinking_budget, bool)
    if not is_number or not isinstance(given, Mapping):
        return how
    return {**how, "chat_template_kwargs": {BUDGET_VARIABLE: thinking_budget, **given}}


class EncodeOptions(TypedDict, total=False):
    """Options of PromptEncoder.encode."""

    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    num_output_tokens: int


class ChatEncodeOptions(ChatOptions, EncodeOptions, total=False):
    """Options of PromptEncoder.place_chat."""


class PromptEncoder:
    """Makes prompts for one model; may be used by several threads at once.

    max_model_len: the longest sequence in tokens; a function if a restarted engine may have another limit.
    reasoning_tags: None for a model without tags. part_formats: the known formats in which it writes tool calls and the
    like. tool_call_parser: the name of the format in which it writes tool calls; None: found in the chat template.
    call_format: this format. images: None for a model that reads no images.
    template_variables: those that its chat template reads. can_think_by_switch: these have enable_thinking or one with
    the same meaning, or a budget, which `render_chat` then sets too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        max_model_len: int | Callable[[], int],
        tool_call_parser: str | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.images = images
        self._max_model_len = max_model_len
        self.reasoning_tags = (
            ReasoningTags.find(tokenizer, ()) if chat_template is None else chat_template.reasoning_tags
        )
        self.template_variables = chat_template.variables if chat_template is not None else frozenset[str]()
        self.can_think_by_switch = has_switch(self.template_variables, self.reasoning_tags)
        sources = () if chat_template is None else chat_template.sources
        self.call_format = format_of(sources) if tool_call_parser is None else format_named(tool_call_parser)
        self.part_formats: list[PartFormat] = [ToolCallFormat(self.call_format, tokenizer)]
        self.has_chat_template = chat_template is not None
        self._tools = functools.lru_cache(MAX_CACHED_TEMPLATES + 1)(self._tool_prompts)
        self._chat_template = chat_template
        self._infill_tokens = InfillTokens.find(tokenizer)
        self._compile = functools.lru_cache(MAX_CACHED_TEMPLATES)(self._compile_template)

    @property
    def template_tools(self) -> TemplateTools | None:
        """The abilities of the model's chat template with tools; None without a template."""
        return None if self._chat_template is None else self._tools(self._chat_template).support

    @property
    def template_source(self) -> str:
        return "" if self._chat_template is None else self._chat_template.sources[0]

    @property
    def chat_template_source(self) -> str:
        """The source of the chat template, of the first one if there are several; empty if there is none."""
        return "" if self._chat_template is None else self._chat_template.sources[0]

    @property
    def can_infill(self) -> bool:
        return self._infill_tokens is not None

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the current engine serves, in tokens."""
        return self._max_model_len() if callable(self._max_model_len) else self._max_model_len

    def encode(
        self,
        prompt: str,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        num_output_tokens: int = 1,
        keeps_beginning: bool = False,
    ) -> list[int]:
        """Encode a text.

        add_special_tokens: add the tokens that the model expects around a text. truncate_prompt_tokens: keep only this
        number of tokens from the end; -1: as many as leave room for num_output_tokens. keeps_beginning: cut the end of
        the text instead, and keep the tokens around it. Raises ContextLengthError, InvalidRequestError.
        """
        num_kept = tokens_to_keep(truncate_prompt_tokens, self.max_model_len - num_output_tokens)
        max_len = self.max_model_len if num_kept is None else None
        if num_kept is not None:
            check_truncated(len(prompt), num_kept)
            if keeps_beginning:
                return self.tokenizer.encode_beginning(prompt, num_kept, add_special_tokens=add_special_tokens)
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_len=max_len)
        return token_ids if num_kept is None else token_ids[-num_kept:]

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **how: Unpack[ChatOptions]
    ) -> RenderedPrompt:
        """Render the prompt for a conversation. messages, tools: plain data in OpenAI's form.

        Raises InvalidRequestError if there is no template, or the template is not valid or rejects the messages.
        """
        chat_template = how.get("chat_template")
        template = self._chat_template if chat_template is None else self._compile(chat_template)
        if template is None:
            message = (
                "this model has no chat template. Give one to the server (pagewick serve --chat-template FILE) or to "
                "LLM (chat_template=...), send a prompt in place of messages, or use a chat model"
            )
            raise InvalidRequestError(message, param="messages")
        check_roles(messages)
        variables = dict(how.get("chat_template_kwargs") or {})
        if wrong := sorted(RESERVED_VARIABLES & variables.keys()):
            raise InvalidRequestError(f"chat_template_kwargs must not set {wrong[0]}", param="chat_template_kwargs")
        variables = with_switches(variables, template.reasoning_tags)
        is_continued = how.get("continue_final_message", False)
        check_images(messages, reads_images=self.images is not None)
        messages, tools = self._tools(template).prepared(messages, tools, is_continued=is_continued)
        # Only now: a message that moved has taken its images along.
        messages, images = take_images(messages)
        variables |= self._tool_variables(template, tools, variables)
        rendered = template.render(
            messages,
            tools,
            how.get("add_generation_prompt", True),
            continue_final_message=is_continued,
            documents=how.get("documents"),
            **variables,
        )
        return replace(rendered, images=tuple(images))

    def encode_rendered(self, rendered: RenderedPrompt, **how: Unpack[EncodeOptions]) -> list[int]:
        """Encode a rendered conversation; options as in `encode`, except that add_special_tokens is off by default.

        Each placeholder is repeated as often as its image has tokens. Chat templates write special tokens themselves.
        """
        return self.place_rendered(rendered, **how).token_ids

    def place_rendered(
        self,
        rendered: RenderedPrompt,
        *,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
        num_output_tokens: int = 1,
    ) -> PromptTokens:
        """Encode a rendered conversation as `encode_rendered` does, and return its images, too, not decoded yet.

        Raises UnsupportedError for images in a prompt that is truncated, which could cut an image into two.
        """
        num_kept = tokens_to_keep(truncate_prompt_tokens, self.max_model_len - num_output_tokens)
        if rendered.images and num_kept is not None:
            message = "a prompt with images cannot be truncated; leave out truncate_prompt_tokens, or send less"
            raise UnsupportedError(message, param="truncate_prompt_tokens")
        place = self._placing(rendered.images, "messages", num_output_tokens)
        max_len = self.max_model_len if num_kept is None else None
        pieces = self._written_out(rendered.pieces, rendered.images)
        token_ids = self.tokenizer.encode_pieces(pieces, max_len=max_len, num_last=num_kept)
        if add_special_tokens:
            begin = self.tokenizer.start_token_ids
            token_ids = token_ids if token_ids[: len(begin)] == begin else [*begin, *token_ids]
        return place(token_ids if num_kept is None else token_ids[-num_kept:])

    def place_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **how: Unpack[ChatEncodeOptions],
    ) -> PromptTokens:
        """Do what `render_chat` and `place_rendered` do, one after the other."""
        encoding: Any = {name: how[name] for name in EncodeOptions.__annotations__ if name in how}  # type: ignore[literal-required]
        rendering: Any = {name: value for name, value in how.items() if name not in encoding}
        return self.place_rendered(self.render_chat(messages, tools, **rendering), **encoding)

    def place_images(self, prompt: str | list[int], images: Sequence[ImageSource]) -> PromptTokens:
        """Encode a text, or take token ids, with one placeholder for each image. Raises as `place_rendered`."""
        place = self._placing(images, MULTI_MODAL_DATA, 1)
        return place(self.encode(*self._written_out((prompt,), images)) if isinstance(prompt, str) else prompt)

    def _written_out(self, pieces: Sequence[str], images: Sequence[ImageSource]) -> Sequence[str]:
        return pieces if self.images is None or not images else self.images.written_out(pieces)

    def read_image(self, placed: PlacedImage, param: str) -> list[ImageInput]:
        """Decode an image that one of the methods above has placed, and return its pictures; see ImageReader.read."""
        assert self.images is not None, "an image was placed without a reader"
        return self.images.read(placed, param=param)

    def _placing(
        self, sources: Sequence[ImageSource], param: str, num_output_tokens: int
    ) -> Callable[[list[int]], PromptTokens]:
        """Load images, and return a function that gives them their places in a prompt's tokens."""
        reader, max_len = self.images, self.max_model_len
        if not sources:
            return PromptTokens
        if reader is None:
            raise UnsupportedError("this model reads no images; leave them out, or use a model that does", param=param)
        images = reader.loaded(sources, max_len=max_len, param=param)
        return partial(reader.placed, images=images, max_len=max_len, num_output_tokens=num_output_tokens, param=param)

    def encode_infill(self, infill: Infill) -> list[int]:
        """Encode the prompt for the text between two texts. Raises InvalidRequestError if the model cannot infill."""
        if self._infill_tokens is None:
            message = "this model cannot infill: its vocabulary has no infill tokens; leave out suffix"
            raise InvalidRequestError(message, param="suffix")
        return self._infill_tokens.prompt(infill, self.tokenizer, max_len=self.max_model_len)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids. Raises InvalidRequestError for an id that is not in the vocabulary."""
        self._check_ids(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token alone; U+FFFD for a part of a character. Raises InvalidRequestError as `decode` does."""
        self._check_ids(token_ids)
        return [self.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        size = self.tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequestError(f"token id {wrong} is not in the vocabulary of {size} tokens", param="tokens")

    def _tool_variables(
        self, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        in_python = self.call_format is SMOLLM_3_CODE
        return tool_variables(template.variables, tools, given, in_python=in_python)

    def _tool_prompts(self, template: ChatTemplate) -> ToolPrompts:
        def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
            return template.render(messages, tools, **self._tool_variables(template, tools, {})).text

        return ToolPrompts(self.call_format, render, template.sources)

    def _compile_template(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate({"default": source}, self.tokenizer)
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), param="chat_template") from None
