"""How Moondream 2 reads images: sizes and pixels are those of the reference's path with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.decoding import prepare
from pagewick.images.moondream_settings import MoondreamSettings
from pagewick.images.settings_files import has_settings, read_settings
from pagewick.models.registry import read_config
from tests.images.pictures import file_of, noise
from tests.images.test_image_settings import write
from tests.models.moondream import tiling

# config.json in the form that is published, and with one size for all entries that have an effect on images.
PUBLISHED: dict[str, Any] = {"architectures": ["HfMoondream"], "config": {}, "model_type": "moondream1"}
SMALL = {"enc_patch_size": 2, "crop_size": 10, "overlap_margin": 1, "max_crops": 5}


def settings(directory: Path, **vision: Any) -> MoondreamSettings:
    found = read_settings(write(directory, {**PUBLISHED, "config": {"vision": vision}}, "config.json"))
    assert isinstance(found, MoondreamSettings)
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> MoondreamSettings:
    directory = tmp_path_factory.mktemp("moondream")
    write(directory, PUBLISHED, "config.json")
    assert has_settings(directory)
    found = read_settings(directory)
    assert isinstance(found, MoondreamSettings)
    return found


def test_what_the_file_leaves_out_is_in_the_models_code(published: MoondreamSettings) -> None:
    assert (published.patch_size, published.crop_side, published.window, published.max_crops) == (14, 378, 266, 12)
    assert (published.max_tokens, published.most_tokens(len), published.only_place) == (729, 729, 1)
    assert published.has_fixed_tokens and published.num_tokens(3, 500) == 729
    assert published.mean == published.std == (0.5, 0.5, 0.5) and published.rescale_factor == 1 / 255
    vision = read_config(PUBLISHED).vision
    assert vision is not None and vision.most_pixels == published.largest_picture == published.max_pixels


side = st.one_of(st.integers(1, 500), st.integers(100, 6000))


@given(side, side)
@example(378, 378)
@example(379, 379)
@example(644, 645)
@example(645, 4000)
@example(3000, 900)
@example(9000, 400)
def test_crops_are_those_of_the_reference(published: MoondreamSettings, height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequestError, match="at most 200 times"):
            published.views(height, width)
        return
    (view,) = published.views(height, width)
    # The model's own code cuts very long images into more than 12 crops.
    rows, columns = (min(number, 12) for number in tiling(height - 112, width - 112, 266, 12))
    assert view.sizes == ((rows * 266 + 112, columns * 266 + 112),) and view.above == (378, 378)
    vision = read_config(PUBLISHED).vision
    assert vision is not None and (378 + view.box.height, view.box.width) in vision.picture_sizes
    assert view.num_pixels == (378 + view.box.height) * view.box.width <= published.largest_picture
    assert published.num_tokens(height, width) == 729


@pytest.mark.parametrize(("height", "width"), [(15, 17), (9, 40), (61, 12), (3, 5), (40, 200)])
def test_pixels_are_those_of_pillow(tmp_path: Path, height: int, width: int) -> None:
    image, found = noise(height, width), settings(tmp_path, **SMALL)
    (picture,) = prepare(file_of(image), found)
    rows, columns = tiling(height - 4, width - 4, 6, 5)
    large = np.asarray(image.resize((columns * 6 + 4, rows * 6 + 4), Image.Resampling.LANCZOS))
    whole = np.asarray(image.resize((10, 10), Image.Resampling.LANCZOS))
    assert picture.num_tokens == 25
    np.testing.assert_array_equal(picture.pixels[10:], large)
    np.testing.assert_array_equal(picture.pixels[:10, :10], whole)
    assert not picture.pixels[:10, 10:].any()


def test_a_limit_of_pixels_leaves_fewer_crops(published: MoondreamSettings) -> None:
    assert published.limited(10**9) == published
    for limit in (published.largest_picture - 1, 10**6, 378 * 756):
        found = published.limited(limit)
        assert found.max_crops < 12 and found.largest_picture <= limit
        assert published.limited(limit + 400_000).max_crops >= found.max_crops
        for size in ((900, 900), (2000, 400), (400, 9000)):
            assert found.views(*size)[0].num_pixels <= limit
    with pytest.raises(ConfigError, match=f"must be at least {378 * 756}, because the model reads at least as many"):
        published.limited(378 * 756 - 1)


@pytest.mark.parametrize(
    "vision", [{"crop_size": 380}, {"overlap_margin": 14}, {"max_crops": 61}, {"max_crops": 0}, {"crop_size": "a"}]
)
def test_impossible_sizes_are_refused(tmp_path: Path, vision: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(vision))):
        settings(tmp_path, **vision)
