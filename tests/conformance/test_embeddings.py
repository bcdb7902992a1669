"""Embeddings, as the official client and others ask for them."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import openai
import pytest

from tests.conformance.callers import Caller, error_of
from tests.conformance.servers import MODEL, Server

TEXTS = ["Where is the station?", "ß😀é 日本", "Where is the station?"]
SIZE = 256


def test_point_77_embeddings(caller: Caller) -> None:
    """By default the client asks for base64, and decodes it; numbers are the same."""
    by_default, as_numbers = caller.embeddings(input=TEXTS), caller.embeddings(input=TEXTS, encoding_format="float")
    assert by_default.object == "list" and by_default.model == MODEL
    assert [(one.object, one.index) for one in by_default.data] == [("embedding", index) for index in range(3)]
    vectors = [one.embedding for one in as_numbers.data]
    assert [one.embedding for one in by_default.data] == vectors
    assert {len(vector) for vector in vectors} == {SIZE}
    assert all(math.isclose(sum(x * x for x in vector), 1, abs_tol=1e-5) for vector in vectors)
    assert vectors[0] == vectors[2] != vectors[1]
    assert by_default.usage == as_numbers.usage
    assert by_default.usage.total_tokens == by_default.usage.prompt_tokens > 3


def test_point_77_base64_is_little_endian_float32(server: Server) -> None:
    """base64 holds the numbers that `float` gives; over HTTP, `float` is the default."""
    answers = [
        server.http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": form}).json()
        for form in ("base64", "float", None)
    ]
    (encoded,), (numbers,), (by_default,) = ([one["embedding"] for one in answer["data"]] for answer in answers)
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == numbers == by_default
    assert answers[0].keys() == {"object", "data", "model", "usage"}


def test_point_77_inputs(caller: Caller, server: Server) -> None:
    """A text, several, token ids and lists of them mean the same; usage counts what /tokenize counts."""
    token_ids = server.http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    inputs = (TEXTS[0], [TEXTS[0]], token_ids, [token_ids])
    found = [caller.embeddings(input=one) for one in inputs]
    assert len({tuple(response.data[0].embedding) for response in found}) == 1
    assert {response.usage.prompt_tokens for response in found} == {len(token_ids)}
    assert len(caller.embeddings(input=["a"] * 200).data) == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [5000]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a", "b " * 3000]}, "input[1]"),
        ({"input": 5}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "extra_body": {"pooling": "max"}}, "pooling"),
        ({"input": "a", "extra_body": {"pooling": "mean", "embedding_type": "mean"}}, "embedding_type"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_point_77_wrong_requests(caller: Caller, fields: dict[str, Any], param: str) -> None:
    """400, with the name of the field or the place of the input."""
    with pytest.raises(openai.BadRequestError) as failure:
        caller.embeddings(**fields)
    assert error_of(failure.value)["param"] == param


def test_point_78_dimensions(caller: Caller) -> None:
    """The first numbers, which have the length 1 again."""
    (whole,) = caller.embeddings(input="cat").data
    (first,) = caller.embeddings(input="cat", dimensions=5).data
    length = math.sqrt(sum(x * x for x in whole.embedding[:5]))
    assert first.embedding == pytest.approx([x / length for x in whole.embedding[:5]], rel=1e-5)
    (raw,) = caller.embeddings(input="cat", dimensions=5, extra_body={"normalize": False}).data
    assert sum(x * x for x in raw.embedding) != pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("dimensions", [0, -1, SIZE + 1])
def test_point_78_wrong_dimensions(caller: Caller, dimensions: int) -> None:
    """400, with the numbers that are allowed."""
    with pytest.raises(openai.BadRequestError, match="dimensions must be 1 to 256") as failure:
        caller.embeddings(input="cat", dimensions=dimensions)
    assert error_of(failure.value)["param"] == "dimensions"


def test_point_78_means(caller: Caller) -> None:
    """With vllm.rs's name for it, too."""
    found = [
        caller.embeddings(input=TEXTS[0], extra_body={name: value}).data[0].embedding
        for name, value in (("pooling", "mean"), ("embedding_type", "mean"), ("pooling", "last"))
    ]
    assert found[0] == found[1] != found[2]
