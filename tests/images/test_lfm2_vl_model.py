"""A whole model of LFM2-VL's kind: from files to tiles in a prompt, and to the tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pagewick import LLM, SamplingParams
from pagewick.errors import UnsupportedError
from tests.images.pictures import address_of, file_of, noise
from tests.images.test_lfm2_vl_settings import IMAGE_ID, TEMPLATE, TOKENIZER, lfm2_backend
from tests.images.torch_processors import lfm2_vl_processor
from tests.models.checkpoints import VARIANTS, make_model, save

NUM_TOKENS = 8
# One that is not cut, 3 x 2 tiles and the whole, 2 tiles beside each other and the whole.
PICTURES = [noise(13, 26), noise(60, 40), noise(24, 50)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "block_size": 8}
# No placeholder is generated, for which transformers would want an image.
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={IMAGE_ID: -100})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-lfm2-vl")


@pytest.fixture(scope="module")
def reference(directory: Path) -> nn.Module:
    """The model of transformers, whose files are written."""
    entries = VARIANTS["lfm2-vl"].all_entries()
    text = {**entries["text_config"], "vocab_size": TOKENIZER.vocab_size + 9}
    model = make_model("lfm2-vl", {**entries, "text_config": text, "image_token_id": IMAGE_ID})
    save(model, directory)
    lfm2_backend().save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def llm(directory: Path, reference: nn.Module) -> Iterator[LLM]:
    with LLM(str(directory), **OPTIONS) as model:
        yield model


def next_tokens(directory: Path, model: nn.Module, token_ids: list[int], numbers: list[int]) -> list[int]:
    """The tokens with which transformers continues a prompt with these pictures, always the likeliest."""
    processor = lfm2_vl_processor(**json.loads((directory / "preprocessor_config.json").read_text()))
    given = processor([PICTURES[number] for number in numbers], return_tensors="pt")
    whole = list(token_ids)
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([whole])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, -1]
            logits[IMAGE_ID] = -torch.inf
        whole.append(int(logits.argmax()))
    return whole[len(token_ids) :]


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(PICTURES[number]))}}


MESSAGES = [
    {"role": "user", "content": [part(0), {"type": "text", "text": "a\n"}, part(1)]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": [{"type": "text", "text": "d"}, part(2)]},
]


def test_answers_are_those_of_transformers(directory: Path, llm: LLM, reference: nn.Module) -> None:
    (answer,) = llm.chat(MESSAGES, PARAMS)
    prompt = list(answer.prompt_token_ids or ())
    found = list(answer.outputs[0].token_ids)
    assert found == next_tokens(directory, reference, prompt, [0, 1, 2])
    # The pictures matter: the first tile of the second one is another.
    changed = [*MESSAGES[0]["content"][:2], {"type": "image", "image": noise(60, 40, seed=2)}]
    other = llm.chat([{"role": "user", "content": changed}, *MESSAGES[1:]], PARAMS)[0]
    assert list(other.prompt_token_ids or ()) == prompt and list(other.outputs[0].token_ids) != found
    (whole,) = llm.generate([{"prompt": "a<image>", "multi_modal_data": {"image": PICTURES[1]}}], PARAMS)
    expected = next_tokens(directory, reference, list(whole.prompt_token_ids or ()), [1])
    assert list(whole.outputs[0].token_ids) == expected


@pytest.mark.parametrize(
    "options",
    [
        # Steps end within tiles and between them.
        {"max_num_batched_tokens": 3, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
    ],
)
def test_however_they_are_computed(directory: Path, llm: LLM, options: dict[str, Any]) -> None:
    expected = llm.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids
    assert expected == llm.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids, "after a prefix hit"
    with LLM(str(directory), **OPTIONS, **options) as other:
        assert other.chat(MESSAGES, PARAMS)[0].outputs[0].token_ids == expected


def test_a_preempted_sequence_brings_its_tiles_again(directory: Path, reference: nn.Module) -> None:
    other = [{"role": "user", "content": [{"type": "text", "text": "zz"}, part(1), part(2)]}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {**OPTIONS, "enable_prefix_caching": False, "max_model_len": 160}
    with LLM(str(directory), **options) as model:
        alone = [model.chat(messages, params)[0] for messages in (MESSAGES, other)]
    num_blocks = sum(-(-len(one.prompt_token_ids or ()) // 8) for one in alone)
    # Both prompts have room, and their answers have not.
    with LLM(str(directory), **options, num_kv_blocks=num_blocks + 3) as model:
        together = model.chat([MESSAGES, other], params)
        assert model._engine.stats().num_preemptions > 0
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]


def test_a_limit_of_pixels_limits_the_tiles(directory: Path, llm: LLM) -> None:
    """An image that is not cut has at most 6 tokens, and a tile has 4."""
    question = [{"role": "user", "content": [part(1)]}]
    counts = []
    for limit in (None, 2 * 16**2, 16**2):
        with LLM(str(directory), **OPTIONS, max_image_pixels=limit) as model:
            prompt = list(model.chat(question, PARAMS)[0].prompt_token_ids or ())
        counts.append(prompt.count(IMAGE_ID))
    assert counts == [6 * 4 + 6, 2 * 4 + 6, 2]


def test_the_language_model_alone_refuses_images(directory: Path, llm: LLM) -> None:
    text = [{"role": "user", "content": "a"}]
    expected = llm.chat(text, PARAMS)[0].outputs[0].token_ids
    with LLM(str(directory), **OPTIONS, language_model_only=True) as alone:
        assert alone.chat(text, PARAMS)[0].outputs[0].token_ids == expected
        with pytest.raises(UnsupportedError, match="reads text only"):
            alone.chat(MESSAGES, PARAMS)
