"""An encoder behind the server: embeddings for OpenAI's client, scores of pairs, and errors for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from torch import nn

from tests.conformance.servers import Server
from tests.models.encoders import hidden_states, write_encoder
from tests.models.word_pieces import TEXTS, word_pieces, write_tokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, nn.Module]]:
    directory: Path = tmp_path_factory.mktemp("encoder")
    model = write_encoder("bert", directory)
    write_tokenizer(word_pieces(), directory)
    server = Server(directory / "log", str(directory), "--served-model-name", "tiny-bert")
    try:
        server.wait_until_ready()
        yield server, model
    finally:
        server.stop()


@pytest.fixture
def client(encoder: tuple[Server, nn.Module]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{encoder[0].url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_embeddings_for_the_client_of_openai(client: openai.OpenAI, encoder: tuple[Server, nn.Module]) -> None:
    found = client.embeddings.create(model="tiny-bert", input=TEXTS)
    ids = [word_pieces().encode(text).ids for text in TEXTS]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    for one, states in zip(found.data, hidden_states(encoder[1], ids), strict=True):
        expected = torch.nn.functional.normalize(states.mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(one.embedding), expected, rtol=1e-4, atol=1e-5)
    first = client.embeddings.create(model="tiny-bert", input=ids[0], extra_body={"pooling": "cls", "normalize": False})
    torch.testing.assert_close(
        torch.tensor(first.data[0].embedding), hidden_states(encoder[1], ids[:1])[0][0], rtol=1e-4, atol=1e-4
    )


def test_a_text_that_does_not_fit_is_refused_or_cut(client: openai.OpenAI) -> None:
    long = "china " * 100
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 80 tokens.*truncate_prompt_tokens"):
        client.embeddings.create(model="tiny-bert", input=[TEXTS[0], long])
    ids = word_pieces().encode(long).ids
    for limit, kept in ((20, [*ids[:19], ids[-1]]), (3, [*ids[:2], ids[-1]]), (-1, [*ids[:79], ids[-1]]), (900, ids)):
        if limit == 900:
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                client.embeddings.create(model="tiny-bert", input=long, extra_body={"truncate_prompt_tokens": limit})
            continue
        cut = client.embeddings.create(model="tiny-bert", input=long, extra_body={"truncate_prompt_tokens": limit})
        expected = client.embeddings.create(model="tiny-bert", input=kept)
        assert (cut.usage.prompt_tokens, cut.data[0].embedding) == (len(kept), expected.data[0].embedding)
    given = client.embeddings.create(model="tiny-bert", input=ids[:70], extra_body={"truncate_prompt_tokens": 20})
    assert given.data[0].embedding == client.embeddings.create(model="tiny-bert", input=ids[:20]).data[0].embedding
    with pytest.raises(openai.BadRequestError, match="2 tokens leave no room for a text: the model adds 2"):
        client.embeddings.create(model="tiny-bert", input=long, extra_body={"truncate_prompt_tokens": 2})


def test_other_requests_get_an_error_that_says_why(client: openai.OpenAI, encoder: tuple[Server, nn.Module]) -> None:
    with pytest.raises(openai.BadRequestError, match="makes embeddings and writes no text"):
        client.completions.create(model="tiny-bert", prompt="a")
    with pytest.raises(openai.BadRequestError, match="makes embeddings and writes no text"):
        client.chat.completions.create(model="tiny-bert", messages=[{"role": "user", "content": "a"}])
    response = encoder[0].http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert response.status_code == 400 and "nothing says that this model is a reranker" in response.text


def test_the_first_request_that_the_server_prints(encoder: tuple[Server, nn.Module]) -> None:
    stdout = encoder[0].process.stdout
    assert stdout is not None
    printed = "".join(iter(stdout.readline, "Ctrl-C stops the server.\n"))
    assert f"curl {encoder[0].url}/v1/embeddings " in printed
