"""Settings of GLM-4.1V and GLM-4.6V are read from their files, and sizes and pixels are those of their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

from pagewick.errors import ModelLoadError
from pagewick.images.glm_settings import GlmSettings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise, prepare
from tests.images.test_image_settings import CLIP_MEAN, CLIP_STD, write
from tests.tiny_text import byte_level_backend

# In the form of the files that are published.
ENTRIES = {
    "do_rescale": True,
    "image_mean": CLIP_MEAN,
    "image_processor_type": "Glm4vImageProcessor",
    "image_std": CLIP_STD,
    "merge_size": 2,
    "patch_size": 14,
    "processor_class": "Glm4vProcessor",
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    "temporal_patch_size": 2,
}
SMALL = {**ENTRIES, "patch_size": 3, "size": {"shortest_edge": 200, "longest_edge": 6000}}


@pytest.mark.parametrize(
    ("kind", "processor"), [("Glm4v", Glm4vImageProcessorPil), ("Glm46V", Glm46VImageProcessorPil)]
)
def test_settings_are_those_of_transformers(tmp_path: Path, kind: str, processor: Any) -> None:
    entries = {**ENTRIES, "rescale_factor": 0.25, "image_processor_type": f"{kind}ImageProcessor"}
    for some in (entries, {"image_processor_type": f"{kind}ImageProcessorFast"}):
        found, wanted = read_settings(write(tmp_path, some)), processor.from_pretrained(tmp_path)
        assert isinstance(found, GlmSettings)
        assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
        assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
        assert (found.patch_size, found.merge_size) == (wanted.patch_size, wanted.merge_size)
        assert found.temporal_patch_size == wanted.temporal_patch_size
        limits = wanted.size["shortest_edge"], wanted.size["longest_edge"]
        assert (2 * found.min_pixels, 2 * found.max_pixels) == limits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample"),
        (
            {"size": {"longest_edge": 12545}},
            "size.longest_edge in .* is 12545, and must be a multiple of temporal_patch",
        ),
        ({"size": {"longest_edge": 100}}, "at least 6272 and at most 50 pixels"),
        ({"size": {"shortest_edge": 0}}, "size.shortest_edge in .* must be a whole number from 1"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_of({**ENTRIES, **changes}, "preprocessor_config.json")


side = st.one_of(st.integers(1, 100), st.integers(100, 6000))


@given(side, side)
@example(1, 200)
@example(27, 28)
@example(5000, 5000)
@example(42, 70)
def test_sizes_are_those_of_transformers(height: int, width: int) -> None:
    found = settings_of(ENTRIES, "file")
    try:
        wanted = smart_resize(2, height, width, 2, 28, 12544, 9633792)
    except ValueError:
        # Their limit of shapes is ours but for images that are scaled up and rounded before.
        return
    assert found.resized(height, width) == wanted
    assert found.num_tokens(height, width) == wanted[0] * wanted[1] // 28**2 <= found.max_tokens


@pytest.mark.parametrize(("height", "width"), [(40, 61), (90, 9), (1, 1), (12, 12), (5, 200), (300, 301)])
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    image, settings = noise(height, width), settings_of(SMALL, "file")
    processor = Glm4vImageProcessorPil(**{**SMALL, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="np")
    _, rows, columns = expected["image_grid_thw"][0]
    # Back from patches, in the order (row, column of a token, row, column in it), each [colour, picture, y, x].
    patches = expected["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 3, 3)[:, :, :, :, :, 0]
    pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 3, columns * 3, 3)
    found = prepare(file_of(image), settings)
    assert np.array_equal(found.pixels, pixels) and found.num_tokens == rows * columns // 4


def test_a_limit_of_pixels(tmp_path: Path) -> None:
    found: ImageSettings = settings_of(ENTRIES, "file")
    height, width = found.limited(28**2 * 100).resized(3000, 2000)
    assert 28**2 * 80 < height * width <= 28**2 * 100


def test_prompts_are_those_of_transformers() -> None:
    """Its rule for the text of an image, from its grid; the whole class needs a reader of videos."""
    backend = byte_level_backend()
    backend.add_special_tokens(["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"])
    tokenizer, settings = Tokenizer(backend, config={}), settings_of(SMALL, "file")
    pictures, around = [noise(40, 61), noise(9, 90)], "<|begin_of_image|><|image|><|end_of_image|>"
    text = f"<|user|>\n{around}a {around}b<|assistant|>\n"
    images = ImageReader.of(settings, tokenizer.id_of("<|image|>") or 0, "<|image|>", id_of=tokenizer.id_of)
    encoder = PromptEncoder(tokenizer, None, max_model_len=900, images=images)
    found = encoder.place_images(text, pictures)

    maker = Glm4vProcessor.__new__(Glm4vProcessor)
    maker.image_token, maker.image_processor = "<|image|>", Glm4vImageProcessorPil(**SMALL)
    grids = maker.image_processor(pictures, return_tensors="np")
    for index in range(2):
        wanted = maker.replace_image_token(grids, index)
        text = text.replace("<|image|>", wanted.replace("<|image|>", "\0"), 1)
    expected = tokenizer.encode(text.replace("\0", "<|image|>"), add_special_tokens=True)
    assert found.token_ids == expected and len(found.images) == 2
