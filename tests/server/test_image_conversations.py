"""Images in requests over HTTP: they reach the engine, count in the usage, and stay in recorded conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewick.errors import InvalidRequestError
from pagewick.server.core import conversations
from pagewick.server.core.conversations import MAX_SESSION_BYTES, Conversations
from tests.images.pictures import address_of
from tests.images.reading_model import FILES, PAD, PAD_ID, expanded, image_part, reading_encoder, reading_engine, user
from tests.server.api_routes import CHAT, Api, error_of

ASK = [user("What is ", image_part(0), "?")]
RECORD: dict[str, Any] = {"session_id": "s", "record_conversation": True}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr("tests.server.api_routes.fake_engine", reading_engine)
    return Api()


def test_images_count_as_tokens_of_the_prompt(api: Api) -> None:
    body = api.chat(messages=ASK).json()
    wanted = reading_encoder().place_chat(ASK).token_ids
    (request,) = api.client.requests
    assert request.prompt_token_ids == wanted
    assert [(one.start, one.num_tokens) for one in request.images] == [(wanted.index(PAD_ID), 6)]
    assert body["usage"]["prompt_tokens"] == len(wanted)
    counted = api.post("/tokenize", messages=ASK).json()
    assert counted["count"] == len(wanted) and counted["tokens"] == wanted
    prompt = api.post("/apply-template", messages=ASK).json()["prompt"]
    assert prompt.count(PAD) == 1 and expanded(prompt, 0) == wanted


def test_earlier_images_of_a_session_are_read_again(api: Api) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        api.client.texts = ["one"]
        assert (await http.post(CHAT, json={"messages": ASK, **RECORD})).status_code == 200
        more = [user("And ", image_part(2), PAD)]
        assert (await http.post(CHAT, json={"messages": more, **RECORD})).status_code == 200
        whole = [*ASK, {"role": "assistant", "content": "one"}, *more]
        assert (await http.get("/v1/sessions/s")).json()["messages"][:3] == whole
        request = api.client.requests[-1]
        assert request.prompt_token_ids == reading_encoder().place_chat(whole).token_ids
        assert [one.num_tokens for one in request.images] == [6, 5]

    api.run(talk)


def test_no_file_of_the_server_is_read(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(FILES[0])
    for address in (str(path), f"file://{path}", f"http://localhost/{path}"):
        error = error_of(api.chat(messages=[user({"type": "image_url", "image_url": {"url": address}})]))
        assert error["message"].startswith("messages[0].content[0].image_url.url")
        assert "data: address" in error["message"]
        error = error_of(api.chat(messages=[user({"type": "image", "image": address})]))
        assert "a content part has type 'image'" in error["message"]
    assert not api.client.requests


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": address_of(FILES[0][:300])}}], "image 1 of the request: its PNG"),
        ([image_part(0), {"type": "image_url", "image_url": {"url": "data:,x"}}], "image 2 of the request"),
        ([{"type": "video_url", "video_url": {"url": "data:,x"}}], "type 'video_url'"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "type 'input_audio'"),
        ([image_part(0)] * 65, "at most 64 images"),
    ],
)
def test_wrong_images_are_answered_with_400(api: Api, parts: list[Any], reason: str) -> None:
    assert reason in error_of(api.chat(messages=[user(*parts)]))["message"]
    assert not api.client.requests


def test_sessions_have_a_limit_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    large = address_of(bytes(MAX_SESSION_BYTES))
    message = user("a", {"type": "image_url", "image_url": {"url": large}})
    Conversations(60).begin("", "s", [message]).close()
    monkeypatch.setattr(conversations, "MAX_SESSION_IMAGE_BYTES", 2 * len(large) - 1)
    sessions = Conversations(60)
    sessions.begin("", "s", [message]).close()
    with pytest.raises(InvalidRequestError, match="session's images have more than"):
        sessions.begin("", "s", [message, message])
    with pytest.raises(InvalidRequestError, match=f"{MAX_SESSION_BYTES} bytes"):
        sessions.begin("", "s", [message, user("x" * MAX_SESSION_BYTES)])
    # The session is free again.
    sessions.begin("", "s", [message]).close()
