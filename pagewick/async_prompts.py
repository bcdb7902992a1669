"""AsyncPrompts: makes the prompts of one model, in threads beside the event loop. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypeGuard, Unpack

from pagewick.errors import ArgumentError
from pagewick.images.sources import ImageSource
from pagewick.text.content_parts import Message
from pagewick.text.image_prompts import MULTI_MODAL_DATA, ModelInput, PromptTokens
from pagewick.text.infill import Infill, OtherFile
from pagewick.text.pair_prompts import Pair, PairPrompts
from pagewick.text.prompts import ChatEncodeOptions, ChatOptions, EncodeOptions, PromptEncoder
from pagewick.text.reasoning import ReasoningTags
from pagewick.text_threads import TextThreads


class AsyncPrompts:
    """A PromptEncoder whose methods wait for threads instead of occupying the event loop.

    All methods raise ArgumentError for arguments of other types.
    """

    def __init__(self, prompts: PromptEncoder, pairs: PairPrompts | None = None) -> None:
        """pairs: None for a model that is no reranker."""
        self.pairs = pairs
        self.tokenizer = prompts.tokenizer
        self._prompts = prompts
        self._threads = TextThreads()

    @property
    def reasoning_tags(self) -> ReasoningTags | None:
        """The model's reasoning tags; None if it has none."""
        return self._prompts.reasoning_tags

    @property
    def chat_template_source(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self._prompts.chat_template_source

    @property
    def has_chat_template(self) -> bool:
        return self._prompts.has_chat_template

    @property
    def template_source(self) -> str:
        """The model's chat template, in Jinja; empty if it has none."""
        return self._prompts.template_source

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the model's chat template reads."""
        return self._prompts.template_variables

    @property
    def can_infill(self) -> bool:
        """Whether the vocabulary has tokens that ask for the text between two texts."""
        return self._prompts.can_infill

    @property
    def can_think_by_switch(self) -> bool:
        """Whether the model's chat template reads enable_thinking."""
        return self._prompts.can_think_by_switch

    async def encode(self, prompt: str, *, keeps_beginning: bool = False, **how: Unpack[EncodeOptions]) -> list[int]:
        """Encode a prompt; see PromptEncoder.encode."""
        _check_texts(prompt=prompt)
        return await self._threads.run(partial(self._prompts.encode, prompt, keeps_beginning=keeps_beginning, **how))

    async def encode_pair(self, pair: Pair, *, truncate_prompt_tokens: int | None = None) -> list[int]:
        """Encode the prompt of a query and a document, for a reranker; see PairPrompts.encode."""
        assert self.pairs is not None, "scoring_of refuses other models"
        max_len = self._prompts.max_model_len
        encode = partial(self.pairs.encode, pair, max_len=max_len, truncate_prompt_tokens=truncate_prompt_tokens)
        return await self._threads.run(encode)

    async def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **how: Unpack[ChatOptions]
    ) -> str:
        """Render the prompt of a conversation as text; see PromptEncoder.render_chat."""
        _check_messages(messages)
        rendered = await self._threads.run(partial(self._prompts.render_chat, messages, tools, **how))
        return rendered.text

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **how: Unpack[ChatEncodeOptions],
    ) -> list[int]:
        """Encode the prompt that `render_chat` renders; add_special_tokens is off by default.

        The tokens of images are counted, but the images are not decoded.
        """
        _check_messages(messages)
        return (await self._threads.run(partial(self._prompts.place_chat, messages, tools, **how))).token_ids

    async def chat_input(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **how: Unpack[ChatEncodeOptions],
    ) -> ModelInput:
        """Encode a conversation as `encode_chat` does, and decode its images. Raises InvalidRequestError."""
        _check_messages(messages)
        tokens = await self._threads.run(partial(self._prompts.place_chat, messages, tools, **how))
        return await self._read_images(tokens, "messages")

    async def prompt_input(self, prompt: str | list[int], images: Sequence[ImageSource] = ()) -> ModelInput:
        """Encode a text, or take token ids, with one placeholder for each image, and decode the images.

        Raises InvalidRequestError.
        """
        if not images:
            return ModelInput(await self.encode(prompt) if isinstance(prompt, str) else prompt)
        tokens = await self._threads.run(partial(self._prompts.place_images, prompt, images))
        return await self._read_images(tokens, MULTI_MODAL_DATA)

    async def _read_images(self, tokens: PromptTokens, param: str) -> ModelInput:
        # One after the other: the images of a request with many must not hold up those of other requests.
        images = [
            picture
            for one in tokens.images
            for picture in await self._threads.run(partial(self._prompts.read_image, one, param), is_image=True)
        ]
        return ModelInput(tokens.token_ids, images)

    async def encode_infill(
        self, prefix: str, suffix: str, *, others: Sequence[OtherFile] = (), beginning: str = ""
    ) -> list[int]:
        """Encode the prompt for the text between two texts; others, beginning: as in Infill.

        Raises InvalidRequestError if the model cannot infill.
        """
        _check_texts(prefix=prefix, suffix=suffix, beginning=beginning)
        infill = Infill(prefix, suffix, others, beginning)
        return await self._threads.run(partial(self._prompts.encode_infill, infill))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids. Raises InvalidRequestError for an id that is not in the vocabulary."""
        _check_token_ids(token_ids)
        return self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token alone; U+FFFD for a part of a character. Raises InvalidRequestError as `decode` does."""
        _check_token_ids(token_ids)
        return self._prompts.token_strings(token_ids)


def _check_texts(**texts: object) -> None:
    for name, given in texts.items():
        if not isinstance(given, str):
            raise ArgumentError(f"{name} must be a text; got {_shown(given)}")


def _check_messages(messages: object) -> None:
    if not _is_sequence(messages) or not all(isinstance(message, Mapping) for message in messages):
        example = '[{"role": "user", "content": "Hello"}]'
        raise ArgumentError(f"messages must be a list such as {example}; got {_shown(messages)}")


def _check_token_ids(token_ids: object) -> None:
    # The types alone, because a list may be long.
    kinds = {*map(type, token_ids)} if _is_sequence(token_ids) else {str}
    if not all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in kinds):
        raise ArgumentError(f"token_ids must be a list of whole numbers; got {_shown(token_ids)}")


def _is_sequence(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def _shown(given: object) -> str:
    shown = repr(given)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
