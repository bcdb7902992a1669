"""A whole model of Mistral's kind: from files to placeholders in rows, and to the tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torch import nn
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from pagewick import LLM, SamplingParams
from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.pixtral_settings import PixtralSettings
from pagewick.images.settings_files import read_settings
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of, noise
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, VARIANTS, make_model, save
from tests.tiny_text import byte_level_backend

# In the form of Mistral's templates.
TEMPLATE = """\
{{- '<s>' }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' }}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- else %}
        {{- message['content'] + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
SPECIAL = ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
# 8 x 8 pixels are a token, and the longest side has 40.
SIDE, EDGE, NUM_TOKENS = 8, 40, 8


def tokenizer_of(special: list[str]) -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(special)
    return Tokenizer(backend, config={"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZER = tokenizer_of(SPECIAL)
IMAGE_ID = TOKENIZER.encode("[IMG]", add_special_tokens=False)[0]
SETTINGS = PixtralSettings(
    4, 2, 1, 1, EDGE**2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, "[IMG_BREAK]", "[IMG_END]", longest_edge=EDGE
)


def turned(image: Image.Image) -> bytes:
    """A photo of a camera that lay on its side."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return file_of(image, "JPEG", exif=exif)


# A tall image, a wide one, one of a single token, and one whose file lies on its side.
FILES = [file_of(noise(35, 18)), file_of(noise(60, 90)), file_of(noise(5, 8)), turned(noise(40, 16))]
GRIDS = [(5, 3), (4, 5), (1, 1), (2, 5)]


def rows_of(number: int) -> str:
    """The tokens of an image by the rule of transformers' PixtralProcessor, which needs torchvision."""
    rows, columns = GRIDS[number]
    row = "[IMG]" * columns
    return "[IMG_BREAK]".join([row] * rows) + "[IMG_END]"


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(FILES[number])}}


def encoder(max_model_len: int = 400) -> PromptEncoder:
    row_end, image_end = (TOKENIZER.encode(token, add_special_tokens=False)[0] for token in SPECIAL[3:])
    images = ImageReader(SETTINGS, IMAGE_ID, "[IMG]", row_ends=(row_end, image_end))
    template = ChatTemplate({"default": TEMPLATE}, TOKENIZER)
    return PromptEncoder(TOKENIZER, template, max_model_len=max_model_len, images=images)


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, part(0), part(1), {"type": "text", "text": "[IMG] b"}]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": [part(2), {"type": "text", "text": "d"}, part(3)]},
]


def test_placeholders_stand_in_rows() -> None:
    tokens = encoder().place_chat(MESSAGES)
    # The text [IMG] of the user's stays text.
    pieces = [f"<s>[INST]a{rows_of(0)}{rows_of(1)}", " b[/INST]c</s>[INST]", f"{rows_of(2)}d{rows_of(3)}[/INST]"]
    first, middle, last = (TOKENIZER.encode(piece, add_special_tokens=False) for piece in pieces)
    found = tokens.token_ids
    assert found[: len(first)] == first and found[-len(middle) - len(last) :] == middle + last
    written = found[len(first) : -len(middle) - len(last)]
    assert TOKENIZER.decode(written, skip_special_tokens=False) == "[IMG]" and IMAGE_ID not in written
    for one, data, (rows, columns) in zip(tokens.images, FILES, GRIDS, strict=True):
        (image,) = encoder().read_image(one, "messages")
        assert (image.start, image.num_tokens, image.row_length) == (one.start, rows * (columns + 1), columns)
        assert (image.height, image.width) == (SIDE * rows, SIDE * columns)
        assert [found[start:end] for start, end in image.runs()] == [[IMAGE_ID] * columns] * rows
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        resized = upright.convert("RGB").resize((image.width, image.height), Image.Resampling.BICUBIC)
        assert image.pixels == resized.tobytes()


def test_the_tokens_between_rows_count() -> None:
    """The image has 5 * 3 placeholders, and 5 tokens more."""
    user = {"role": "user", "content": [part(0)]}
    num_tokens = len(encoder().place_chat([user]).token_ids)
    assert num_tokens == 20 + 3
    assert len(encoder(num_tokens + 1).place_chat([user]).token_ids) == num_tokens
    with pytest.raises(InvalidRequestError, match="the prompt has 23 with its images"):
        encoder(num_tokens).place_chat([user])
    with pytest.raises(InvalidRequestError, match="The images alone have 20"):
        encoder(19).place_chat([user])


def test_tokens_that_the_tokenizer_lacks_are_named(tmp_path: Path) -> None:
    settings = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": EDGE}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    id_of = tokenizer_of(SPECIAL[:4]).id_of
    with pytest.raises(ModelLoadError, match=r"the tokenizer lacks '\[IMG_END\]', which parts the rows of images"):
        ImageReader.of(read_settings(tmp_path), IMAGE_ID, "[IMG]", id_of=id_of)
    assert ImageReader.of(read_settings(tmp_path), IMAGE_ID, "[IMG]", id_of=TOKENIZER.id_of) is not None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-mistral")


def write_tiny_mistral(directory: Path) -> nn.Module:
    """Write the model, and return that of transformers to compare with."""
    entries = VARIANTS["mistral-small-3.1"].all_entries()
    text = {**entries["text_config"], "vocab_size": TOKENIZER.vocab_size + 100}
    model = make_model("mistral-small-3.1", {**entries, "text_config": text, "image_token_index": IMAGE_ID})
    save(model, directory)
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": {"longest_edge": EDGE}}))
    return model


@pytest.fixture(scope="module")
def reference(directory: Path) -> nn.Module:
    return write_tiny_mistral(directory)


def next_tokens(model: nn.Module, token_ids: list[int], images: list[Image.Image]) -> list[int]:
    """The tokens with which transformers continues a prompt, always the likeliest."""
    processor = PixtralImageProcessorPil(
        patch_size={"height": SIDE, "width": SIDE},
        size={"longest_edge": EDGE},
        image_mean=IMAGE_MEAN,
        image_std=IMAGE_STD,
    )
    given = dict(processor(images, return_tensors="pt"))
    whole = list(token_ids)
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([whole])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
        whole.append(int(logits[0, -1].argmax()))
    return whole[len(token_ids) :]


@pytest.fixture(scope="module")
def llm(directory: Path, reference: nn.Module) -> Iterator[LLM]:
    with LLM(str(directory), dtype="float32", max_model_len=400) as model:
        yield model


def test_answers_are_those_of_transformers(llm: LLM, reference: nn.Module) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (answer,) = llm.chat(MESSAGES, params)
    token_ids = encoder().place_chat(MESSAGES).token_ids
    upright = [ImageOps.exif_transpose(Image.open(BytesIO(data))) for data in FILES]
    assert list(answer.outputs[0].token_ids) == next_tokens(reference, token_ids, upright)
    assert answer.prompt_token_ids == token_ids
    # One placeholder of the prompt's own stands for the whole image.
    (other,) = llm.generate([{"prompt": "[INST][IMG][/INST]", "multi_modal_data": {"image": noise(35, 18)}}], params)
    expected = TOKENIZER.encode(f"[INST]{rows_of(0)}[/INST]", add_special_tokens=True)
    assert other.prompt_token_ids == expected
    assert list(other.outputs[0].token_ids) == next_tokens(reference, expected, [noise(35, 18)])


def test_fewer_pixels_are_fewer_rows(directory: Path, reference: nn.Module) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(str(directory), dtype="float32", max_model_len=400, max_image_pixels=6 * SIDE**2) as llm:
        (answer,) = llm.chat([{"role": "user", "content": [part(1)]}], params)
    # 60 x 90 pixels with 384 at most: 2 rows of 3.
    assert list(answer.prompt_token_ids or ()).count(IMAGE_ID) == 6
