"""Requests that are refused before they can do harm, and the messages."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from pagewick.engine.admission import MAX_BEAM_RESULTS, MAX_EXTRA_KEYS, check_request
from pagewick.engine.messages import (
    MAX_FRAME_BYTES,
    EngineRequest,
    EngineStats,
    ImageInput,
    Outputs,
    RequestDelta,
    TokenLogprobs,
    encode_frame,
)
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from tests.engine.requests import request

INFO = ModelInfo(
    model_path="model", architecture="LlamaForCausalLM", dtype="float32", device="cpu", kernels="", vocab_size=100,
    embedding_size=8, max_model_len=10, max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_kv_blocks=8,
    kv_cache_bytes=0, num_parameters=0, tensor_parallel_size=1,
)  # fmt: skip


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(1, 9), (9, 1), (9, None), (5, 5), (10, 0), (1, 0)])
def test_what_fits_exactly_is_admitted(num_prompt_tokens: int, max_tokens: int | None) -> None:
    check_request(request([99] * num_prompt_tokens, max_tokens=max_tokens, stop_token_ids=[0, 99]), INFO)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"),
    [
        (1, 10, "max_tokens"),
        (9, 2, "max_tokens"),
        (10, None, "messages"),
        (10, 1, "messages"),
        (11, 1, "messages"),
        (11, 0, "messages"),
    ],
)
def test_what_is_too_long_is_refused_with_the_numbers(
    num_prompt_tokens: int, max_tokens: int | None, param: str
) -> None:
    asked = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    numbers = rf"you requested {asked} tokens \({num_prompt_tokens} in .* or lower max_tokens\."
    if param == "messages":  # the prompt alone is too long
        numbers = rf"the prompt has {num_prompt_tokens}, which leaves no room for a response\. Shorten the prompt\.$"
    with pytest.raises(ContextLengthError, match=rf"^This .* length is 10 tokens\. However, {numbers}") as info:
        check_request(request([0] * num_prompt_tokens, max_tokens=max_tokens), INFO)
    assert (info.value.param, info.value.code) == (param, "context_length_exceeded")


@pytest.mark.parametrize("extra_keys", [[], [(0, 1, b"k")], [(2, 3, b"k"), (0, 2**31 - 1, b"k" * 1024), (1, 3, b"j")]])
def test_extra_keys_of_tokens_that_there_are(extra_keys: list[tuple[int, int, bytes]]) -> None:
    check_request(request([0, 1, 2], max_tokens=1, extra_keys=extra_keys), INFO)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ((-1, 2, b"k"), r"\[-1, 2\)"),
        ((0, 0, b"k"), r"\[0, 0\)"),
        ((2, 1, b"k"), r"\[2, 1\)"),
        ((3, 4, b"k"), r"\[3, 4\).*prompt of 3 tokens"),
        ((0, 2**31, b"k"), "at most at 2147483647"),
        ((0, 1, b""), "0 bytes"),
        ((0, 1, b"k" * 1025), "1025 bytes.* digest"),
    ],
)
def test_other_extra_keys_are_refused(one: tuple[int, int, bytes], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as info:
        check_request(request([0, 1, 2], max_tokens=1, extra_keys=[(0, 3, b"good"), one]), INFO)
    assert info.value.param == "extra_keys"


def test_too_many_extra_keys_are_refused() -> None:
    check_request(request([0, 1, 2], max_tokens=1, extra_keys=[(0, 1, b"k")] * MAX_EXTRA_KEYS), INFO)
    with pytest.raises(InvalidRequestError, match="1025 ranges"):
        check_request(request([0, 1, 2], max_tokens=1, extra_keys=[(0, 1, b"k")] * (MAX_EXTRA_KEYS + 1)), INFO)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        check_request(request([]), INFO)


@pytest.mark.parametrize("token_id", [-1, 100, 2**31])
def test_unknown_token_ids_are_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {token_id} is not in the vocabulary of 100") as info:
        check_request(request([1, token_id, 2]), INFO)
    assert info.value.param == "prompt"
    if token_id > 0:
        with pytest.raises(InvalidRequestError, match="vocabulary") as info:
            check_request(request([1], stop_token_ids=[5, token_id]), INFO)
        assert info.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    "name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words", "dry_breaker_ids", "opening_ids"]
)
def test_unknown_token_ids_are_named_wherever_they_are(name: str) -> None:
    def asked(token_id: int) -> EngineRequest:
        values: dict[str, Any] = {"logit_bias": {0: 1.0, token_id: 1.0}}
        if name in ("bad_words", "dry_breaker_ids"):
            return request([1], **{name.replace("words", "word_ids"): [[0], [5, token_id]]})
        return request([1], **{name: values.get(name, [0, token_id])})

    check_request(asked(99), INFO)
    with pytest.raises(InvalidRequestError, match="token id 100 is not in the vocabulary of 100") as info:
        check_request(asked(100), INFO)
    assert info.value.param == name.replace("dry_breaker_ids", "dry_sequence_breakers")


@pytest.mark.parametrize("max_tokens", [2**16, None])
def test_a_beam_search_whose_limit_is_lowered_is_as_large_as_its_context_allows(max_tokens: int | None) -> None:
    info = structs.replace(INFO, max_model_len=4096)
    beams = {"use_beam_search": True, "n": 32, "temperature": 0.0, "lowers_max_tokens": True}
    check_request(request([1, 2], max_tokens=max_tokens, **beams), info)
    with pytest.raises(InvalidRequestError, match=r"32 \* 65534 \* 1 = 2097088"):
        check_request(request([1, 2], max_tokens=max_tokens, **beams), structs.replace(info, max_model_len=2**16))


def test_allowed_token_ids_are_at_most_the_vocabulary() -> None:
    check_request(request([1], allowed_token_ids=[*range(100)] * 2), INFO)
    with pytest.raises(InvalidRequestError, match="names 101 tokens and the vocabulary has 100") as info:
        check_request(request([1], allowed_token_ids=[*range(101)]), INFO)
    assert info.value.param == "allowed_token_ids"


@pytest.mark.parametrize("num_bytes", [1, 12, 14])
def test_a_mask_of_breakers_has_a_bit_for_each_token(num_bytes: int) -> None:
    for mask in (b"", bytes(13)):
        check_request(structs.replace(request([1]), dry_breaker_mask=mask), INFO)
    with pytest.raises(InvalidRequestError, match=f"{num_bytes} bytes"):
        check_request(structs.replace(request([1]), dry_breaker_mask=bytes(num_bytes)), INFO)


LARGE = structs.replace(INFO, vocab_size=50_000, max_model_len=2**20)


@pytest.mark.parametrize(
    ("n", "max_tokens", "logprobs"),
    # 2^20 = 32 * 32768; 32 * 1560 * 21 = 1,048,320; 7 * 49932 * 3 = 1,048,572.
    [(32, 32768, None), (32, 32768, 0), (32, 1560, 20), (7, 49932, 2)],
)
def test_the_result_of_a_beam_search_is_limited(n: int, max_tokens: int, logprobs: int | None) -> None:
    def asked(more: int = 0, **changes: Any) -> EngineRequest:
        values = {"n": n, "max_tokens": max_tokens + more, "logprobs": logprobs, "use_beam_search": True, **changes}
        return request([0], **values)

    check_request(asked(), LARGE)
    with pytest.raises(InvalidRequestError) as info:
        check_request(asked(1), LARGE)
    num_per_token = 1 + (logprobs or 0)
    total = n * (max_tokens + 1) * num_per_token
    assert f"{n} * {max_tokens + 1} * {num_per_token} = {total}. Set max_tokens to at most {max_tokens}" in str(
        info.value
    )
    assert info.value.param == "max_tokens"
    check_request(asked(1, use_beam_search=False), LARGE)  # what is drawn goes out token by token


def test_a_beam_search_without_max_tokens_may_fill_the_context() -> None:
    half = LARGE.max_model_len // 2
    check_request(request([0] * half, n=2, use_beam_search=True), LARGE)
    with pytest.raises(InvalidRequestError, match=rf"2 \* {half + 1} \* 1 = {2 * half + 2}\."):
        check_request(request([0] * (half - 1), n=2, use_beam_search=True), LARGE)


def test_the_largest_result_of_a_beam_search_fits_a_frame() -> None:
    """And the numbers of bytes that its limit is derived from are right."""
    for num_top in (0, 20):
        top = [(2**31 - 1, -1234.5)] * num_top
        one = TokenLogprobs(2**31 - 1, -1234.5, 2**31 - 1, top)
        sizes = []
        for count in (100, 200):
            delta = RequestDelta(request_id="a", logprobs=[one] * count, token_ids=[2**31 - 1] * count)
            sizes.append(len(encode_frame(Outputs([delta], EngineStats()))))
        per_token = (sizes[1] - sizes[0]) / 100
        assert per_token <= 28 + 15 * num_top
        assert per_token * MAX_BEAM_RESULTS / (1 + num_top) < MAX_FRAME_BYTES / 8


READS_IMAGES = structs.replace(INFO, image_token_id=7, image_side=2)


def image(start: int, rows: int, columns: int, **others: Any) -> ImageInput:
    """An image whose tokens stand for squares of 2 x 2 pixels."""
    made = ImageInput(start, rows * columns, 2 * rows, 2 * columns, bytes(12 * rows * columns))
    return structs.replace(made, **others)


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ([7], [image(0, 1, 1)]),
        ([0, 7, 7, 7, 7, 7, 7, 1], [image(1, 2, 3)]),
        ([7, 7, 7, 1], [image(0, 1, 1), image(1, 2, 1)]),
        ([7, 7, 7, 1], [image(1, 1, 1)]),
    ],
)
def test_images_that_stand_where_their_tokens_are(prompt: list[int], images: list[ImageInput]) -> None:
    check_request(request(prompt, max_tokens=1, images=images), READS_IMAGES)


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ([0, 7, 7], [image(0, 1, 2)], "image 1 needs 2 tokens 7 from position 0"),
        ([0, 7, 7], [image(1, 1, 3)], "image 1 needs 3 tokens 7 from position 1"),
        ([7, 7, 7], [image(0, 1, 2), image(1, 1, 2)], "image 2 .*behind those of the image before"),
        ([7, 7, 7], [image(-3, 1, 3)], "image 1 needs 3 tokens 7 from position -3"),
        ([7, 7], [image(0, 1, 2, height=3)], "image 1 of 3 x 4 pixels has 2 tokens and 24 bytes"),
        ([7, 7], [image(0, 1, 2, num_tokens=1)], "of 2 x 4 pixels has 1 tokens"),
        ([7, 7], [image(0, 1, 2, pixels=bytes(23))], "23 bytes"),
        ([7, 7], [image(0, 1, 2, pixels=b"")], "0 bytes"),
        ([7], [ImageInput(0, 0, 0, 0)], "0 x 0 pixels"),
        ([7] * 4097, [image(place, 1, 1) for place in range(4097)], "4097 images and tiles; give at most 4096"),
    ],
)
def test_other_images_are_refused(prompt: list[int], images: list[ImageInput], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as info:
        check_request(request(prompt, max_tokens=1, images=images), structs.replace(READS_IMAGES, max_model_len=5000))
    assert info.value.param == "messages"


IN_ROWS = structs.replace(READS_IMAGES, has_row_breaks=True)


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ([7, 8], [image(0, 1, 1, num_tokens=2, row_length=1)]),
        ([0, 7, 7, 8, 7, 7, 9, 1], [image(1, 2, 2, num_tokens=6, row_length=2)]),
        ([7, 8, 7, 8], [image(0, 1, 1, num_tokens=2, row_length=1), image(2, 1, 1, num_tokens=2, row_length=1)]),
    ],
)
def test_images_whose_rows_are_parted(prompt: list[int], images: list[ImageInput]) -> None:
    check_request(request(prompt, max_tokens=1, images=images), IN_ROWS)


WITH_REST = structs.replace(READS_IMAGES, image_side=4, image_step=2)


@pytest.mark.parametrize(
    ("height", "width", "num_tokens"), [(4, 4, 1), (6, 4, 1), (4, 6, 1), (6, 6, 1), (8, 6, 2), (10, 14, 6)]
)
def test_images_whose_edges_have_no_tokens(height: int, width: int, num_tokens: int) -> None:
    """A token for each whole square of 4 x 4 pixels, and sides that are multiples of 2."""
    found = ImageInput(0, num_tokens, height, width, bytes(3 * height * width))
    check_request(request([7] * num_tokens, max_tokens=1, images=[found]), WITH_REST)


@pytest.mark.parametrize(("height", "width", "num_tokens"), [(2, 8, 0), (2, 8, 1), (7, 4, 1), (6, 8, 3), (4, 9, 2)])
def test_images_without_whole_squares_are_refused(height: int, width: int, num_tokens: int) -> None:
    found = ImageInput(0, num_tokens, height, width, bytes(3 * height * width))
    words = "sides that are multiples of 2, a token for each whole square of 4 x 4, and 3 bytes for each pixel"
    with pytest.raises(InvalidRequestError, match=words):
        check_request(request([7] * 9, max_tokens=1, images=[found]), WITH_REST)


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        # The last token of the image is missing, or is a placeholder.
        ([7, 7], [image(0, 1, 2, num_tokens=3, row_length=2)], "image 1 needs 3 tokens 7 from position 0 on, in rows"),
        ([7, 7, 7], [image(0, 1, 2, num_tokens=3, row_length=2)], "in rows of 2 with another token behind each"),
        ([7, 8, 7, 8, 7, 8], [image(0, 2, 2, num_tokens=6, row_length=2)], "image 1 needs 6 tokens"),
        ([7, 7, 7, 7, 7, 8], [image(0, 2, 2, num_tokens=6, row_length=2)], "image 1 needs 6 tokens"),
        ([7, 8, 7, 8], [image(0, 1, 2, num_tokens=4, row_length=1)], "of 2 x 4 pixels has 4 tokens .* behind each row"),
        ([7, 7, 8], [image(0, 1, 2, num_tokens=3)], "of 2 x 4 pixels has 3 tokens"),
        ([7, 7, 8], [image(0, 1, 2, num_tokens=3, row_length=-1)], "of 2 x 4 pixels has 3 tokens"),
        ([7, 7], [image(0, 1, 2, row_length=2)], "of 2 x 4 pixels has 2 tokens"),
    ],
)
def test_other_images_in_rows_are_refused(prompt: list[int], images: list[ImageInput], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check_request(request(prompt, max_tokens=1, images=images), IN_ROWS)
    with pytest.raises(InvalidRequestError):
        check_request(request(prompt, max_tokens=1, images=images), READS_IMAGES)


# The model sees 4 x 4 of the 5 x 5 pixels of a tile, as 2 x 2 tokens.
IN_TILES = structs.replace(READS_IMAGES, image_tile=5, max_model_len=100)


def in_tiles(num_tokens: int, edges: tuple[int, int], **others: Any) -> ImageInput:
    found = ImageInput(0, num_tokens, 10, 15, bytes(3 * 10 * 15), edges=edges)
    return structs.replace(found, **others)


@pytest.mark.parametrize(("num_tokens", "edges"), [(28, (0, 0)), (14, (1, 0)), (12, (0, 2)), (4, (0, 3))])
def test_images_in_tiles_have_one_token_more_in_each_row(num_tokens: int, edges: tuple[int, int]) -> None:
    """The images have 4 rows of 6 + 1 tokens, and leave some out at their edges."""
    without = structs.replace(IN_TILES, image_tile=None)
    check_request(request([7] * num_tokens, max_tokens=1, images=[in_tiles(num_tokens, edges)]), IN_TILES)
    with pytest.raises(InvalidRequestError):
        check_request(request([7] * num_tokens, max_tokens=1, images=[in_tiles(num_tokens, edges)]), without)


# Pictures with more tokens than one tile has are shrunk.
SHRUNK = structs.replace(IN_TILES, image_most_tiles=1)


def test_images_in_tiles_that_are_shrunk() -> None:
    """4 rows of 6, divided by the square root of 24 / 4, are one of 2."""
    check_request(request([7] * 3, max_tokens=1, images=[in_tiles(3, (0, 0))]), SHRUNK)
    with pytest.raises(InvalidRequestError, match="image 1 of"):
        check_request(request([7] * 28, max_tokens=1, images=[in_tiles(28, (0, 0))]), SHRUNK)


def test_an_image_with_one_token_more() -> None:
    ended = image(0, 2, 2, num_tokens=5, has_end=True)
    check_request(request([7] * 5, max_tokens=1, images=[ended]), SHRUNK)
    for info in (SHRUNK, IN_TILES):
        with pytest.raises(InvalidRequestError, match="image 1 of"):
            check_request(
                request([7] * 5, max_tokens=1, images=[structs.replace(ended, has_end=info is IN_TILES)]), info
            )


@pytest.mark.parametrize(
    "found",
    [
        in_tiles(28, (0, 0), has_end=True),
        in_tiles(14, (0, 0)),
        in_tiles(0, (2, 0)),
        in_tiles(0, (0, 4)),
        in_tiles(42, (-1, 0)),
        in_tiles(28, (0, 0), height=11),
        in_tiles(28, (0, 0), pixels=bytes(3)),
        in_tiles(28, (0, 0), row_length=6),
    ],
)
def test_other_images_in_tiles_are_refused(found: ImageInput) -> None:
    with pytest.raises(InvalidRequestError, match="image 1 of"):
        check_request(request([7] * max(1, found.num_tokens), max_tokens=1, images=[found]), IN_TILES)


BEHIND_ONE = structs.replace(
    READS_IMAGES, image_num_leading=1, image_fixed_tokens=3, image_sizes=[(4, 6), (10, 4)], max_model_len=20
)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (10, 4)])
def test_images_of_certain_sizes_have_all_the_same_tokens(height: int, width: int) -> None:
    found = ImageInput(1, 3, height, width, bytes(3 * height * width))
    check_request(request([0, 7, 7, 7, 1], max_tokens=1, images=[found]), BEHIND_ONE)
    for changes in (
        {"height": width, "width": height}, {"num_tokens": 2}, {"pixels": b""}, {"edges": (0, 0)}, {"has_end": True},
        {"row_length": 1},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match="image 1 of"):
            check_request(
                request([0, 7, 7, 7, 1], max_tokens=1, images=[structs.replace(found, **changes)]), BEHIND_ONE
            )


@pytest.mark.parametrize("starts", [[0], [2], [1, 4]])
def test_a_model_that_reads_one_image_behind_its_first_token(starts: list[int]) -> None:
    images = [ImageInput(start, 3, 4, 6, bytes(72)) for start in starts]
    with pytest.raises(InvalidRequestError, match="one image, whose tokens begin at position 1"):
        check_request(request([7] * 8, max_tokens=1, images=images), BEHIND_ONE)


def test_an_image_that_no_step_could_compute_is_refused() -> None:
    info = structs.replace(READS_IMAGES, max_image_tokens=4)
    check_request(request([7] * 6, max_tokens=1, images=[image(0, 2, 2), image(4, 1, 2)]), info)
    with pytest.raises(InvalidRequestError, match="image 2 has 6 tokens; this model takes at most 4"):
        check_request(request([7] * 8, max_tokens=1, images=[image(0, 1, 2), image(2, 2, 3)]), info)


def test_a_model_of_text_refuses_images() -> None:
    with pytest.raises(UnsupportedError, match="reads no images"):
        check_request(request([7], max_tokens=1, images=[image(0, 1, 1)]), INFO)
