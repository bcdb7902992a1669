"""The description of the API: it is valid, names every route, and says what its settings mean for keys."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route
from starlette.testclient import TestClient

from pagewick import __version__
from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import RANGES, SamplingParams
from pagewick.server.api.operation import handler_and_operation
from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine

MODEL = "org/fake-model"
KEY = "a-long-test-key"
Json = dict[str, Any]


def client_of(**settings: Any) -> TestClient:
    app = build_app(fake_engine(FakeClient()), ServerSettings(served_model_name=(MODEL,), **settings))
    return TestClient(app, base_url="http://127.0.0.1", headers={"x-api-key": KEY} if "api_key" in settings else {})


def routes_of(client: TestClient) -> list[Route]:
    app: Any = client.app
    while not hasattr(app, "routes"):
        app = app._app
    return list(app.routes)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of()


@pytest.fixture(scope="module")
def document(client: TestClient) -> Json:
    response = client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    described: Json = response.json()
    return described


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def schema_of(document: Json, name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


def test_the_document_is_valid_openapi(document: Json) -> None:
    OpenAPIV31SpecValidator(document).validate()
    for name in document["components"]["schemas"]:
        Draft202012Validator.check_schema(schema_of(document, name))
    assert document["info"]["version"] == __version__


def test_it_has_exactly_the_routes_of_the_server(client: TestClient, document: Json) -> None:
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in routes_of(client)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, method, _ in operations(document)} == served
    assert len(served) > 15


def test_every_handler_describes_itself(client: TestClient, document: Json) -> None:
    assert [route.path for route in routes_of(client) if handler_and_operation(route.endpoint)[1] is None] == []
    summaries = [operation["summary"] for _, _, operation in operations(document)]
    assert all(summary and not summary.endswith(".") for summary in summaries)
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids)


def test_without_the_chat_page_or_the_description_their_routes_are_gone() -> None:
    assert "/" not in client_of(ui=False).get("/openapi.json").json()["paths"]
    hidden = client_of(docs=False)
    for path in ("/openapi.json", "/docs", "/page/docs/docs.js"):
        assert hidden.get(path).status_code == 404
    assert hidden.get("/").status_code == 200


def test_with_keys_the_description_needs_one_and_says_which_routes_do() -> None:
    client = client_of(api_key=(KEY,))
    assert client.get("/openapi.json", headers={"x-api-key": ""}).status_code == 401
    document = client.get("/openapi.json").json()
    OpenAPIV31SpecValidator(document).validate()
    assert document["security"] == [{"bearer": []}, {"header": []}]
    stranger = TestClient(client.app, base_url="http://127.0.0.1")
    for path, method, operation in operations(document):
        needs_key = operation.get("security") != []
        answer = stranger.request(method, path.replace("{file}", "icon.svg").replace("{id}", "x"))
        assert (answer.status_code == 401) == needs_key == ("401" in operation["responses"]), path


def test_without_keys_it_names_none(document: Json) -> None:
    assert "security" not in document and "securitySchemes" not in document["components"]


def test_every_field_of_a_request_is_explained(document: Json) -> None:
    schemas = document["components"]["schemas"]
    for _, _, operation in operations(document):
        if "requestBody" in operation:
            (content,) = operation["requestBody"]["content"].values()
            fields = schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"]
            assert [name for name, field in fields.items() if not field.get("description")] == []
            assert all("Raises" not in field["description"] for field in fields.values())


def test_descriptions_end_where_the_next_field_begins(document: Json) -> None:
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert fields["stop"]["description"] == "strings that end the text and are removed from it."
    assert fields["include_stop_str_in_output"]["description"] == "keep the stop string."
    assert fields["max_tokens"]["description"].startswith("upper limit of new tokens; null: until the context is full.")


@pytest.mark.parametrize("name", sorted(RANGES))
def test_ranges_are_those_that_are_checked(document: Json, name: str) -> None:
    low, high = RANGES[name]
    together: Json = {"use_beam_search": True} if name == "length_penalty" else {}
    for value in (low, high):
        if not (value == 0 and name in ("top_p", "typical_p")) and name != "best_of":
            SamplingParams(**{name: value}, **together)
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequestError):
            SamplingParams(**{name: value}, **together)
    field = document["components"]["schemas"]["CompletionRequest"]["properties"][name]
    (number,) = [option for option in field["anyOf"] if "minimum" in option]
    assert (number["minimum"], number["maximum"]) == (low, high)


def test_streams_and_errors_are_described(document: Json) -> None:
    for path, chunk in (("/v1/chat/completions", "ChatCompletionChunk"), ("/v1/completions", "Completion")):
        responses = document["paths"][path]["post"]["responses"]
        streamed = responses["200"]["content"]["text/event-stream"]["schema"]["anyOf"]
        assert [one["$ref"].rpartition("/")[2] for one in streamed] == [chunk, "ErrorResponse"]
        assert {"400", "404", "409", "413", "429", "500", "503", "504", "default"} <= responses.keys()
    for name in ("TooManyRequests", "ServiceUnavailable"):
        assert "retry-after" in document["components"]["responses"][name]["headers"]


def test_fields_that_are_refused_or_without_effect_are_named(document: Json) -> None:
    about = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["description"]
    refused, harmless = about.split("Without effect:")
    assert "prediction" in refused and "best_of" in refused and "user" in harmless
    of_completions = document["paths"]["/v1/completions"]["post"]["requestBody"]["description"]
    assert "best_of" not in of_completions


def test_fields_of_responses_that_are_always_sent_are_required(document: Json) -> None:
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatChoice"]["required"]) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert schemas["ChatMessage"]["required"] == ["role"]
    assert schemas["ChatCompletion"]["properties"]["choices"]["items"] == {"$ref": "#/components/schemas/ChatChoice"}


def test_it_is_made_once_and_stays_small(client: TestClient) -> None:
    body = client.get("/openapi.json").content
    assert body == client.get("/openapi.json").content
    assert len(gzip.compress(body)) < 24_000
    assert msgspec.json.decode(body)["openapi"] == "3.1.0"
