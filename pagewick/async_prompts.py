"""AsyncPrompts: makes the prompts of one model, in threads beside the event loop. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from pagewick.images.sources import ImageSource
from pagewick.text.content_parts import Message
from pagewick.text.image_prompts import MULTI_MODAL_DATA, ModelInput, PromptTokens
from pagewick.text.pair_prompts import Pair, PairPrompts
from pagewick.text.prompts import ChatEncodeOptions, ChatOptions, EncodeOptions, PromptEncoder
from pagewick.text.reasoning import ReasoningTags
from pagewick.text_threads import TextThreads


class AsyncPrompts:
    """A PromptEncoder whose methods wait for threads instead of occupying the event loop."""

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
    def has_chat_template(self) -> bool:
        return self._prompts.has_chat_template

    @property
    def template_source(self) -> str:
        """The model's chat template, in Jinja; empty if it has none."""
        return self._prompts.template_source

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
        return (await self._threads.run(partial(self._prompts.place_chat, messages, tools, **how))).token_ids

    async def chat_input(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **how: Unpack[ChatEncodeOptions],
    ) -> ModelInput:
        """Encode a conversation as `encode_chat` does, and decode its images. Raises InvalidRequestError."""
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

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Encode the prompt for the text between two texts. Raises InvalidRequestError if the model cannot infill."""
        return await self._threads.run(partial(self._prompts.encode_infill, prefix, suffix))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids. Raises InvalidRequestError for an id that is not in the vocabulary."""
        return self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token alone; U+FFFD for a part of a character. Raises InvalidRequestError as `decode` does."""
        return self._prompts.token_strings(token_ids)
