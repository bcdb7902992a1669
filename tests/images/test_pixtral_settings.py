"""Settings of Mistral's models are read from their files, and sizes and pixels are those of Pixtral's processor."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.decoding import is_turned
from pagewick.images.pixtral_settings import PixtralSettings
from pagewick.images.settings import MAX_ASPECT_RATIO, ImageSettings
from pagewick.images.settings_files import read_settings
from pagewick.images.sources import load
from tests.images.pictures import file_of, noise, prepare
from tests.images.test_image_settings import CLIP_MEAN, CLIP_STD, QWEN_3, write

# The files as they are published for Mistral Small 3.1; Ministral 3 has the first one within the second one.
SMALL_3_1 = {
    "crop_size": None,
    "do_center_crop": None,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": CLIP_MEAN,
    "image_processor_type": "PixtralImageProcessorFast",
    "image_std": CLIP_STD,
    "patch_size": {"height": 14, "width": 14},
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 1540},
}
PROCESSOR = {
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "image_token": "[IMG]",
    "patch_size": 14,
    "processor_class": "PixtralProcessor",
    "spatial_merge_size": 2,
}


def settings_in(
    directory: Path, entries: dict[str, Any] = SMALL_3_1, processor: Any = PROCESSOR, config: Any = None
) -> ImageSettings:
    write(directory, entries)
    if processor is not None:
        write(directory, processor, "processor_config.json")
    if config is not None:
        write(directory, config, "config.json")
    return read_settings(directory)


def reference() -> Any:
    return pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral", reason="the reference")


@pytest.mark.parametrize(
    "changes",
    [{}, {"image_mean": [0.5, 0.4, 0.3], "rescale_factor": 0.25}, {"image_mean": None, "size": None, "resample": None}],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any], is_nested: bool) -> None:
    entries = {name: value for name, value in {**SMALL_3_1, **changes}.items() if value is not None}
    if is_nested:
        entries["patch_size"] = 14
        found = settings_in(tmp_path, {"patch_size": 99}, {**PROCESSOR, "image_processor": entries})
        write(tmp_path, entries)
    else:
        found = settings_in(tmp_path, entries)
    wanted = reference().PixtralImageProcessorPil.from_pretrained(tmp_path)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert found.rescale_factor == wanted.rescale_factor and isinstance(found, PixtralSettings)
    assert found.longest_edge == wanted.size["longest_edge"]
    assert (found.patch_size, found.merge_size, found.temporal_patch_size, found.token_side) == (14, 2, 1, 28)
    assert (found.row_end, found.image_end, found.row_break) == ("[IMG_BREAK]", "[IMG_END]", 1)


def test_the_size_of_a_square_stands_in_several_files(tmp_path: Path) -> None:
    """As in transformers, the processor's comes before that of its image processor; config.json helps out."""
    found = settings_in(
        tmp_path, processor={"patch_size": 7, "spatial_merge_size": 3}, config={"spatial_merge_size": 5}
    )
    assert (found.patch_size, found.merge_size) == (7, 3)
    found = settings_in(tmp_path, processor={}, config={"spatial_merge_size": 5})
    assert (found.patch_size, found.merge_size, found.row_end) == (14, 5, "[IMG_BREAK]")
    (tmp_path / "config.json").unlink()
    assert settings_in(tmp_path, {"image_processor_type": "PixtralImageProcessor"}, {}).token_side == 16
    named = {"image_break_token": {"content": "<row>", "special": True}, "image_end_token": "<end>"}
    found = settings_in(tmp_path, processor=named)
    assert (found.row_end, found.image_end) == ("<row>", "<end>")


@pytest.mark.parametrize(
    ("changes", "processor", "reason"),
    [
        ({"do_center_crop": True}, PROCESSOR, "do_center_crop"),
        ({"do_resize": False}, PROCESSOR, "do_resize"),
        ({"resample": 2}, PROCESSOR, "resample"),
        ({"size": {"height": 1540, "width": 1540}}, PROCESSOR, "size in .* has no longest_edge"),
        ({"size": 1540}, PROCESSOR, "has no longest_edge"),
        ({"size": {"longest_edge": 0}}, PROCESSOR, r"size\.longest_edge"),
        ({"patch_size": {"height": 14, "width": 16}}, {}, "patch_size in .* is 14 x 16; Pagewick knows squares"),
        ({"patch_size": {"height": 14, "width": "14"}}, {}, r"patch_size\.width"),
        ({}, {"image_break_token": ""}, r"image_break_token in .*processor_config\.json must be the text of a token"),
        ({}, {"image_end_token": 13}, "image_end_token"),
        ({}, {"spatial_merge_size": 0}, "spatial_merge_size"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, SMALL_3_1 | changes, processor)


def test_other_models_have_no_rows(tmp_path: Path) -> None:
    found = settings_in(tmp_path, QWEN_3, {})
    assert (found.row_break, found.max_tokens) == (0, 2**24 // 32**2)


def small(edge: int, patch_size: int, merge_size: int = 1) -> PixtralSettings:
    half = (0.5, 0.5, 0.5)
    side = patch_size * merge_size
    most = (-(-edge // side) * side) ** 2
    return PixtralSettings(
        patch_size, merge_size, 1, 1, most, half, half, 1 / 255, "[IMG_BREAK]", "[IMG_END]", longest_edge=edge
    )


SIDES = st.integers(1, 6000)


@given(
    height=SIDES, width=SIDES, edge=st.integers(1, 2000), patch_size=st.integers(1, 20), merge_size=st.integers(1, 3)
)
def test_sizes_are_those_of_transformers(height: int, width: int, edge: int, patch_size: int, merge_size: int) -> None:
    settings, side = small(edge, patch_size, merge_size), patch_size * merge_size
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
            settings.resized(height, width)
        return
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    expected = reference().get_resize_output_image_size(image, edge, side, "channels_first")
    # transformers has no row for an image that is narrower than a pixel after resizing.
    expected = tuple(max(length, side) for length in expected)
    assert settings.resized(height, width) == expected
    rows, columns = (length // side for length in expected)
    assert settings.num_tokens(height, width) == rows * columns + rows
    assert settings.num_tokens(height, width) <= settings.max_tokens
    assert rows * columns * side**2 <= settings.max_pixels


@pytest.mark.parametrize(("height", "width"), [(40, 61), (200, 90), (33, 160), (161, 161)])
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    image = noise(height, width)
    processor = reference().PixtralImageProcessorPil(
        patch_size={"height": 12, "width": 12}, size={"longest_edge": 160}, do_rescale=False, do_normalize=False
    )
    (expected,) = processor([image], return_tensors="np")["pixel_values"]
    found = prepare(file_of(image), small(160, 4, 3))
    assert np.array_equal(found.pixels, expected.transpose(1, 2, 0))
    assert found.num_tokens == found.pixels.shape[0] // 12 * (found.pixels.shape[1] // 12 + 1)


def test_pixels_can_be_limited() -> None:
    settings = small(160, 4, 2)
    assert settings.limited(10**9) == settings and settings.max_tokens == 20 * 21
    assert settings.limited(160 * 160).resized(700, 300) == settings.resized(700, 300) == (160, 72)
    low = settings.limited(8 * 8 * 10)
    assert low.resized(700, 300) == (32, 16)
    assert low.resized(24, 24) == settings.resized(24, 24)
    with pytest.raises(ConfigError, match="--max-image-pixels must be at least 64"):
        settings.limited(63)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_side_on_which_an_image_lies_is_known_before_it_is_decoded(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = file_of(noise(16, 40), kind, exif=exif)
    assert is_turned(data) == (orientation >= 5)
    assert load(data).upright() == prepare(data, small(160, 4)).pixels.shape[:2]
    # An image of Pillow's, read and not read yet.
    image = Image.open(BytesIO(data))
    assert load(image).upright() == ((40, 16) if orientation >= 5 else (16, 40))


def test_files_without_notes_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [file_of(noise(16, 40), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    monkeypatch.setattr("pagewick.images.decoding._READERS", {})
    assert not any(map(is_turned, data))
    assert not is_turned(b"Exif" + data[0][:30])
    assert load(data[0]).upright() == (16, 40)
