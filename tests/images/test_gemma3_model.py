"""A whole model of Gemma 3's kind: from files to the tokens of transformers, alone and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from pagewick import LLM, SamplingParams
from pagewick.errors import ConfigError, UnsupportedError
from tests.images.pictures import address_of, file_of, noise
from tests.images.test_gemma3_settings import IMAGE_ID, TEMPLATE, TOKENIZER, gemma_backend
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, VARIANTS, make_model, save

NUM_IMAGE_TOKENS = 16
SIDE, NUM_TOKENS = 48, 8
PICTURES = [noise(35, 18), noise(60, 90), noise(5, 8)]


def write_tiny_gemma(directory: Path, **text_entries: Any) -> nn.Module:
    """Write the model, and return that of transformers to compare with. text_entries: of its text part."""
    entries = VARIANTS["gemma-3-multimodal"].all_entries()
    text = {**entries["text_config"], "vocab_size": TOKENIZER.vocab_size + 9, **text_entries}
    changes = {"text_config": text, "image_token_index": IMAGE_ID, "mm_tokens_per_image": NUM_IMAGE_TOKENS}
    model = make_model("gemma-3-multimodal", {**entries, **changes})
    save(model, directory)
    gemma_backend().save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-gemma")


@pytest.fixture(scope="module")
def reference(directory: Path) -> nn.Module:
    return write_tiny_gemma(directory)


@pytest.fixture(scope="module")
def llm(directory: Path, reference: nn.Module) -> Iterator[LLM]:
    with LLM(str(directory), dtype="float32", max_model_len=200) as model:
        yield model


def next_tokens(model: nn.Module, token_ids: list[int], images: list[Image.Image]) -> list[int]:
    """The tokens with which transformers continues a prompt, always the likeliest."""
    sides = {"height": SIDE, "width": SIDE}
    processor = Gemma3ImageProcessorPil(size=sides, image_mean=IMAGE_MEAN, image_std=IMAGE_STD)
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    whole = list(token_ids)
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([whole])
        with torch.inference_mode():
            types = (ids == IMAGE_ID).long()
            types[:, len(token_ids) :] = 0
            logits = model(input_ids=ids, pixel_values=pixels, token_type_ids=types).logits
        whole.append(int(logits[0, -1].argmax()))
    return whole[len(token_ids) :]


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(PICTURES[number]))}}


MESSAGES = [
    {"role": "user", "content": [part(0), {"type": "text", "text": "a\n"}, part(1)]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": [{"type": "text", "text": "d"}, part(2)]},
]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_answers_are_those_of_transformers(llm: LLM, reference: nn.Module) -> None:
    (answer,) = llm.chat(MESSAGES, PARAMS)
    prompt = list(answer.prompt_token_ids or ())
    assert prompt.count(IMAGE_ID) == 3 * NUM_IMAGE_TOKENS
    assert list(answer.outputs[0].token_ids) == next_tokens(reference, prompt, PICTURES)
    # The picture matters.
    assert list(answer.outputs[0].token_ids) != next_tokens(reference, prompt, PICTURES[::-1])
    (other,) = llm.generate([{"prompt": "a<start_of_image>", "multi_modal_data": {"image": PICTURES[1]}}], PARAMS)
    text = "a\n\n<start_of_image>" + "<image_soft_token>" * NUM_IMAGE_TOKENS + "<end_of_image>\n\n"
    expected = TOKENIZER.encode(text, add_special_tokens=True)
    assert list(other.prompt_token_ids or ()) == expected
    assert list(other.outputs[0].token_ids) == next_tokens(reference, expected, PICTURES[1:2])


def test_two_ranks_see_the_same(directory: Path, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids
    with LLM(str(directory), dtype="float32", max_model_len=200, tensor_parallel_size=2) as ranks:
        assert ranks.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids == expected


def test_the_size_of_images_is_fixed(directory: Path, llm: LLM) -> None:
    with pytest.raises(ConfigError, match="at least 2304, because the model reads every image as 48 x 48 pixels"):
        LLM(str(directory), dtype="float32", max_model_len=200, max_image_pixels=SIDE**2 - 1)


def test_the_language_model_alone_refuses_images(directory: Path, llm: LLM) -> None:
    text = [{"role": "user", "content": "a"}]
    expected = llm.chat(text, PARAMS)[0].outputs[0].token_ids
    with LLM(str(directory), dtype="float32", max_model_len=200, language_model_only=True) as alone:
        assert alone.chat(text, PARAMS)[0].outputs[0].token_ids == expected
        with pytest.raises(UnsupportedError, match="reads text only"):
            alone.chat(MESSAGES, PARAMS)
