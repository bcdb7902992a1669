"""Whole models whose pictures are not whole images: from files to a prompt, and to the tokens of transformers.

Most cut images into tiles. LLaVA 1.5 sees squares. LightOnOCR's have pixels without tokens at their edges, and Kimi
K2.5's are filled up there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import nn
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from pagewick import LLM, SamplingParams
from pagewick.errors import UnsupportedError
from tests.images import (
    test_cohere_settings,
    test_idefics3_settings,
    test_internvl_settings,
    test_kimi_settings,
    test_lfm2_vl_settings,
    test_lighton_settings,
    test_llama4_settings,
    test_llava_next_settings,
    test_llava_onevision_settings,
    test_llava_settings,
    test_minicpm_settings,
)
from tests.images.pictures import address_of, file_of, noise
from tests.images.torch_processors import (
    cohere2_vision_processor,
    kimi_k25_processor,
    lfm2_vl_processor,
    llama4_processor,
)
from tests.models.checkpoints import VARIANTS, make_model, save

NUM_TOKENS = 8
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "block_size": 8}


@dataclass(frozen=True)
class Family:
    """A family of models. variant: of VARIANTS. settings: the tests of its settings, with a tokenizer for it.

    process: returns what transformers' model gets for pictures. changed: the size of the second picture.
    limits: limits of an image's pixels, each with the number of placeholders of the second picture; the tests of
    InternVL's settings have its own. entries: of config.json.
    """

    variant: str
    settings: ModuleType
    backend: Tokenizer
    placeholder: str
    pictures: Sequence[Image.Image]
    changed: tuple[int, int]
    process: Callable[[Path, Sequence[Image.Image]], dict[str, Any]]
    limits: dict[int | None, int]
    entries: dict[str, int] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        # No placeholder is generated, for which transformers would want an image.
        bias = {self.settings.IMAGE_ID: -100}
        return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=bias)

    def part(self, number: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": address_of(file_of(self.pictures[number]))}}

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": [self.part(0), {"type": "text", "text": "a\n"}, self.part(1)]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": [{"type": "text", "text": "d"}, self.part(2)]},
        ]


def process_smolvlm(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(SmolVLMImageProcessorPil.from_pretrained(directory)([list(pictures)], return_tensors="pt"))


def process_internvl(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    processor = GotOcr2ImageProcessorPil.from_pretrained(directory)
    pixels = processor(list(pictures), crop_to_patches=True, return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}


def process_lfm2_vl(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    processor = lfm2_vl_processor(**json.loads((directory / "preprocessor_config.json").read_text()))
    return dict(processor(list(pictures), return_tensors="pt"))


def process_lighton(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(PixtralImageProcessorPil.from_pretrained(directory)(list(pictures), return_tensors="pt"))


def process_kimi(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    processor = kimi_k25_processor(**json.loads((directory / "preprocessor_config.json").read_text()))
    return dict(processor(list(pictures), return_tensors="pt"))


def process_llama4(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    processor = llama4_processor(**json.loads((directory / "preprocessor_config.json").read_text()))
    return {"pixel_values": processor(list(pictures), return_tensors="pt")["pixel_values"].float()}


def process_llava(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(CLIPImageProcessorPil.from_pretrained(directory)(list(pictures), return_tensors="pt"))


def process_llava_next(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(LlavaNextImageProcessorPil.from_pretrained(directory)(list(pictures), return_tensors="pt"))


def process_llava_onevision(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """A list within the list says that the pictures are of one prompt, where several are read in another way."""
    return dict(LlavaOnevisionImageProcessorPil.from_pretrained(directory)([list(pictures)], return_tensors="pt"))


def process_minicpm(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    given = MiniCPMV4_6ImageProcessorPil.from_pretrained(directory)(list(pictures), return_tensors="pt")
    return {name: given[name] for name in ("pixel_values", "target_sizes")}


def process_cohere(directory: Path, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    processor = cohere2_vision_processor(**json.loads((directory / "preprocessor_config.json").read_text()))
    return {"pixel_values": processor(list(pictures), return_tensors="pt")["pixel_values"]}


FAMILIES: tuple[Family, ...] = (
    Family(
        variant="smolvlm",
        settings=test_idefics3_settings,
        backend=test_idefics3_settings.smolvlm_backend(),
        placeholder="<image>",
        # 2 x 3 tiles and the whole, 3 x 2 and the whole, 3 x 1 and the whole.
        pictures=(noise(13, 26), noise(60, 40), noise(90, 20)),
        changed=(60, 40),
        process=process_smolvlm,
        # 3 x 2 tiles and the whole, 2 x 2 and the whole, and one.
        limits={None: 7 * 4, 4 * 27**2: 5 * 4, 27**2: 4},
    ),
    Family(
        variant="internvl",
        settings=test_internvl_settings,
        backend=test_internvl_settings.internvl_backend(),
        placeholder="<IMG_CONTEXT>",
        # 1 x 2 tiles and the whole, one tile, 3 x 2 tiles and the whole.
        pictures=(noise(13, 26), noise(24, 25), noise(90, 60)),
        changed=(24, 25),
        process=process_internvl,
        limits={},
    ),
    Family(
        variant="lfm2-vl",
        settings=test_lfm2_vl_settings,
        backend=test_lfm2_vl_settings.lfm2_backend(),
        placeholder="<image>",
        # One that is not cut, 3 x 2 tiles and the whole, 2 tiles beside each other and the whole.
        pictures=(noise(13, 26), noise(60, 40), noise(24, 50)),
        changed=(60, 40),
        process=process_lfm2_vl,
        # An image that is not cut has at most 6 tokens, and a tile has 4.
        limits={None: 6 * 4 + 6, 2 * 16**2: 2 * 4 + 6, 16**2: 2},
    ),
    Family(
        variant="lighton-ocr",
        settings=test_lighton_settings,
        backend=test_lighton_settings.lighton_backend(),
        placeholder="<|image_pad|>",
        # A patch of 4 pixels beyond squares of 8 in both directions, in one, and in none.
        pictures=(noise(27, 35), noise(60, 40), noise(24, 49)),
        changed=(60, 40),
        process=process_lighton,
        # 7 rows of 5 from 60 x 40 pixels; the others are whole squares.
        limits={None: 7 * 5, 60 * 40 - 1: 7 * 4, 16**2: 2 * 1},
    ),
    Family(
        variant="minicpm-v-4.6",
        settings=test_minicpm_settings,
        backend=test_minicpm_settings.minicpm_backend(),
        placeholder="<|image_pad|>",
        # The whole alone; with 2 x 1 slices; with 1 x 2 slices.
        pictures=(noise(13, 26), noise(60, 30), noise(24, 50)),
        changed=(60, 30),
        process=process_minicpm,
        # The whole has 3 x 1 tokens, and each of the slices 2 x 2.
        limits={None: 3 + 2 * 4, 2 * 32**2: 3 + 2 * 4, 32**2: 3},
    ),
    Family(
        variant="command-a-vision",
        settings=test_cohere_settings,
        backend=test_cohere_settings.cohere_backend(),
        placeholder="<|IMG_PATCH|>",
        # 1 x 2 tiles and the whole, 3 x 2 tiles and the whole, one tile.
        pictures=(noise(13, 26), noise(60, 40), noise(24, 23)),
        changed=(60, 40),
        process=process_cohere,
        limits={None: 7 * 9, 5 * 24**2: 5 * 9, 24**2: 9},
    ),
    Family(
        variant="kimi-k2.5",
        settings=test_kimi_settings,
        backend=test_kimi_settings.kimi_backend(),
        placeholder="<|media_pad|>",
        # Filled up in both directions; scaled down and filled up in one; of whole tokens.
        pictures=(noise(13, 27), noise(100, 59), noise(24, 48)),
        changed=(100, 59),
        process=process_kimi,
        # 7 rows of 4; the largest picture has 36 tokens.
        limits={None: 7 * 4, 30 * 8**2: 6 * 4, 12 * 8**2: 3 * 2},
    ),
    Family(
        variant="llama4-maverick",
        settings=test_llama4_settings,
        backend=test_llama4_settings.llama4_backend(),
        placeholder="<|image|>",
        # 1 x 2 tiles and the whole, 3 x 2 tiles and the whole, one tile.
        pictures=(noise(13, 26), noise(70, 45), noise(24, 23)),
        changed=(70, 45),
        process=process_llama4,
        limits={None: 7 * 9, 5 * 24**2: 5 * 9, 24**2: 9},
    ),
)

# Squares from the middle, of one size.
LLAVA = Family(
    variant="llava-1.5",
    settings=test_llava_settings,
    backend=test_llava_settings.llava_backend(),
    placeholder="<image>",
    pictures=(noise(13, 26), noise(60, 40), noise(90, 9)),
    changed=(60, 40),
    process=process_llava,
    limits={None: 9, 12**2: 9},
    entries={"image_token_index": test_llava_settings.IMAGE_ID},
)
LLAVA_NEXT = Family(
    variant="llava-next",
    settings=test_llava_next_settings,
    backend=test_llava_settings.llava_backend(),
    placeholder="<image>",
    # A canvas of 1 x 2 tiles, one of 2 x 2 with two columns of tokens left out, one of 3 x 1.
    pictures=(noise(13, 26), noise(60, 40), noise(40, 9)),
    changed=(60, 40),
    process=process_llava_next,
    # The whole; 6 rows of 4 + 1, and 4 of 3 + 1.
    limits={None: 9 + 6 * 5, 14 * 28: 9 + 4 * 4},
    entries={"image_token_index": test_llava_settings.IMAGE_ID},
)
LLAVA_ONEVISION = Family(
    variant="llava-onevision",
    settings=test_llava_onevision_settings,
    backend=test_llava_settings.llava_backend(),
    placeholder="<image>",
    # Three are filled up to squares; the second one alone is read in 3 x 2 tiles, whose rows are shrunk.
    pictures=(noise(13, 26), noise(60, 40), noise(40, 9)),
    changed=(60, 40),
    process=process_llava_onevision,
    limits={None: 9 + 5 * 4, 14 * 28: 9 + 4 * 4, 14**2: 9 + 3 * 4},
    entries={"image_token_index": test_llava_settings.IMAGE_ID},
)
# MiniCPM-V 4.7 is 4.6 with positions on a canvas.
FAMILIES += (
    replace(FAMILIES[4], variant="minicpm-v-4.7", entries=test_minicpm_settings.MARKS),
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
)


@dataclass(frozen=True)
class Made:
    """A family's model in files. reference: that of transformers. llm: ours."""

    family: Family
    directory: Path
    reference: nn.Module
    llm: LLM

    def next_tokens(self, token_ids: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """The tokens with which transformers continues a prompt with these pictures, always the likeliest."""
        given = self.family.process(self.directory, [self.family.pictures[number] for number in numbers])
        whole = list(token_ids)
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([whole])
            with torch.inference_mode():
                if "target_sizes" in given:
                    given["mm_token_type_ids"] = (ids == self.family.settings.IMAGE_ID).int()
                logits = self.reference(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0, -1]
                logits[self.family.settings.IMAGE_ID] = -torch.inf
            whole.append(int(logits.argmax()))
        return whole[len(token_ids) :]

    def answer(self, messages: list[dict[str, Any]], llm: LLM | None = None) -> list[int]:
        """The tokens of our answer. llm: the model that is asked, if it is another."""
        (found,) = (llm or self.llm).chat(messages, self.family.params)
        return list(found.outputs[0].token_ids)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.variant)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    family: Family = request.param
    directory = tmp_path_factory.mktemp(f"tiny-{family.variant}")
    entries = VARIANTS[family.variant].all_entries()
    text = {**entries["text_config"], "vocab_size": family.settings.TOKENIZER.vocab_size + 9}
    entries |= {"text_config": text, "image_token_id": family.settings.IMAGE_ID, **family.entries}
    reference = make_model(family.variant, entries)
    save(reference, directory)
    family.backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": family.settings.TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(str(directory), **OPTIONS) as llm:
        yield Made(family, directory, reference, llm)


def test_answers_are_those_of_transformers(made: Made) -> None:
    messages, params = made.family.messages, made.family.params
    (answer,) = made.llm.chat(messages, params)
    prompt = list(answer.prompt_token_ids or ())
    found = list(answer.outputs[0].token_ids)
    assert found == made.next_tokens(prompt, [0, 1, 2])
    # The pictures matter: the second one is another.
    changed = [*messages[0]["content"][:2], {"type": "image", "image": noise(*made.family.changed, seed=2)}]
    other = made.llm.chat([{"role": "user", "content": changed}, *messages[1:]], params)[0]
    assert list(other.prompt_token_ids or ()) == prompt and list(other.outputs[0].token_ids) != found
    given = {"prompt": f"a{made.family.placeholder}", "multi_modal_data": {"image": made.family.pictures[1]}}
    (whole,) = made.llm.generate([given], params)
    assert list(whole.outputs[0].token_ids) == made.next_tokens(whole.prompt_token_ids or (), [1])


@pytest.mark.parametrize(
    "options",
    [
        # Steps end within tiles and between them.
        {"max_num_batched_tokens": 3, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
    ],
)
def test_however_they_are_computed(made: Made, options: dict[str, Any]) -> None:
    messages = made.family.messages
    expected = made.answer(messages)
    assert expected == made.answer(messages), "after a prefix hit"
    with LLM(str(made.directory), **OPTIONS, **options) as other:
        assert made.answer(messages, other) == expected


@pytest.mark.parametrize("made", [FAMILIES[0], *FAMILIES[2:]], ids=lambda family: family.variant, indirect=True)
def test_a_limit_of_pixels(made: Made) -> None:
    question = [{"role": "user", "content": [made.family.part(1)]}]
    counts = {}
    for limit in made.family.limits:
        with LLM(str(made.directory), **OPTIONS, max_image_pixels=limit) as model:
            prompt = list(model.chat(question, made.family.params)[0].prompt_token_ids or ())
        counts[limit] = prompt.count(made.family.settings.IMAGE_ID)
    assert counts == made.family.limits


def test_the_language_model_alone_refuses_images(made: Made) -> None:
    text = [{"role": "user", "content": "a"}]
    with LLM(str(made.directory), **OPTIONS, language_model_only=True) as alone:
        assert made.answer(text, alone) == made.answer(text)
        with pytest.raises(UnsupportedError, match="reads text only"):
            alone.chat(made.family.messages, made.family.params)


@pytest.mark.parametrize("made", FAMILIES[2:5], ids=lambda family: family.variant, indirect=True)
def test_a_preempted_sequence_brings_its_tiles_again(made: Made) -> None:
    family = made.family
    other = [{"role": "user", "content": [{"type": "text", "text": "zz"}, family.part(1), family.part(2)]}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {**OPTIONS, "enable_prefix_caching": False, "max_model_len": 160}
    with LLM(str(made.directory), **options) as model:
        alone = [model.chat(messages, params)[0] for messages in (family.messages, other)]
    num_blocks = sum(-(-len(one.prompt_token_ids or ()) // 8) for one in alone)
    # Both prompts have room, and their answers have not.
    with LLM(str(made.directory), **options, num_kv_blocks=num_blocks + 3) as model:
        together = model.chat([family.messages, other], params)
        assert model._engine.stats().num_preemptions > 0
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]
