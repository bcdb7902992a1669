"""A real server of a model that reads images, asked by the clients of OpenAI and Anthropic, and the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from torch import nn

from pagewick import LLM, SamplingParams
from tests.images.pictures import address_of, file_of, noise
from tests.images.reading_model import TOKENIZER
from tests.images.tiny_vlm import next_tokens, serving, write_tiny_vlm

NUM_TOKENS = 10
# Both images are resized: the first one loses pixels, the second one gains some.
LARGE, SMALL = noise(90, 61, seed=4), noise(9, 17, seed=5)
START, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
LARGE_PIECES = [START + "What is <|vision_start|>", LARGE, "<|vision_end|>?" + END]
LARGE_PART = {"type": "image_url", "image_url": {"url": address_of(file_of(LARGE))}}
SMALL_PART = {"type": "image_url", "image_url": {"url": address_of(file_of(SMALL)), "detail": "auto"}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-vlm")


@pytest.fixture(scope="module")
def reference(directory: Path) -> nn.Module:
    return write_tiny_vlm(directory)


@pytest.fixture(scope="module")
def address(directory: Path, reference: nn.Module) -> Iterator[str]:
    flags = ("--served-model-name", "vlm", "--max-model-len", "400", "--api-server-count", "2")
    with serving(directory, *flags) as found:
        yield found


def text_of(reference: nn.Module, directory: Path, pieces: list[Any]) -> str:
    return TOKENIZER.decode(next_tokens(reference, pieces, NUM_TOKENS), skip_special_tokens=True)


def options(**others: Any) -> dict[str, Any]:
    return {"model": "vlm", "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}, **others}


def test_openais_client_sees_what_transformers_sees(address: str, reference: nn.Module, directory: Path) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        question = [{"type": "text", "text": "What is "}, LARGE_PART, {"type": "text", "text": "?"}]
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(messages=messages, **options())
        expected = text_of(reference, directory, LARGE_PIECES)
        assert answer.choices[0].message.content == expected
        assert answer.usage is not None and answer.usage.prompt_tokens > 50
        chunks = client.chat.completions.create(messages=messages, stream=True, **options())
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
        # A second question about the picture finds its keys and values.
        again = client.chat.completions.create(messages=messages, **options())
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 40
        assert again.choices[0].message.content == expected


def test_two_images_in_two_turns(address: str, reference: nn.Module, directory: Path) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        messages: Any = [
            {"role": "user", "content": [SMALL_PART]},
            {"role": "assistant", "content": "a fox"},
            {"role": "user", "content": [LARGE_PART, {"type": "text", "text": "And this?"}]},
        ]
        answer = client.chat.completions.create(messages=messages, **options())
        pieces = [
            START + "<|vision_start|>", SMALL, "<|vision_end|><|im_end|>\n<|im_start|>assistant\na fox<|im_end|>\n",
            START + "<|vision_start|>", LARGE, "<|vision_end|>And this?" + END,
        ]  # fmt: skip
        assert answer.choices[0].message.content == text_of(reference, directory, pieces)


def test_responses_and_messages_take_images_too(address: str, reference: nn.Module, directory: Path) -> None:
    expected = text_of(reference, directory, LARGE_PIECES)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        content: Any = [
            {"type": "input_text", "text": "What is "},
            {"type": "input_image", "image_url": LARGE_PART["image_url"]["url"], "detail": "auto"},  # type: ignore[index]
            {"type": "input_text", "text": "?"},
        ]
        response = client.responses.create(
            model="vlm", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert response.output_text == expected
        source = {"type": "base64", "media_type": "image/png", "data": address_of(file_of(LARGE)).partition(",")[2]}
        blocks: Any = [
            {"type": "text", "text": "What is "},
            {"type": "image", "source": source},
            {"type": "text", "text": "?"},
        ]
        messages: Any = [{"role": "user", "content": blocks}]
        with anthropic.Anthropic(base_url=address, api_key="none") as other:
            message = other.messages.create(
                model="vlm", messages=messages, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True, "temperature": 0}
            )
            assert [block.text for block in message.content if block.type == "text"] == [expected]
            counted = other.messages.count_tokens(model="vlm", messages=messages)
            assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/fox.png", "data:"),
        ("data:image/png;base64,AAAA", "image"),
        (address_of(file_of(noise(8, 8))[:60]), "image"),
    ],
)
def test_images_that_cannot_be_read_are_named(address: str, url: str, words: str) -> None:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "vlm", "messages": [{"role": "user", "content": content}], "max_tokens": 3}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("messages")
    assert httpx.get(f"{address}/health").status_code == 200


def test_the_models_route_says_that_images_are_read(address: str) -> None:
    (model,) = httpx.get(f"{address}/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]


def test_the_python_api(reference: nn.Module, directory: Path) -> None:
    expected = next_tokens(reference, LARGE_PIECES, NUM_TOKENS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(directory), dtype="float32", max_model_len=400) as llm:
        part = {"type": "image_pil", "image_pil": LARGE}
        content = [{"type": "text", "text": "What is "}, part, {"type": "text", "text": "?"}]
        chat = llm.chat([{"role": "user", "content": content}], params)
        prompt = f"{START}What is <|vision_start|><|image_pad|><|vision_end|>?{END}"
        generated = llm.generate({"prompt": prompt, "multi_modal_data": {"image": LARGE}}, params)
    for output in (*chat, *generated):
        assert list(output.outputs[0].token_ids) == expected


def test_images_are_scaled_down_to_the_flag(reference: nn.Module, directory: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    content = [{"type": "image_pil", "image_pil": LARGE}]
    counts = []
    for limit in (None, 6 * 64):
        with LLM(str(directory), dtype="float32", max_model_len=400, max_image_pixels=limit) as llm:
            (output,) = llm.chat([{"role": "user", "content": content}], params)
            assert output.prompt_token_ids is not None
            counts.append(len(output.prompt_token_ids))
    # 90 x 61 pixels become 72 x 48, or 16 x 16 with the flag.
    assert counts[0] - counts[1] == 9 * 6 - 2 * 2
