"""Settings of LLaVA-OneVision are read from its files, and sizes, pixels and prompts are those of its processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.decoding import prepare
from pagewick.images.llava_onevision_settings import LlavaOnevisionSettings
from pagewick.images.settings_files import read_settings, settings_of
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.images.test_llava_settings import IMAGE_ID, TEMPLATE, TOKENIZER, llava_backend

__all__ = ["IMAGE_ID", "TEMPLATE", "TOKENIZER"]

HALF = [0.5, 0.5, 0.5]
# In the form of the files that are published.
ENTRIES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
    "image_mean": HALF, "image_processor_type": "LlavaOnevisionImageProcessor", "image_std": HALF,
    "processor_class": "LlavaOnevisionProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"height": 384, "width": 384},
    "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "image_grid_pinpoints": ENTRIES["image_grid_pinpoints"], "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {"image_size": 384, "model_type": "siglip_vision_model", "patch_size": 14},
}  # fmt: skip
PROCESSOR = {"num_image_tokens": 729, "processor_class": "LlavaOnevisionProcessor"}
MEAN = [0.5, 0.4, 0.3]
CANVASES = [[14 * rows, 14 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
SMALL = {**ENTRIES, "image_grid_pinpoints": CANVASES, "image_mean": MEAN, "size": {"height": 14, "width": 14}}
SMALL_CONFIG: dict[str, Any] = {
    "image_grid_pinpoints": CANVASES, "vision_aspect_ratio": "anyres_max_2",
    "vision_config": {"image_size": 14, "model_type": "siglip_vision_model", "patch_size": 4},
}  # fmt: skip
SMALL_PROCESSOR = {"vision_aspect_ratio": "anyres_max_2"}
PICTURES = [noise(27, 35), noise(90, 61), noise(16, 3)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<image>", PICTURES)


def small() -> LlavaOnevisionSettings:
    found = settings_of(SMALL, "file", SMALL_CONFIG, SMALL_PROCESSOR)
    assert isinstance(found, LlavaOnevisionSettings)
    return found


class ProcessorOfImages(LlavaOnevisionProcessor):  # type: ignore[misc]
    def check_argument_for_proper_class(self, name: str, given: Any) -> None:
        """Leave out the check of parts: it looks for processors of videos, which need torchvision."""


def processor_of(entries: dict[str, Any], num_image_tokens: int, ratio: str) -> Any:
    return ProcessorOfImages(
        LlavaOnevisionImageProcessorPil(**entries), PreTrainedTokenizerFast(tokenizer_object=llava_backend()),
        num_image_tokens=num_image_tokens, vision_feature_select_strategy="full", vision_aspect_ratio=ratio,
    )  # fmt: skip


def test_settings_are_those_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, "config.json")
    write(tmp_path, PROCESSOR, "processor_config.json")
    plain = {"image_processor_type": "LlavaOnevisionImageProcessorFast"}
    for entries in (ENTRIES, {**ENTRIES, "rescale_factor": 0.25, "resample": 2}, plain):
        found = read_settings(write(tmp_path, entries))
        wanted = LlavaOnevisionImageProcessorPil.from_pretrained(tmp_path)
        assert isinstance(found, LlavaOnevisionSettings)
        assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
        assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
        assert (found.tile_side, [*map(list, found.canvases)]) == (wanted.size["height"], wanted.image_grid_pinpoints)
        assert (found.most_tiles, found.patch_size) == (9, 14)


@pytest.mark.parametrize(
    ("entries", "processor", "reason"),
    [
        ({"do_resize": False}, {}, "do_resize"),
        ({"do_center_crop": True}, {}, "crop_size|do_center_crop"),
        ({"size": {"height": 378, "width": 378}}, {}, "size and crop_size in .* must both be 384"),
        ({"image_grid_pinpoints": [[384, 768]]}, {}, "image_grid_pinpoints in .* and .* differ"),
        ({}, {"num_image_tokens": 700}, "num_image_tokens in .* is '700'; Pagewick knows 729 only"),
        ({}, {"vision_aspect_ratio": "anyres_max_4"}, "vision_aspect_ratio in .* and .* differ"),
        ({}, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio in .* is 'pad'; Pagewick knows anyres_max_"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    entries: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    settings_of(ENTRIES, "file", CONFIG, PROCESSOR)
    entries = {"crop_size": {"height": 380, "width": 380}, **entries} if "do_center_crop" in entries else entries
    with pytest.raises(ModelLoadError, match=reason):
        settings_of({**ENTRIES, **entries}, "preprocessor_config.json", CONFIG, {**PROCESSOR, **processor})


side = st.one_of(st.integers(1, 100), st.integers(100, 6000))
LARGE = processor_of(ENTRIES, 729, "anyres_max_9")


@given(side, side)
@example(1, 200)
@example(200, 1)
@example(333, 500)
@example(2304, 2304)
@example(5000, 3000)
def test_numbers_of_tokens_are_those_of_transformers(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    found = settings_of(ENTRIES, "file", CONFIG)
    wanted = LARGE._get_number_of_features(height, width, 384, 384)
    assert found.num_tokens(height, width) == wanted <= found.most_tokens(len)
    assert found.for_images(2).num_tokens(height, width) == 730


@pytest.mark.parametrize(
    ("height", "width"), [(40, 61), (90, 9), (1, 1), (28, 28), (5, 200), (14, 29), (300, 301), (21, 18)]
)
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    image = noise(height, width)
    processor = LlavaOnevisionImageProcessorPil(**{**SMALL, "do_rescale": False, "do_normalize": False})
    (expected,) = processor([image], return_tensors="np")["pixel_values"]
    whole, *tiled = prepare(file_of(image), small())
    # The model sees 3 x 3 patches of 14 x 14 pixels.
    assert np.array_equal(whole.pixels, expected[0].transpose(1, 2, 0)[:12, :12])
    assert whole.num_tokens == 9 and not whole.has_end
    for one in tiled:
        rows, columns = (length // 14 for length in one.pixels.shape[:2])
        tiles = one.pixels.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 14, 14)
        assert np.array_equal(tiles, expected[1:])
    (expected, _) = processor([[image, image]], return_tensors="np")["pixel_values"]
    (square,) = prepare(file_of(image), small().for_images(2))
    assert np.array_equal(square.pixels, expected[0].transpose(1, 2, 0)[:12, :12])
    assert square.num_tokens == 10 and square.has_end and square.edges is None


def test_a_square_may_not_become_too_large() -> None:
    """One of several images is filled up to a square before it is scaled down."""
    assert small().num_tokens(100, 9000) and small().for_images(2).num_tokens(41, 8192) == 10
    with pytest.raises(InvalidRequestError, match="fills its 8193 x 41 pixels up to a square"):
        small().for_images(2).num_tokens(41, 8193)


def test_prompts_are_those_of_transformers() -> None:
    processor = processor_of(SMALL, 9, "anyres_max_2")
    for pictures in (PICTURES, PICTURES[1:2]):
        numbers = [PICTURES.index(one) for one in pictures]
        tokens = PLACING.prompts(small()).place_chat([PLACING.user(*numbers, "a")])
        text = f"USER: {('<image>' + chr(10)) * len(pictures)}a ASSISTANT:"
        assert tokens.token_ids == processor(images=[pictures], text=[text])["input_ids"][0]
