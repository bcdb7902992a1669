"""A whole model of Gemma 4's kind: from files to the tokens of transformers, alone and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from pagewick import LLM, SamplingParams
from pagewick.errors import InvalidRequestError, UnsupportedError
from tests.images.pictures import address_of, file_of, noise
from tests.images.test_gemma4_settings import IMAGE_ID, TEMPLATE, TOKENIZER, gemma_backend
from tests.models.checkpoints import VARIANTS, make_model, save

NAME, NUM_TOKENS = "gemma-4-multimodal", 8
# A tall image, a wide one, and a small one, which becomes large.
PICTURES = [noise(35, 18), noise(60, 190), noise(5, 8)]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def write_tiny_gemma(directory: Path) -> nn.Module:
    """Write the model, and return that of transformers to compare with."""
    entries = VARIANTS[NAME].all_entries()
    size = TOKENIZER.vocab_size + 9
    sizes = {"vocab_size": size, "vocab_size_per_layer_input": size}
    # The other tokens that transformers reads as padding are not in the vocabulary.
    others = dict.fromkeys(("video_token_id", "audio_token_id"), size)
    changes = {"text_config": {**entries["text_config"], **sizes}, "image_token_id": IMAGE_ID, **others}
    model = make_model(NAME, {**entries, **changes})
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
    with LLM(str(directory), dtype="float32", max_model_len=300) as model:
        yield model


def next_tokens(model: nn.Module, token_ids: list[int], images: list[Image.Image]) -> list[int]:
    """The tokens with which transformers continues a prompt, always the likeliest."""
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    found = processor(images, return_tensors="pt")
    given = {name: found[name] for name in ("pixel_values", "image_position_ids")}
    whole = list(token_ids)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([whole]), **given).logits
        whole.append(int(logits[0, -1].argmax()))
    return whole[len(token_ids) :]


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(PICTURES[number]))}}


MESSAGES = [
    {"role": "user", "content": [part(0), {"type": "text", "text": "a\n"}, part(1)]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": [{"type": "text", "text": "d"}, part(2)]},
]


def test_answers_are_those_of_transformers(llm: LLM, reference: nn.Module) -> None:
    (answer,) = llm.chat(MESSAGES, PARAMS)
    prompt = list(answer.prompt_token_ids or ())
    # 11 x 6, 4 x 14 and 6 x 10 tokens.
    assert prompt.count(IMAGE_ID) == 66 + 56 + 60
    found = list(answer.outputs[0].token_ids)
    assert found == next_tokens(reference, prompt, PICTURES) and len(set(found)) > 1
    # The picture matters.
    others = [Image.new("RGB", picture.size) for picture in PICTURES]
    assert found != next_tokens(reference, prompt, others)
    (other,) = llm.generate([{"prompt": "a<|image|>", "multi_modal_data": {"image": PICTURES[1]}}], PARAMS)
    expected = TOKENIZER.encode("a<|image>" + "<|image|>" * 56 + "<image|>", add_special_tokens=True)
    assert list(other.prompt_token_ids or ()) == expected
    assert list(other.outputs[0].token_ids) == next_tokens(reference, expected, PICTURES[1:2])


def test_two_ranks_see_the_same(directory: Path, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids
    with LLM(str(directory), dtype="float32", max_model_len=300, tensor_parallel_size=2) as ranks:
        assert ranks.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids == expected


def test_fewer_pixels_are_fewer_tokens(directory: Path, llm: LLM) -> None:
    with LLM(str(directory), dtype="float32", max_model_len=300, max_image_pixels=11 * 12**2) as limited:
        (answer,) = limited.chat([{"role": "user", "content": [part(1)]}], PARAMS)
    # 60 x 190 pixels: one row of 5, as both sides are rounded down.
    assert list(answer.prompt_token_ids or ()).count(IMAGE_ID) == 5


def test_the_language_model_alone_refuses_images(directory: Path, llm: LLM) -> None:
    text = [{"role": "user", "content": "a"}]
    expected = llm.chat(text, PARAMS)[0].outputs[0].token_ids
    with LLM(str(directory), dtype="float32", max_model_len=300, language_model_only=True) as alone:
        assert alone.chat(text, PARAMS)[0].outputs[0].token_ids == expected
        with pytest.raises(UnsupportedError, match="reads text only"):
            alone.chat(MESSAGES, PARAMS)


def test_sound_and_video_stay_refused(llm: LLM) -> None:
    for kind in ("audio", "video"):
        with pytest.raises(InvalidRequestError, match=kind):
            llm.chat([{"role": "user", "content": [{"type": f"{kind}_url", f"{kind}_url": {"url": "x"}}]}], PARAMS)
