"""The names of images in the prefix cache."""

from __future__ import annotations

from msgspec import structs

from pagewick.engine.cache.prefix import PrefixHasher
from pagewick.engine.images import with_image_keys, without_computed
from pagewick.engine.messages import EngineRequest, ImageInput
from tests.engine.requests import request, sequence

IMAGE = ImageInput(2, 6, 4, 6, bytes(range(72)))
PROMPT = [0, 1, *[7] * 6, 4, 5, 6, 3]


def name(prompt: list[int], images: list[ImageInput], num_tokens: int) -> bytes:
    made: EngineRequest = with_image_keys(request(prompt, images=images))
    return PrefixHasher(b"key", 4).of(sequence(prompt, extra_keys=made.extra_keys), num_tokens)


def test_blocks_with_an_image_and_after_it_are_named_by_its_pixels_and_size() -> None:
    other = structs.replace(IMAGE, pixels=bytes(72))
    turned = structs.replace(IMAGE, height=6, width=4)
    of_slices = structs.replace(IMAGE, layout=b"0:4x6,9:4x6")
    for num_tokens in (4, 8, 12):
        names = {name(PROMPT, images, num_tokens) for images in ([IMAGE], [other], [turned], [of_slices], [])}
        assert len(names) == 5, num_tokens
    assert name(PROMPT, [IMAGE], 12) == name(PROMPT, [structs.replace(IMAGE)], 12)


def test_the_text_before_an_image_is_shared() -> None:
    later = structs.replace(IMAGE, start=8)
    prompt = [*range(8), *[7] * 6]
    assert name(prompt, [later], 4) == name(prompt, [], 4)


def test_tokens_that_see_an_image_are_named_by_it_too() -> None:
    made = with_image_keys(request(PROMPT, images=[IMAGE]), 1)
    assert [key[:2] for key in made.extra_keys] == [(1, 8)]


def test_given_extra_keys_stay() -> None:
    made = with_image_keys(request(PROMPT, images=[IMAGE], extra_keys=[(0, 3, b"adapter")]))
    assert made.extra_keys[0] == (0, 3, b"adapter")
    assert [key[:2] for key in made.extra_keys[1:]] == [(2, 8)]
    plain = request(PROMPT)
    assert with_image_keys(plain) is plain


def test_pixels_are_left_out_once_all_tokens_of_an_image_are_computed() -> None:
    second = structs.replace(IMAGE, start=9, num_tokens=2)
    for num_computed, kept in [(0, [True, True]), (7, [True, True]), (8, [False, True]), (11, [False, False])]:
        found = without_computed([IMAGE, second], num_computed)
        assert [bool(image.pixels) for image in found] == kept
        assert [structs.replace(image, pixels=b"") for image in found] == [
            structs.replace(image, pixels=b"") for image in (IMAGE, second)
        ]
