"""Settings of Gemma 4 are read from its files, and pixels and prompts are those of its processor in transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.gemma4_settings import Gemma4Settings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of, noise, prepare
from tests.images.test_image_settings import write
from tests.tiny_text import byte_level_backend

# The entries that transformers writes for the processor.
PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
CONFIG = {"image_token_id": 258880, "vision_config": {"position_embedding_size": 10240}}
# A token is 6 x 6 pixels.
SMALL = {**PREPROCESSOR, "patch_size": 2, "max_soft_tokens": 70}


def settings_in(directory: Path, entries: Any, *, is_nested: bool = True, config: Any = CONFIG) -> ImageSettings:
    write(directory, entries if not is_nested else {})
    write(directory, {"image_processor": entries} if is_nested else {}, "processor_config.json")
    write(directory, config, "config.json")
    return read_settings(directory)


def small(max_pixels: int | None = None, **changes: Any) -> ImageSettings:
    found = settings_of({**SMALL, **changes}, "a file")
    return found if max_pixels is None else found.limited(max_pixels)


@pytest.mark.parametrize("changes", [{}, {"max_soft_tokens": 1120, "rescale_factor": 0.25, "resample": 2}])
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any], is_nested: bool) -> None:
    entries = {**PREPROCESSOR, **changes}
    found = settings_in(tmp_path, entries, is_nested=is_nested)
    write(tmp_path, entries)
    wanted = Gemma4ImageProcessorPil.from_pretrained(tmp_path)
    assert isinstance(found, Gemma4Settings) and not found.has_fixed_tokens
    assert (found.patch_size, found.merge_size) == (wanted.patch_size, wanted.pooling_kernel_size)
    assert found.max_tokens == wanted.max_soft_tokens and found.token_side == 48
    assert found.rescale_factor == wanted.rescale_factor and found.resample == wanted.resample
    assert (found.mean, found.std, found.temporal_patch_size) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1)


def test_entries_that_files_leave_out(tmp_path: Path) -> None:
    found = settings_in(tmp_path, {"image_processor_type": "Gemma4ImageProcessorPil"}, config={})
    assert found == settings_in(tmp_path, PREPROCESSOR)
    wanted = Gemma4ImageProcessorPil()
    assert (found.max_tokens, found.patch_size) == (wanted.max_soft_tokens, wanted.patch_size)
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)


def test_numbers_are_normalised_only_if_the_file_says_it() -> None:
    given = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.2]}
    assert small(**given) == small()
    found = small(**given, do_normalize=True)
    assert (found.mean, found.std) == ((0.5, 0.4, 0.3), (0.5, 0.6, 0.2))


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"max_soft_tokens": 256}, CONFIG, r"max_soft_tokens .* is '256'; Pagewick knows 70, 140, 280, 560, 1120 only"),
        ({"do_resize": False}, CONFIG, "do_resize"),
        ({"do_rescale": False}, CONFIG, "do_rescale"),
        ({"do_normalize": "no"}, CONFIG, "do_normalize"),
        ({"resample": 6}, CONFIG, "resample"),
        ({"patch_size": 0}, CONFIG, "patch_size"),
        ({"pooling_kernel_size": 1.5}, CONFIG, "pooling_kernel_size"),
        (
            {},
            {"vision_config": {"position_embedding_size": 839}},
            r"allows 840 patches in a row, and the model has 839 positions \(position_embedding_size in vision_config",
        ),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], config: Any, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, PREPROCESSOR | changes, config=config)


def test_the_longest_row_may_have_as_many_patches_as_there_are_positions(tmp_path: Path) -> None:
    settings_in(tmp_path, PREPROCESSOR, config={"vision_config": {"position_embedding_size": 840}})


SIZES = [
    (1, 1), (1, 200), (200, 1), (3, 511), (511, 3), (48, 48), (672, 960), (1024, 768), (37, 4099), (5000, 26), (999, 7),
]  # fmt: skip


@pytest.mark.parametrize("num_tokens", [70, 280, 1120])
def test_sizes_are_those_of_transformers(num_tokens: int) -> None:
    settings = settings_of({**PREPROCESSOR, "max_soft_tokens": num_tokens}, "a file")
    random = np.random.default_rng(num_tokens)
    sizes = [*SIZES, *(tuple(map(int, pair)) for pair in np.exp(random.uniform(2.0, 7.0, (300, 2))))]
    tokens = []
    for height, width in sizes:
        expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * num_tokens, 3)
        assert settings.resized(height, width) == expected, (height, width)
        tokens.append(settings.num_tokens(height, width))
        assert tokens[-1] == expected[0] * expected[1] // 48**2
    assert max(tokens) <= settings.max_tokens == num_tokens and len(set(tokens)) > 10


def test_a_limit_of_pixels_is_one_of_tokens() -> None:
    """The rule of transformers, for numbers of tokens that its processor does not take."""
    settings = settings_of(PREPROCESSOR, "a file")
    assert settings.limited(280 * 48**2) == settings.limited(10**9) == settings
    for num_tokens in (2, 5, 69, 100):
        for more in (0, 48**2 - 1):
            limited = settings.limited(num_tokens * 48**2 + more)
            assert limited.max_tokens == num_tokens
            for height, width in SIZES:
                expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * num_tokens, 3)
                assert limited.resized(height, width) == expected, (num_tokens, height, width)
    one = settings.limited(48**2)
    assert {one.resized(*size) for size in [*SIZES, (7, 7), (31, 31), (1000, 1000)]} == {(48, 48)}
    with pytest.raises(ConfigError, match="at least 2304, the pixels of a token"):
        settings.limited(48**2 - 1)


@pytest.mark.parametrize(("height", "width"), [(40, 61), (200, 9), (1, 1), (36, 60), (9, 400)])
@pytest.mark.parametrize("resample", [2, 3])
def test_pixels_are_those_of_transformers(height: int, width: int, resample: int) -> None:
    image = noise(height, width)
    processor = Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70, resample=resample, do_rescale=False)
    expected = processor([image], return_tensors="np")
    found = prepare(file_of(image), small(resample=resample))
    (num_tokens,) = expected["num_soft_tokens_per_image"]
    rows, columns, _ = (size // 2 for size in found.pixels.shape)
    patches = expected["pixel_values"][0][: rows * columns].reshape(rows, columns, 2, 2, 3)
    assert np.array_equal(found.pixels, patches.transpose(0, 2, 1, 3, 4).reshape(found.pixels.shape))
    assert found.num_tokens == num_tokens == rows * columns // 9 and num_tokens > 20
    places = expected["image_position_ids"][0]
    assert places[rows * columns - 1].tolist() == [columns - 1, rows - 1] and (places[rows * columns :] == -1).all()


def test_an_image_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
        small().resized(1, 201)


SPECIAL = ["<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"]
# In the form of Gemma 4's templates.
TEMPLATE = """\
{{ '<s>' }}
{%- for message in messages -%}
    {{ '<|turn>' + message.role + '\\n' }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- else -%}
        {%- for item in message.content -%}
            {%- if item.type == 'text' -%}
                {{ item.text | trim }}
            {%- elif item.type == 'image' -%}
                {{ '<|image|>' }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<turn|>\\n' }}
{%- endfor -%}
"""


def gemma_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(gemma_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
IMAGE_ID = TOKENIZER.encode("<|image|>", add_special_tokens=False)[0]
PICTURES = [noise(10, 20), noise(3, 4), noise(30, 7)]


def tokens_of_transformers(text: str, *numbers: int) -> list[int]:
    """The processor's rule; the whole processor needs torchvision, which reads videos."""
    processor = Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70)
    given = processor([PICTURES[number] for number in numbers], return_tensors="np")
    names = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    parts = text.split("<|image|>")
    whole = parts[0]
    for index, part in enumerate(parts[1:]):
        whole += Gemma4Processor.replace_image_token(names, given, index) + part
    return TOKENIZER.encode(whole, add_special_tokens=False)


def prompts() -> PromptEncoder:
    images = ImageReader.of(small(), IMAGE_ID, "<|image|>", id_of=TOKENIZER.id_of)
    return PromptEncoder(TOKENIZER, ChatTemplate({"default": TEMPLATE}, TOKENIZER), max_model_len=400, images=images)


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(PICTURES[number]))}}


def user(*parts: Any) -> dict[str, Any]:
    given = [{"type": "text", "text": one} if isinstance(one, str) else part(one) for one in parts]
    return {"role": "user", "content": given}


def test_prompts_are_those_of_transformers() -> None:
    messages = [user(0, "a", 1, "b"), {"role": "assistant", "content": "c"}, user("d", 2)]
    encoder = prompts()
    text = encoder.render_chat(messages).text
    assert text == (
        "<s><|turn>user\n<|image|>a<|image|>b<turn|>\n<|turn>assistant\nc<turn|>\n<|turn>user\nd<|image|><turn|>\n"
    )
    tokens = encoder.place_chat(messages)
    assert tokens.token_ids == tokens_of_transformers(text, 0, 1, 2)
    start, end = (TOKENIZER.id_of(word) for word in ("<|image>", "<image|>"))
    for one in tokens.images:
        around = tokens.token_ids[one.start - 1 : one.start + one.num_tokens + 1]
        assert around == [start, *[IMAGE_ID] * one.num_tokens, end]
        (image,) = encoder.read_image(one, "messages")
        assert image.num_tokens == image.height * image.width // 36 == one.num_tokens and image.row_length == 0
    assert len({one.num_tokens for one in tokens.images}) > 1


def test_text_prompts_are_those_of_transformers() -> None:
    text = "a\n<|image|>\n b"
    tokens = prompts().place_images(text, [PICTURES[1]])
    assert tokens.token_ids == tokens_of_transformers(text, 1)
    # Without an image, the words stay as they are; and so do token ids.
    assert prompts().place_images(text, []).token_ids == prompts().encode(text)
    (image,) = prompts().place_images([5, IMAGE_ID, 6], [PICTURES[0]]).images
    ids = prompts().place_images([5, IMAGE_ID, 6], [PICTURES[0]]).token_ids
    assert ids == [5, *[IMAGE_ID] * image.num_tokens, 6]


@pytest.mark.parametrize("words", ["<|image|>", "<|image>"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_words_of_a_message_stay_text(words: str, role: str) -> None:
    messages = [user("a", 0), {"role": role, "content": f"b{words}c"}]
    found = prompts().place_chat(messages)
    (image,) = found.images
    without = prompts().place_chat([user("a", 0), {"role": role, "content": "bc"}])
    begin = len(without.token_ids) - 3
    assert found.token_ids[:begin] == without.token_ids[:begin] and image.start < begin
    written = found.token_ids[begin:]
    assert not {IMAGE_ID, TOKENIZER.id_of("<|image>")} & {*written}
    assert words in TOKENIZER.decode(written, skip_special_tokens=False)


@pytest.mark.parametrize("missing", ["<|image>", "<image|>"])
def test_tokens_that_the_tokenizer_lacks_are_named(missing: str) -> None:
    with pytest.raises(ModelLoadError, match=r"the tokenizer lacks '<\|?image\|?>', which marks the places of images"):
        ImageReader.of(
            small(), IMAGE_ID, "<|image|>", id_of=lambda text: None if text == missing else TOKENIZER.id_of(text)
        )
