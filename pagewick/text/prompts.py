"""PromptEncoder: texts, conversations and gaps in code to token ids; what LLM and AsyncEngine have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.text.chat_template import RESERVED_VARIABLES, ChatTemplate, Message, RenderedPrompt
from pagewick.text.infill import InfillTokens
from pagewick.text.part_formats import find_formats
from pagewick.text.reasoning import ReasoningTags
from pagewick.text.tokenizer import Tokenizer, check_truncated

# A template that a request brings is compiled before its steps can be counted. The longest in use have 40,000.
MAX_TEMPLATE_CHARS = 2**17
MAX_CACHED_TEMPLATES = 8
# Variables by which templates let thinking be switched on and off; the first is the one that our users know.
THINKING_SWITCHES = ("enable_thinking", "thinking")


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt.

    add_generation_prompt (True): end with what opens the assistant's message. continue_final_message (False): end
    within the last message instead. chat_template: the source of one in place of the model's. chat_template_kwargs: its
    variables. documents: plain data for templates that know what to do with them.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None


class PromptEncoder:
    """Makes prompts for one model; may be used by several threads at once.

    max_model_len: the longest sequence in tokens; a function where an engine that is started anew may have another.
    reasoning_tags: None for a model without. part_formats: how it writes tool calls and the like, as far as that is
    known. can_think_by_switch: its chat template reads enable_thinking, or a
    variable of the same meaning, which is then set with it.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, *, max_model_len: int | Callable[[], int]
    ) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.reasoning_tags = (
            ReasoningTags.find(tokenizer, ()) if chat_template is None else chat_template.reasoning_tags
        )
        variables = chat_template.variables if chat_template is not None else frozenset[str]()
        self.can_think_by_switch = not variables.isdisjoint(THINKING_SWITCHES)
        self.part_formats = find_formats(tokenizer, () if chat_template is None else chat_template.sources)
        self._chat_template = chat_template
        self._infill_tokens = InfillTokens.find(tokenizer)
        self._compile = functools.lru_cache(MAX_CACHED_TEMPLATES)(self._compile_template)

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the engine serves now, in tokens."""
        return self._max_model_len() if callable(self._max_model_len) else self._max_model_len

    def encode(
        self,
        prompt: str,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        num_output_tokens: int = 1,
    ) -> list[int]:
        """The token ids of a text.

        add_special_tokens: with those that the model expects around a text. truncate_prompt_tokens: keep the last so
        many; -1: as many as leave room for num_output_tokens. Raises ContextLengthError, InvalidRequestError.
        """
        num_kept = self._num_kept(truncate_prompt_tokens, num_output_tokens)
        max_len = self.max_model_len if num_kept is None else None
        if num_kept is not None:
            check_truncated(len(prompt), num_kept)
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_len=max_len)
        return token_ids if num_kept is None else token_ids[-num_kept:]

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **how: Unpack[ChatOptions],
    ) -> RenderedPrompt:
        """The prompt for a conversation. messages and tools are OpenAI's, as plain data.

        Raises InvalidRequestError if there is no template, or it is not valid, or rejects them.
        """
        chat_template = how.get("chat_template")
        template = self._chat_template if chat_template is None else self._compile(chat_template)
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; give a prompt in place of messages, or use a chat model",
                param="messages",
            )
        variables = dict(how.get("chat_template_kwargs") or {})
        if wrong := sorted(RESERVED_VARIABLES & variables.keys()):
            raise InvalidRequestError(f"chat_template_kwargs must not set {wrong[0]}", param="chat_template_kwargs")
        if (switch := next((variables[name] for name in THINKING_SWITCHES if name in variables), None)) is not None:
            variables = {**dict.fromkeys(THINKING_SWITCHES, switch), **variables}
        return template.render(
            messages,
            tools,
            how.get("add_generation_prompt", True),
            continue_final_message=how.get("continue_final_message", False),
            documents=how.get("documents"),
            **variables,
        )

    def encode_rendered(
        self,
        rendered: RenderedPrompt,
        *,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
        num_output_tokens: int = 1,
    ) -> list[int]:
        """The token ids of a conversation's prompt. Chat templates write special tokens themselves; the rest is as in
        `encode`.
        """
        num_kept = self._num_kept(truncate_prompt_tokens, num_output_tokens)
        max_len = self.max_model_len if num_kept is None else None
        token_ids = self.tokenizer.encode_pieces(rendered.pieces, max_len=max_len, num_last=num_kept)
        if add_special_tokens:
            begin = self.tokenizer.start_token_ids
            token_ids = token_ids if token_ids[: len(begin)] == begin else [*begin, *token_ids]
        return token_ids if num_kept is None else token_ids[-num_kept:]

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """The prompt for what comes between two texts. Raises InvalidRequestError for a model that cannot do that."""
        if self._infill_tokens is None:
            message = "this model cannot fill in: its vocabulary has no tokens for it; leave out suffix"
            raise InvalidRequestError(message, param="suffix")
        return self._infill_tokens.prompt(prefix, suffix, self.tokenizer, max_len=self.max_model_len)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises InvalidRequestError for one that is not in the vocabulary."""
        self._check_ids(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; U+FFFD for a part of a character. Raises InvalidRequestError as `decode` does."""
        self._check_ids(token_ids)
        return [self.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        size = self.tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequestError(f"token id {wrong} is not in the vocabulary of {size} tokens", param="tokens")

    def _num_kept(self, truncate_prompt_tokens: int | None, num_output_tokens: int) -> int | None:
        """The number of tokens to which a text is cut; None if it is refused instead where it is too long."""
        num_kept = truncate_prompt_tokens
        if num_kept is None:
            return None
        if not isinstance(num_kept, int) or isinstance(num_kept, bool) or (num_kept < 1 and num_kept != -1):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be 1 or more, or -1 for as many as fit; got {num_kept!r}",
                param="truncate_prompt_tokens",
            )
        return num_kept if num_kept > 0 else max(1, self.max_model_len - num_output_tokens)

    def _compile_template(self, source: str) -> ChatTemplate:
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"chat_template is longer than {MAX_TEMPLATE_CHARS} characters; shorten it"
            raise InvalidRequestError(message, param="chat_template")
        try:
            return ChatTemplate({"default": source}, self.tokenizer)
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), param="chat_template") from None
