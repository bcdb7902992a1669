"""`pagewick serve` with a random model that reads images: the same prompt and answer through every API."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.images.pictures import address_of, file_of, noise
from tests.images.reading_model import PAD_ID
from tests.images.tiny_vlm import SIDE, serving, write_tiny_vlm

IMAGE, OTHER = (file_of(noise(5 * SIDE, 3 * SIDE, seed=seed)) for seed in (1, 2))
NUM_TOKENS = 5 * 3
QUESTION = "What?"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_vlm(directory)
    with serving(directory, "--block-size", "8", "--served-model-name", "m") as found:
        yield found


def chat(address: str, data: bytes, **fields: Any) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": address_of(data)}}, {"type": "text", "text": QUESTION}]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        return client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": parts}],  # type: ignore[misc, list-item]
            temperature=0,
            max_tokens=8,
            **fields,
        )


def test_all_apis_show_the_model_the_same(address: str) -> None:
    response = chat(address, IMAGE)
    text, num_tokens = response.choices[0].message.content, response.usage.prompt_tokens
    assert text
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        content = [
            {"type": "input_image", "image_url": address_of(IMAGE), "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ]
        item: Any = {"role": "user", "content": content}
        answer = client.responses.create(model="m", input=[item], temperature=0, max_output_tokens=8)
        counted = client.responses.input_tokens.count(model="m", input=[item])
        assert client.models.list().data[0].model_extra["input_modalities"] == ["text", "image"]  # type: ignore[index]
    assert (answer.output_text, answer.usage.input_tokens) == (text, num_tokens)  # type: ignore[union-attr]
    assert counted.input_tokens == num_tokens
    with anthropic.Anthropic(base_url=address, api_key="none") as claude:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        asked: Any = [{"role": "user", "content": blocks}]
        message = claude.messages.create(model="m", messages=asked, max_tokens=8, extra_body={"temperature": 0})
        assert claude.messages.count_tokens(model="m", messages=asked).input_tokens == num_tokens
    assert message.content[0].text == text  # type: ignore[union-attr]
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_tokens
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address_of(IMAGE)}},
                                             {"type": "text", "text": QUESTION}]}]  # fmt: skip
    tokenized = httpx.post(f"{address}/tokenize", json={"messages": messages}).json()
    assert tokenized["count"] == num_tokens and tokenized["tokens"].count(PAD_ID) == NUM_TOKENS


def test_the_model_sees_which_image_it_is(address: str) -> None:
    def logprob(data: bytes) -> float:
        found: float = chat(address, data, logprobs=True).choices[0].logprobs.content[0].logprob
        return found

    assert logprob(IMAGE) == pytest.approx(logprob(IMAGE), abs=1e-5)
    assert abs(logprob(IMAGE) - logprob(OTHER)) > 1e-3
    # The first block of 8 tokens ends within the image.
    again, new = chat(address, IMAGE), chat(address, file_of(noise(5 * SIDE, 3 * SIDE, seed=3)))
    assert again.usage.prompt_tokens_details.cached_tokens == 24
    assert new.usage.prompt_tokens_details.cached_tokens == 0


def test_wrong_images_are_named(address: str) -> None:
    for data, words in ((IMAGE[:60], "image 1 of the request"), (b"no image", "image 1 of the request")):
        with pytest.raises(openai.BadRequestError, match=words):
            chat(address, data)
    assert chat(address, OTHER).choices[0].message.content
