"""The parts of a message's content: texts and images, in the forms that clients send.

An image stands in a part as OpenAI's APIs have it, `{"type": "image_url", "image_url": {"url": "data:..."}}` or
`{"type": "input_image", "image_url": "data:..."}`, or as vLLM and transformers have it in Python: `image_pil`, or
`{"type": "image", "image": ...}` with bytes, a path object or an image of Pillow's. A string is always an address and
never a path, because clients of the server send strings. Chat templates read `{"type": "image"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images.addresses import is_data
from pagewick.images.sources import ImageSource, is_source

# The kind of a part -> the field with the image.
_IMAGE_FIELDS = {"image_url": "image_url", "input_image": "image_url", "image_pil": "image_pil", "image": "image"}
# A chat template gets this in place of an image.
_MARK = {"type": "image"}

Message = Mapping[str, Any]
# The roles of messages that clients of the server may send.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_roles(messages: Sequence[Message]) -> None:
    """Raise InvalidRequestError for a message without one of ROLES; templates would write another as it is, or not."""
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if not role:
            raise InvalidRequestError(f"{where} needs a role, such as user", param=f"{where}.role")
        if role not in ROLES:
            expected = f"must be one of {', '.join(ROLES)}; got {role!r:.80}"
            raise InvalidRequestError(f"{where}.role {expected}", param=f"{where}.role")


def text_content(content: Any, param: str) -> str | None:
    """Return a message's content, a string or a list of parts, as one text. param: its place in the request.

    Raises InvalidRequestError, and UnsupportedError for a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content
    texts = [_part_text(part, param) for part in _checked_list(content, param)]
    return "\n".join(texts) if texts else None


def template_content(
    content: Any, param: str, *, has_parts: bool, needs_parts: bool
) -> str | list[dict[str, str]] | None:
    """Return a message's content as a chat template reads it, after `take_images`.

    has_parts: the template reads parts. needs_parts: it reads nothing else, and a text becomes one part. For templates
    that read no parts, they are joined to one text with line breaks, and an image is refused.
    """
    if isinstance(content, str) and needs_parts:
        return [{"type": "text", "text": content}]
    if content is None or isinstance(content, str):
        return content
    if has_parts:
        parts = _checked_list(content, param)
        return [_MARK if part == _MARK else {"type": "text", "text": _part_text(part, param)} for part in parts] or None
    if isinstance(content, list) and _MARK in content:
        message = "the chat template reads texts only, and has no place for an image; use the model's own template"
        raise UnsupportedError(message, param=param)
    return text_content(content, param)


def has_images(content: Any) -> bool:
    """Return whether one of the parts is an image."""
    return isinstance(content, list) and any(map(_is_image, content))


def check_images(messages: Sequence[Message], *, reads_images: bool) -> None:
    """Check the parts that are not text. reads_images: the model reads images.

    Raises UnsupportedError for what the model does not read, and InvalidRequestError for an image in a wrong form.
    """
    for place, message in enumerate(messages):
        content, param = message.get("content"), f"messages[{place}].content"
        for part in content if isinstance(content, list) else ():
            if reads_images and _is_image(part):
                _source_of(part, param)
            elif reads_images:
                _part_text(part, param, reads="texts and images")
            elif _is_image(part):
                _part_text(part, param)


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[ImageSource]]:
    """Return checked messages with a mark in place of each image, and the images in their order."""
    marked: list[Message] = []
    images: list[ImageSource] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and has_images(content):
            images += [_source_of(part, f"messages[{place}].content") for part in content if _is_image(part)]
            message = {**message, "content": [_MARK if _is_image(part) else part for part in content]}
        marked.append(message)
    return marked, images


def num_image_chars(messages: Sequence[Message]) -> int:
    """Return the number of characters in the addresses of images."""
    return sum(len(source) for source in _addresses(messages))


def _addresses(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if _is_image(part) and isinstance(address := _given(part), str) and is_data(address):
                yield address


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(kind := part.get("type"), str) and kind in _IMAGE_FIELDS


def _given(part: Mapping[str, Any]) -> Any:
    value = part.get(_IMAGE_FIELDS[part["type"]])
    return value.get("url") if isinstance(value, Mapping) else value


def _source_of(part: Mapping[str, Any], param: str) -> ImageSource:
    value = _given(part)
    if value is None and part.get("file_id") is not None:
        raise UnsupportedError("images are not kept as files here; send the image as a data: address", param=param)
    if not is_source(value):
        field = _IMAGE_FIELDS[part["type"]]
        message = f"a content part of the type {part['type']!r} needs {field!r} with a data: address, such as "
        raise InvalidRequestError(message + '{"url": "data:image/png;base64,..."}', param=param)
    return value


def _checked_list(parts: Any, param: str) -> list[Any]:
    if not isinstance(parts, list):
        raise InvalidRequestError("content must be a string or a list of parts", param=param)
    return parts


def _part_text(part: Any, param: str, *, reads: str = "text") -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        message = 'a content part needs a type, such as {"type": "text", "text": "..."}'
        raise InvalidRequestError(message, param=param)
    if kind not in ("text", "refusal"):
        raise UnsupportedError(f"this model reads {reads} only; a content part has type {kind[:64]!r}", param=param)
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequestError(f"a content part of the type {kind!r} needs a string {kind!r}", param=param)
    return text
