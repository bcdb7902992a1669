"""Images in requests of all APIs: what reaches the core, what is refused, and what the lists of models say.

A stand-in for the core's text layer notes the messages, and goes on with the name of each image in its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec import structs

from pagewick.generation import Generation
from pagewick.server.core.conversations import Recording
from pagewick.server.core.core import Core
from pagewick.server.core.request import ChatRequest, Message
from pagewick.server.core.request_context import RequestContext
from pagewick.server.settings import IMAGE_BODY_SIZE, TEXT_BODY_SIZE, ServerSettings
from tests.server.api_routes import CHAT, HELLO, Api, error_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PIXEL = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PIXEL}"
PART = {"type": "image_url", "image_url": {"url": URL}}
ITEM = {"type": "input_image", "image_url": URL}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
SEE = {"type": "text", "text": "See:"}
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class ImageApi(Api):
    """The API of a model that reads images. seen: the messages of the latest request, as they reach the core."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.client.info = structs.replace(self.client.info, image_token_id=7)
        self.seen: Sequence[Message] = ()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ImageApi:
    made = ImageApi()
    start, count = Core.start_chat, Core.count_tokens

    def taken(chat: ChatRequest) -> ChatRequest:
        made.seen = chat.messages
        return replace(chat, messages=[{**one, "content": _named(one.get("content"))} for one in chat.messages])

    async def start_chat(
        self: Core, context: RequestContext, chat: ChatRequest, recording: Recording | None
    ) -> Generation:
        return await start(self, context, taken(chat), recording)

    async def count_tokens(self: Core, chat: ChatRequest) -> int:
        return await count(self, taken(chat))

    monkeypatch.setattr(Core, "start_chat", start_chat)
    monkeypatch.setattr(Core, "count_tokens", count_tokens)
    return made


def _named(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part["image_url"]["url"]} if "image_url" in part else part for part in content]


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ok(response: httpx.Response) -> httpx.Response:
    assert response.status_code == 200, response.text
    return response


def test_chats_hand_on_images_as_they_came(api: ImageApi) -> None:
    messages = [
        user(SEE, PART),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [PART, SEE]},
    ]
    response = ok(api.chat(messages=messages, tools=[TOOL]))
    assert "x-pagewick-ignored" not in response.headers
    assert [one.get("content") for one in api.seen] == [[SEE, PART], None, [PART, SEE]]
    assert api.prompt.count(URL) == 2


@pytest.mark.parametrize(("detail", "is_named"), [(None, False), ("auto", False), ("low", True), ("high", True)])
@pytest.mark.parametrize("strict", [False, True])
def test_a_detail_is_accepted_and_named(api: ImageApi, detail: str | None, is_named: bool, strict: bool) -> None:
    api.settings = replace(api.settings, strict=strict)
    part = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
    response = ok(api.chat(messages=[user(SEE, part)]))
    named = "messages[].content[].image_url.detail" if is_named else None
    assert response.headers.get("x-pagewick-ignored") == named
    response = ok(api.post(RESPONSES, input=[user({"type": "input_text", "text": "See:"}, {**ITEM, "detail": detail})]))
    assert response.headers.get("x-pagewick-ignored") == ("input[].content[].detail" if is_named else None)


def test_unknown_fields_of_images_are_named_or_refused(api: ImageApi) -> None:
    part = {"type": "image_url", "image_url": {"url": URL, "size": 3}, "uuid": "x"}
    block = {"type": "image", "source": {**BLOCK["source"], "size": 3}}  # type: ignore[dict-item]
    named = ok(api.chat(messages=[user(part)])).headers["x-pagewick-ignored"]
    assert named == "messages[].content[].uuid, messages[].content[].image_url.size"
    named = ok(api.post(MESSAGES, messages=[user(block)], max_tokens=9)).headers["x-pagewick-ignored"]
    assert named == "messages[].content[].source.size"
    api.settings = replace(api.settings, strict=True)
    assert error_of(api.chat(messages=[user(part)]))["code"] == "unknown_parameter"


WRONG_URLS = [
    ("https://e.org/x.png", "fetches nothing; send the image itself"),
    (" HTTP://e.org/x.png", "fetches nothing; send the image itself"),
    ("file:///etc/passwd", "must be a data: address"),
    ("/etc/passwd", "must be a data: address"),
    ("", "must be a data: address"),
    (None, "must be a data: address"),
    (5, "must be a data: address"),
]


@pytest.mark.parametrize(("url", "words"), WRONG_URLS, ids=str)
def test_other_addresses_are_refused(api: ImageApi, url: Any, words: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    for path in (CHAT, "/tokenize", "/apply-template"):
        error = error_of(api.post(path, messages=[*HELLO, user(SEE, part)]))
        assert error["param"] == "messages[1].content[1].image_url.url" and words in error["message"]
    error = error_of(api.post(RESPONSES, input=[user({**ITEM, "image_url": url})]))
    assert error["param"] == "input[0].content[0].image_url" and words in error["message"]
    assert not api.seen


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (user({"type": "image_url"}), "messages[0].content[0].image_url", "an object with a url"),
        (user({"type": "image_url", "image_url": URL}), "messages[0].content[0].image_url", "an object with a url"),
        (user({"type": "image_url", "image_url": {"url": URL, "detail": 1}}),
         "messages[0].content[0].image_url.detail", "auto, low or high"),
        ({"role": "system", "content": [SEE, PART]}, "messages[0].content[1]", "roles user and tool"),
        ({"role": "assistant", "content": [PART]}, "messages[0].content[0]", "roles user and tool"),
        # The Python API takes these; over HTTP the first would read a file of the server's.
        (user({"type": "image", "image": "/etc/passwd"}), "messages[0].content", "'image'"),
        (user({"type": "image_pil", "image_pil": "x"}), "messages[0].content", "'image_pil'"),
        (user({"type": "input_image", "image_url": URL}), "messages[0].content", "'input_image'"),
        (user({"type": "video_url", "video_url": {"url": URL}}), "messages[0].content", "reads text and images"),
        (user({"type": "input_audio", "input_audio": {}}), "messages[0].content", "'input_audio'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_parts_of_chats_are_named(api: ImageApi, message: Any, param: str, words: str) -> None:
    for path in (CHAT, "/tokenize", "/apply-template"):
        error = error_of(api.post(path, messages=[message]))
        assert error["param"] == param and words in error["message"], error
    assert not api.seen


def test_a_model_of_texts_says_so_first() -> None:
    away = {"type": "image_url", "image_url": {"url": "https://e.org/x.png"}}
    error = error_of(Api().chat(messages=[user(SEE, away)]))
    assert error["param"] == "messages[0].content" and "this model reads text only" in error["message"]
    error = error_of(Api().post(RESPONSES, input=[user({**ITEM, "image_url": "https://e.org/x.png"})]))
    assert error["param"] == "input[0].content[0].type" and "reads texts only" in error["message"]
    error = error_of(Api().post(MESSAGES, messages=[user({"type": "image", "source": {"type": "url", "url": "x"}})],
                                max_tokens=9))  # fmt: skip
    assert "this model reads text only; messages[0].content[0] has type 'image'" in error["message"]


def test_images_of_the_responses_api_become_those_of_chats(api: ImageApi) -> None:
    text = {"type": "input_text", "text": "See:"}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": [text, {**ITEM, "file_id": None}]}
    items = [user(text, ITEM), call, result, user(ITEM)]
    first = ok(api.post(RESPONSES, input=items)).json()
    assert [one["content"] for one in api.seen] == [[SEE, PART], None, [SEE, PART], [PART]]
    assert api.prompt.count(URL) == 3
    count = ok(api.post(f"{RESPONSES}/input_tokens", input=items)).json()["input_tokens"]
    assert count == first["usage"]["input_tokens"]


def test_stored_responses_keep_their_images(api: ImageApi) -> None:
    async def work(http: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        first = await http.post(RESPONSES, json={"input": [user(ITEM)]})
        going_on = {"input": "And?", "previous_response_id": first.json()["id"]}
        items = await http.get(f"{RESPONSES}/{first.json()['id']}/input_items")
        return first, items, await http.post(RESPONSES, json=going_on)

    _, items, second = map(ok, api.run(work))
    assert items.json()["data"][0]["content"] == [ITEM]
    assert second.json()["status"] == "completed" and api.seen[0]["content"] == [PART]


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        (user({"type": "input_image", "file_id": "file-1"}), "input[0].content[0].file_id", "keeps no files"),
        (user({"type": "input_image"}), "input[0].content[0].image_url", "a data: address"),
        (user({**ITEM, "detail": []}), "input[0].content[0].detail", "auto, low or high"),
        (user({"type": "input_file", "file_data": "x"}), "input[0].content[0].type", "texts and images only"),
        ({"role": "developer", "content": [ITEM]}, "input[0].content[0]", "messages of the user"),
        ({"role": "assistant", "content": [ITEM]}, "input[0].content[0]", "messages of the user"),
    ],
    ids=str,
)
def test_wrong_images_of_the_responses_api_are_named(api: ImageApi, item: Any, param: str, words: str) -> None:
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        error = error_of(api.post(path, input=[item]))
        assert error["param"] == param and words in error["message"], error


def test_images_of_anthropics_api_become_those_of_chats(api: ImageApi) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [BLOCK], "is_error": True}
    messages = [user(BLOCK, SEE), {"role": "assistant", "content": [use]}, user(result, BLOCK), user(SEE)]
    fields = {"messages": messages, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    message = ok(api.post(MESSAGES, max_tokens=9, **fields)).json()
    error_text = {"type": "text", "text": "Error:"}
    assert [one.get("content") for one in api.seen] == [[PART, SEE], None, [error_text, PART], [PART, SEE]]
    assert api.prompt.count(URL) == 3
    count = ok(api.post(f"{MESSAGES}/count_tokens", **fields)).json()["input_tokens"]
    assert count == message["usage"]["input_tokens"]


def test_an_image_may_be_all_of_a_message_of_anthropics_api(api: ImageApi) -> None:
    for media_type in ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"):
        block = {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": "AAAA"}}
        ok(api.post(MESSAGES, messages=[user(block)], max_tokens=9))
        url = f"data:{media_type};base64,AAAA"
        assert [*api.seen] == [user({"type": "image_url", "image_url": {"url": url}})]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image"}, "source must be {"),
        ({"type": "image", "source": {"type": "url", "url": "https://e.org/x.png"}}, "send the image itself"),
        ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "keeps no files"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": "AA"}}, "image/png, image"),
        ({"type": "image", "source": {"type": "base64", "data": "AA"}}, "media_type must be one of"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "file in base64"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": 5}}, "expected a string"),
        ({"type": "document", "source": {}}, "reads text and images; messages[1].content[0] has type 'document'"),
    ],
    ids=str,
)
def test_wrong_images_of_anthropics_api_are_named(api: ImageApi, block: Any, words: str) -> None:
    message = error_of(api.post(MESSAGES, messages=[*HELLO, user(block)], max_tokens=9))["message"]
    assert words in message and "messages[1].content[0]" in message
    for role in ("assistant", "system"):
        answer = {"role": role, "content": [BLOCK]}
        message = error_of(api.post(MESSAGES, messages=[*HELLO, answer, *HELLO], max_tokens=9))["message"]
        assert "messages[1].content[0] has type 'image', which a message of this role cannot have" in message


def test_routes_without_messages_take_no_images(api: ImageApi) -> None:
    error = error_of(api.post("/v1/completions", prompt="x", image_data=[{"data": PIXEL, "id": 1}]))
    assert error["param"] == "image_data" and "image_url part" in error["message"]
    error = error_of(api.post("/v1/embeddings", input=[PART]))
    assert error["param"] == "input[0]" and "got an object" in error["message"]
    assert error_of(api.post("/v1/embeddings", messages=[user(PART)]))["param"] == "messages"
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        assert "--max-image-pixels" in error_of(api.chat(**{name: {"max_pixels": 1}}))["message"]


def test_the_list_of_models_says_what_the_model_reads(api: ImageApi) -> None:
    def modalities(one: Api) -> Any:
        (card,) = one.run(lambda http: http.get("/v1/models")).json()["data"]
        return card["input_modalities"]

    assert modalities(api) == ["text", "image"] and modalities(Api()) == ["text"]


def test_bodies_may_be_larger_for_a_model_that_reads_images(api: ImageApi) -> None:
    long_url = f"data:image/png;base64,{'A' * TEXT_BODY_SIZE}"
    body = {"messages": [user({"type": "image_url", "image_url": {"url": long_url}})]}
    seen: list[str] = []
    for one in (api, Api()):
        answer = one.run(lambda http: http.post(CHAT, content=json.dumps({**body, "stream": 3})))
        seen.append(answer.json()["error"].get("code") or answer.json()["error"]["param"])
    assert seen == ["stream", "request_too_large"]
    settings = ServerSettings(served_model_name=("m",), max_body_size=12)
    assert [settings.body_limit(reads_images=reads) for reads in (False, True)] == [12, 12]
    settings = ServerSettings(served_model_name=("m",))
    assert [settings.body_limit(reads_images=reads) for reads in (False, True)] == [TEXT_BODY_SIZE, IMAGE_BODY_SIZE]
