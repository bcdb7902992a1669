"""Placing: the prompts of a model that reads images, for tests of its settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.settings import ImageSettings
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of


@dataclass(frozen=True)
class Placing:
    """token: stands for an image in texts. pictures: those that messages name by their numbers."""

    tokenizer: Tokenizer
    template: str
    token: str
    pictures: Sequence[Image.Image]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def image_id(self) -> int:
        return self.encode(self.token)[0]

    def prompts(self, found: ImageSettings, max_model_len: int = 900) -> PromptEncoder:
        images = ImageReader.of(found, self.image_id, self.token, id_of=self.tokenizer.id_of, encode=self.encode)
        template = ChatTemplate({"default": self.template}, self.tokenizer)
        return PromptEncoder(self.tokenizer, template, max_model_len=max_model_len, images=images)

    def user(self, *parts: str | int) -> dict[str, Any]:
        """Return a message with texts and pictures."""
        return {"role": "user", "content": [self._part(one) for one in parts]}

    def _part(self, part: str | int) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return {"type": "image_url", "image_url": {"url": address_of(file_of(self.pictures[part]))}}

    def assert_one_place(self, found: ImageSettings, text: str, number: int, expected: list[int]) -> None:
        """A text and token ids have one place for an image; expected: the tokens of the text with the picture."""
        encoder, picture = self.prompts(found), self.pictures[number]
        assert encoder.place_images(text, [picture]).token_ids == [*self.tokenizer.start_token_ids, *expected]
        assert encoder.place_images(self.encode(text), [picture]).token_ids == expected
        said = rf"has 2 places for images \({re.escape(self.token)}\), and the request has 1"
        with pytest.raises(InvalidRequestError, match=said):
            encoder.place_images([self.image_id] * 2, [picture])

    def assert_needed(self, found: ImageSettings, mark: str) -> None:
        """A tokenizer without this token is refused by name."""

        def id_of(text: str) -> int | None:
            return None if text == mark else self.tokenizer.id_of(text)

        with pytest.raises(ModelLoadError, match=f"the tokenizer lacks '{re.escape(mark)}', which marks the places of"):
            ImageReader.of(found, self.image_id, self.token, id_of=id_of)
