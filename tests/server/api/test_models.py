"""The list of models: the one model under all of its names."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from pagewick.server.api.served_models import fingerprint_of
from pagewick.server.settings import ServerSettings
from tests.fake_engine import MAX_MODEL_LEN, FakeClient
from tests.server.api_routes import HELLO, Api, error_of

NAMES = ("org/first", "second", "third/with/slashes")


def get(api: Api, path: str) -> Any:
    return api.run(lambda http: http.get(path))


def test_every_name_is_listed_and_found() -> None:
    api = Api(served_model_name=NAMES)
    body = get(api, "/v1/models").json()
    assert body["object"] == "list" and [card["id"] for card in body["data"]] == [*NAMES]
    for card in body["data"]:
        assert sorted(card) == [
            "created", "id", "input_modalities", "max_model_len", "object", "owned_by", "parent", "permission", "root",
        ]  # fmt: skip
        assert (card["root"], card["parent"], card["max_model_len"]) == ("org/first", None, MAX_MODEL_LEN)
        assert card["permission"][0]["object"] == "model_permission" and card["permission"][0]["allow_sampling"]
        found = get(api, f"/v1/models/{card['id']}").json()
        assert {**found, "created": 0, "permission": 0} == {**card, "created": 0, "permission": 0}
    with_slash = get(api, "/v1/models/").json()
    assert [card["id"] for card in with_slash["data"]] == [*NAMES]
    error = error_of(get(api, "/v1/models/org/fourth"), 404)
    assert error["code"] == "model_not_found" and all(name in error["message"] for name in NAMES)


@pytest.mark.parametrize("name", [*NAMES, None])
def test_responses_carry_the_first_name(name: str | None) -> None:
    api = Api(served_model_name=NAMES)
    assert api.chat(model=name).json()["model"] == "org/first"
    assert {event["model"] for event in api.chat_events(model=name)} == {"org/first"}
    assert api.post("/v1/completions", prompt="a", model=name).json()["model"] == "org/first"


def test_a_star_stands_for_any_name() -> None:
    api = Api(served_model_name=("org/first", "*"))
    for name in ("org/first", "llama7b", "*", None):
        assert api.chat(model=name).json()["model"] == "org/first"
    assert [card["id"] for card in get(api, "/v1/models").json()["data"]] == ["org/first"]
    assert get(api, "/v1/models/llama7b").json()["root"] == "org/first"
    assert ServerSettings.for_model("m", served_model_name=("*",)).model_name == "m"


def test_the_fingerprint_is_that_of_what_computes() -> None:
    api = Api()
    first, other = api.chat().json(), api.chat(messages=HELLO * 2).json()
    assert first["system_fingerprint"] == other["system_fingerprint"] == fingerprint_of(api.client.info)
    assert {event["system_fingerprint"] for event in api.chat_events()} == {first["system_fingerprint"]}
    assert "fake" not in first["system_fingerprint"]
    info = FakeClient().info
    assert fingerprint_of(info) == first["system_fingerprint"]
    for change in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"}, {"rotations": ["theta=1e6"]}):
        assert fingerprint_of(structs.replace(info, **change)) != first["system_fingerprint"]
