"""Images get their places in prompts: as many placeholders as they have tokens, and only where the template has one."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pagewick.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from pagewick.text import image_prompts
from pagewick.text.content_parts import Message, num_image_chars
from pagewick.text.image_prompts import PromptTokens
from tests.images.pictures import address_of, file_of, noise, prepare
from tests.images.reading_model import (
    FILES,
    MACRO_TEMPLATE,
    NUM_TOKENS,
    PAD,
    PAD_ID,
    SETTINGS,
    SIZES,
    TEMPLATE,
    TOKENIZER,
    expanded,
    image_part,
    reading_encoder,
    user,
)
from tests.tiny_text import byte_level_backend, write_model_directory

ENCODER = reading_encoder()
VISION = f"<|vision_start|>{PAD}<|vision_end|>"


def place(messages: list[Message], **how: Any) -> PromptTokens:
    return ENCODER.place_chat(messages, **how)


def test_each_image_gets_its_tokens_and_its_pixels() -> None:
    messages = [
        user("What are ", image_part(0), " and ", image_part(1), "?"),
        {"role": "assistant", "content": "Two pictures."},
        user(image_part(2), image_part(0)),
    ]
    text = (
        f"<|im_start|>user\nWhat are {VISION} and {VISION}?<|im_end|>\n<|im_start|>assistant\nTwo pictures.<|im_end|>\n"
        f"<|im_start|>user\n{VISION}{VISION}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ENCODER.render_chat(messages).text == text
    tokens = place(messages)
    assert tokens.token_ids == expanded(text, 0, 1, 2, 0)
    assert ENCODER.encode_rendered(ENCODER.render_chat(messages)) == tokens.token_ids
    assert len(tokens.images) == 4
    for placed, number in zip(tokens.images, (0, 1, 2, 0), strict=True):
        (image,) = ENCODER.read_image(placed, "messages")
        assert image.num_tokens == NUM_TOKENS[number]
        assert tokens.token_ids[image.start : image.start + image.num_tokens] == [PAD_ID] * image.num_tokens
        assert PAD_ID not in (tokens.token_ids[image.start - 1], tokens.token_ids[image.start + image.num_tokens])
        assert (image.height, image.width) == SIZES[number]
        assert image.pixels == prepare(FILES[number], SETTINGS).pixels.tobytes()


PICTURE = noise(12, 18)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": address_of(FILES[0]), "detail": "low"}},
        {"type": "image_url", "image_url": address_of(FILES[0])},
        {"type": "input_image", "image_url": address_of(FILES[0]), "detail": "auto"},
        {"type": "input_image", "file_id": None, "image_url": address_of(FILES[0])},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": FILES[0]},
        {"type": "image", "image": np.asarray(PICTURE)},
        {"type": "image", "image": address_of(FILES[0])},
    ],
)
def test_all_forms_of_an_image(part: dict[str, Any]) -> None:
    tokens = place([user(part)])
    (placed,) = tokens.images
    assert tokens.token_ids == place([user(image_part(0))]).token_ids
    assert ENCODER.read_image(placed, "messages")[0].pixels == np.asarray(PICTURE).tobytes()


def test_a_file_that_is_named_by_a_path_object(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(FILES[0])
    assert place([user({"type": "image", "image": path})]).token_ids == place([user(image_part(0))]).token_ids
    # A string comes from anywhere, and names no file.
    for part in ({"type": "image", "image": str(path)}, {"type": "image_url", "image_url": {"url": f"file://{path}"}}):
        with pytest.raises(UnsupportedError, match="image 1 of the request: images are not fetched") as raised:
            place([user(part)])
        assert raised.value.param == "messages"


@pytest.mark.parametrize("source", [TEMPLATE, MACRO_TEMPLATE])
@pytest.mark.parametrize("variables", [{}, {"add_vision_id": True}])
def test_prompts_are_those_of_transformers(tmp_path: Path, source: str, variables: dict[str, Any]) -> None:
    """Except that transformers gets placeholders in place of images, and does not repeat them."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference for chat templates")
    backend = byte_level_backend()
    backend.add_special_tokens(["<|vision_start|>", PAD, "<|vision_end|>"])
    write_model_directory(tmp_path, backend, chat_template=source)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "<&>"}}}
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        user("What are ", image_part(0), " and ", image_part(1), "?"),
        {"role": "assistant", "content": "A picture.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen: "}, image_part(2)]},
        {"role": "user", "content": "And now?"},
    ]
    plain = [
        {**one, "content": [part if part["type"] == "text" else {"type": "image"} for part in one["content"]]}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]
    if source is TEMPLATE:
        del messages[2:4], plain[2:4]
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **variables)
    assert expected.count(PAD) == (2 if source is TEMPLATE else 3)
    encoder = reading_encoder(source)
    assert encoder.render_chat(messages, chat_template_kwargs=variables).text == expected
    tokens = encoder.place_chat(messages, chat_template_kwargs=variables)
    assert tokens.token_ids == expanded(expected, 0, 1, 2)
    assert [one.num_tokens for one in tokens.images] == NUM_TOKENS[: expected.count(PAD)]


def test_a_template_may_refuse_images_of_a_role() -> None:
    with pytest.raises(InvalidRequestError, match="rejects the messages: no images in system messages"):
        reading_encoder(MACRO_TEMPLATE).render_chat([{**user(image_part(0)), "role": "system"}])


@pytest.mark.parametrize("field", ["content", "name", "reasoning_content"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_placeholder_in_a_text_stays_text(role: str, field: str) -> None:
    template = "{{ message.reasoning_content }}{{ message.name }}"
    encoder = reading_encoder("{% for message in messages %}" + template + "{% endfor %}" + TEMPLATE_OF_PARTS)
    forged = {"role": role, "content": "x", field: f"{VISION} and {PAD}"}
    for content in (forged["content"], [{"type": "text", "text": forged["content"]}]):
        message = {**forged, "content": content}
        tokens = encoder.place_chat([message])
        assert PAD_ID not in tokens.token_ids and not tokens.images
        assert PAD in TOKENIZER.decode(tokens.token_ids, skip_special_tokens=False)
        # Nor does it take the place of an image.
        tokens = encoder.place_chat([message, user(image_part(2), PAD)])
        assert tokens.token_ids.count(PAD_ID) == 5
        (placed,) = tokens.images
        assert tokens.token_ids[placed.start : placed.start + 5] == [PAD_ID] * 5


TEMPLATE_OF_PARTS = (
    "{% for message in messages %}{% for part in ([{'text': message.content}] if message.content is string else "
    "message.content) %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "num_places"),
    [
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", 0),
        ("{% for part in messages[0].content %}<|image_pad|><|image_pad|>{% endfor %}", 6),
    ],
)
def test_a_template_must_have_one_place_for_each_image(source: str, num_places: int) -> None:
    message = f"has {num_places} places for images .<.image_pad.>., and the request has 2 images"
    with pytest.raises(InvalidRequestError, match=message) as raised:
        reading_encoder(source).place_chat([user("a", image_part(0), image_part(1))])
    assert raised.value.param == "messages"


def test_a_template_without_parts_has_no_place() -> None:
    with pytest.raises(UnsupportedError, match="no place for an image") as raised:
        reading_encoder("{{ messages[0].content }}").place_chat([user("a", image_part(0))])
    assert raised.value.param == "messages[0].content"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url"}, "needs 'image_url' with a data: address"),
        ({"type": "image_url", "image_url": {"url": 3}}, "needs 'image_url'"),
        ({"type": "image_url", "image_url": {}}, "needs 'image_url'"),
        ({"type": "image_url", "image_url": [address_of(FILES[0])]}, "needs 'image_url'"),
        ({"type": "image"}, "needs 'image'"),
        ({"type": "image", "image": 1.5}, "needs 'image'"),
        ({"type": "input_image", "file_id": "file-1"}, "not kept as files"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "reads texts and images only; .* type 'video_url'"),
        ({"type": "video"}, "type 'video'"),
        ({"type": "input_audio", "input_audio": {}}, "type 'input_audio'"),
        ({"type": "text", "text": None}, "needs a string 'text'"),
        ({"text": "x"}, "needs a type"),
        ("x", "needs a type"),
    ],
)
def test_other_parts_are_refused_by_name(part: Any, reason: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        ENCODER.render_chat(messages)
    assert raised.value.param == "messages[1].content"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "image_pil"])
def test_a_model_that_reads_text_refuses_images_by_name(kind: str) -> None:
    encoder = reading_encoder(reads=False)
    field = "image_url" if kind == "input_image" else kind
    for part in ({"type": kind, field: address_of(FILES[0])}, {"type": kind}):
        with pytest.raises(UnsupportedError, match=f"this model reads text only; .* type '{kind}'") as raised:
            encoder.render_chat([user("a"), user(part)])
        assert raised.value.param == "messages[1].content"
    with pytest.raises(UnsupportedError, match="reads no images"):
        encoder.place_images(PAD, [FILES[0]])


def test_the_wrong_image_is_named() -> None:
    damaged = {"type": "image_url", "image_url": address_of(FILES[0][:200])}
    tokens = place([user(image_part(0), damaged)])
    with pytest.raises(InvalidRequestError, match="image 2 of the request: its PNG file cannot be read") as raised:
        ENCODER.read_image(tokens.images[1], "messages")
    assert raised.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="image 3 of the request: its PNG file is truncated"):
        place([user(image_part(0)), user(image_part(0), {"type": "image", "image": FILES[0][:18]})])
    with pytest.raises(UnsupportedError, match="image 1 of the request: its file has an unknown format"):
        place([user({"type": "image", "image": b"hello"})])


def test_requests_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    part = image_part(1)
    assert len(place([user(*[part] * image_prompts.MAX_IMAGES)]).images) == image_prompts.MAX_IMAGES
    with pytest.raises(InvalidRequestError, match=f"at most {image_prompts.MAX_IMAGES} images; it has 65"):
        place([user(*[part] * 40), user(*[part] * 25)])
    monkeypatch.setattr(image_prompts, "MAX_FILE_PIXELS", 12 * 18 + 36)
    assert len(place([user(image_part(0), part)]).images) == 2
    with pytest.raises(InvalidRequestError, match="at most 252 pixels; they have 288"):
        place([user(image_part(0), part, part)])
    monkeypatch.setattr(image_prompts, "MAX_RESIZED_PIXELS", 36)
    with pytest.raises(InvalidRequestError, match="at most 36 pixels as the model resizes them; they have 216"):
        place([user(image_part(0))])


def test_images_that_do_not_fit_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("an image was decoded, or a text encoded")

    large = {"type": "image", "image": file_of(noise(90, 80))}
    messages = [user("a" * 30, large)]
    num_tokens = len(place(messages).token_ids)
    encoder = reading_encoder(max_model_len=num_tokens + 3)
    assert len(encoder.place_chat(messages, num_output_tokens=3).token_ids) == num_tokens
    with pytest.raises(ContextLengthError, match=rf"{num_tokens + 4} tokens \({num_tokens} in the prompt") as raised:
        encoder.place_chat(messages, num_output_tokens=4)
    assert raised.value.param == "max_tokens"
    with pytest.raises(ContextLengthError, match="fewer or smaller images") as raised:
        reading_encoder(max_model_len=num_tokens).place_chat(messages)
    assert raised.value.param == "messages"
    encoder = reading_encoder(max_model_len=194)
    monkeypatch.setattr(TOKENIZER, "encode_pieces", fail)
    monkeypatch.setattr("pagewick.images.decoding._decoded", fail)
    with pytest.raises(ContextLengthError, match=r"The images alone have 195; send fewer or smaller") as raised:
        encoder.place_chat(messages)
    assert raised.value.param == "messages"


@pytest.mark.parametrize("num_kept", [-1, 5, 10**6])
def test_a_prompt_with_images_is_not_truncated(num_kept: int) -> None:
    with pytest.raises(UnsupportedError, match="cannot be truncated") as raised:
        place([user(image_part(0))], truncate_prompt_tokens=num_kept)
    assert raised.value.param == "truncate_prompt_tokens"
    assert place([user("a")], truncate_prompt_tokens=num_kept).token_ids


def test_special_tokens_are_added_before_the_images() -> None:
    plain, begun = place([user(image_part(0))]), place([user(image_part(0))], add_special_tokens=True)
    begin = TOKENIZER.start_token_ids
    assert begun.token_ids == [*begin, *plain.token_ids]
    assert begun.images[0].start == plain.images[0].start + len(begin)


def test_prompts_with_placeholders_of_their_own() -> None:
    text = f"{PAD} or {PAD}"
    for prompt in (text, TOKENIZER.encode(text, add_special_tokens=False)):
        tokens = ENCODER.place_images(prompt, [FILES[2], Image.open(BytesIO(FILES[0]))])
        assert tokens.token_ids == expanded(text, 2, 0)
        assert [(one.start, one.num_tokens) for one in tokens.images] == [(0, 5), (len(tokens.token_ids) - 6, 6)]
    for prompt in ("x", f"{PAD}{PAD}{PAD}", []):
        with pytest.raises(InvalidRequestError, match="it needs one place for each image") as raised:
            ENCODER.place_images(prompt, [FILES[2], FILES[0]])
        assert raised.value.param == "multi_modal_data"
    # Without images, a placeholder is a token like any other.
    assert ENCODER.place_images(PAD, []) == PromptTokens([PAD_ID])


def test_images_stay_with_messages_that_move() -> None:
    """Results of tools are put into the order of their calls, where a template writes one call for each message."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}"
        "{% endif %}<call>{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}{% endif %}"
        "{% if m.role == 'tool' %}<result>{% endif %}{% if m.content is string %}{{ m.content }}"
        "{% elif m.content %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("aa", "bb")]
    messages: list[Message] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "bb", "content": [{"type": "text", "text": "B"}, image_part(2)]},
        {"role": "tool", "tool_call_id": "aa", "content": [{"type": "text", "text": "A"}, image_part(0)]},
    ]
    encoder = reading_encoder(source)
    tokens = encoder.place_chat(messages)
    text = encoder.render_chat(messages).text
    assert text.index("A") < text.index("B")
    assert [one.num_tokens for one in tokens.images] == [6, 5]
    assert tokens.token_ids == expanded(text, 0, 2)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("has_system", [True, False])
def test_tools_are_described_beside_images(has_system: bool) -> None:
    """For a template that knows no tools: in the system message, or else in the user's message, which has an image."""
    source = TEMPLATE_OF_PARTS
    if not has_system:
        source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + source
    encoder = reading_encoder(source)
    text = encoder.render_chat([user("x", image_part(0), "y")], [TOOL]).text
    assert "# Functions" in text and '"look"' in text and text.endswith(f"x{PAD}y")
    assert encoder.place_chat([user("x", image_part(0), "y")], [TOOL]).token_ids == expanded(text, 0)


def test_an_image_in_a_result_that_the_template_does_not_know_is_refused() -> None:
    call = {"id": "aa", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Message] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "aa", "content": [image_part(0)]},
    ]
    with pytest.raises(UnsupportedError, match="no images in the results of tools"):
        ENCODER.place_chat(messages)
    # In an earlier message of the user's it does not matter.
    messages[0] = user("go", image_part(0))
    messages[2] = {**messages[2], "content": "done"}
    assert len(ENCODER.place_chat(messages).images) == 1


def test_the_last_message_is_continued_behind_an_image() -> None:
    begun = [user(image_part(0), "It is ")]
    text = ENCODER.render_chat(begun, continue_final_message=True).text
    assert text == f"<|im_start|>user\n{VISION}It is "
    assert place(begun, continue_final_message=True).token_ids == expanded(text, 0)
    with pytest.raises(InvalidRequestError, match="needs a last message with text"):
        place([user("It is ", image_part(0))], continue_final_message=True)


def test_addresses_are_counted() -> None:
    address = address_of(FILES[0])
    messages = [user("data:", image_part(0)), {"role": "user", "content": "data:x"}, user({"type": "image_pil"})]
    assert num_image_chars([*messages, user({"type": "input_image", "image_url": address})]) == 2 * len(address)
    assert num_image_chars([user({"type": "image_url", "image_url": "http://x"}, {"type": 3}, {"x": 1})]) == 0
