"""`pagewick chat --url`: requests to a server, and how its responses and errors are handled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.cli.chatting.conversation import Conversation
from pagewick.cli.chatting.remote_model import RemoteModel
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.server_address import ServerAddress, api_key_from, error_of
from pagewick.errors import ConfigError, ContextLengthError, EngineError, InvalidRequestError, QueueFullError
from tests.cli.stand_in_server import ODD_CHUNKS, StandInServer, chat_chunk, events, usage_chunk


def chat(*arguments: str, stdin: str) -> Result:
    return CliRunner().invoke(cli, ["chat", *arguments], input=stdin, prog_name="pagewick")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInServer]:
    for name in ("PAGEWICK_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with StandInServer().running() as server:
        yield server


@pytest.fixture
def conversation(server: StandInServer) -> Conversation:
    address = ServerAddress.parse(server.url)
    return Conversation(RemoteModel.connect(address, "stand-in"), ChatSettings(), None)


def test_a_server_gets_openai_requests(server: StandInServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k1")
    result = chat(
        "--url", server.url, "--system", "be kind", "--temperature", "0.5", "--no-thinking", stdin="hello\nagain\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hi\nHi\n"
    path, headers, body = server.requests[1]
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer k1")
    assert body == {
        "model": "stand-in",
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "again"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    "chunks",
    [
        [chat_chunk(reasoning_content="h"), chat_chunk(reasoning_content="m"), chat_chunk(content="Yes")],
        [chat_chunk(reasoning="hm"), chat_chunk(content="Y"), chat_chunk(content="es")],
        [chat_chunk(content="\n<thi"), chat_chunk(content="nk>\nhm</think>\n\nYes")],
    ],
)
def test_thoughts_are_read_under_several_names(
    server: StandInServer, conversation: Conversation, chunks: list[dict[str, Any]]
) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    server.reply = lambda body: (200, events(*chunks, end, usage_chunk(3, 9)))
    pieces = list(conversation.say("hello"))
    assert "".join(piece.text for piece in pieces if piece.kind == "text") == "Yes"
    assert conversation.thoughts == "hm"
    assert conversation.turns[-1] == {"role": "assistant", "content": "Yes"}
    assert (conversation.model.response_end.num_tokens, conversation.model.response_end.finish_reason) == (9, "length")


@pytest.mark.parametrize(
    ("status", "error", "kind", "words"),
    [
        (400, {"message": "too long", "code": "context_length_exceeded"}, ContextLengthError, "too long"),
        (400, {"message": "bad top_k", "code": None}, InvalidRequestError, "the server says: bad top_k"),
        (401, {"message": "no key"}, ConfigError, "PAGEWICK_API_KEY"),
        (404, {"message": "no model"}, ConfigError, "check --url and --model"),
        (429, {"message": "full"}, QueueFullError, "full"),
        (500, "a text", EngineError, "a text"),
        (503, None, EngineError, "null"),
    ],
)
def test_errors_of_a_server_have_the_types_of_the_python_api(
    server: StandInServer, conversation: Conversation, status: int, error: Any, kind: type[Exception], words: str
) -> None:
    server.reply = lambda body: (status, json.dumps({"error": error}).encode())
    with pytest.raises(kind, match=words):
        list(conversation.say("hello"))
    assert conversation.turns == []


def test_a_response_that_ends_early_is_kept_and_is_an_error(server: StandInServer, conversation: Conversation) -> None:
    server.reply = lambda body: (200, events(chat_chunk(content="Hal"), end=""))
    with pytest.raises(EngineError, match="ended the response early"):
        list(conversation.say("hello"))
    assert conversation.turns[-1] == {"role": "assistant", "content": "Hal"}
    server.reply = lambda body: (200, events({"error": {"message": "died"}}))
    with pytest.raises(EngineError, match="died"):
        list(conversation.say("hello"))
    server.reply = lambda body: (200, b"data: {not json\n\n")
    with pytest.raises(EngineError, match="an event that no OpenAI-compatible server sends"):
        list(conversation.say("hello"))


@pytest.mark.parametrize("chunk", ODD_CHUNKS, ids=lambda chunk: json.dumps(chunk)[:50])
def test_events_with_fields_of_other_types_are_an_error(
    server: StandInServer, conversation: Conversation, chunk: Any
) -> None:
    server.reply = lambda body: (200, events(chat_chunk(content="Hal"), chunk))
    with pytest.raises(EngineError, match="sent an event that no OpenAI-compatible server sends"):
        list(conversation.say("hello"))
    assert conversation.turns[-1] == {"role": "assistant", "content": "Hal"}


def test_control_characters_from_a_server_do_not_reach_the_terminal(
    server: StandInServer, conversation: Conversation
) -> None:
    server.models = ["\x1b[31mred", "stand-in"]
    server.reply = lambda body: (400, json.dumps({"error": {"message": "no\x1b]0;title\x07 \x9b"}}).encode())
    with pytest.raises(InvalidRequestError) as raised:
        list(conversation.say("hello"))
    assert str(raised.value) == "the server says: no�]0;title� �"
    with pytest.raises(ConfigError, match=r"it has �\[31mred, stand-in"):
        RemoteModel.connect(ServerAddress.parse(server.url), "third")
    # Requests name the model exactly as the server did.
    assert RemoteModel.connect(ServerAddress.parse(server.url), "pagewick-demo").name == "\x1b[31mred"


def test_the_model_is_chosen_among_the_servers(server: StandInServer) -> None:
    address = ServerAddress.parse(server.url)
    server.models = ["first", "second"]
    assert RemoteModel.connect(address, "pagewick-demo").name == "first"
    assert RemoteModel.connect(address, "second").name == "second"
    with pytest.raises(ConfigError, match="has no model 'third'; it has first, second"):
        RemoteModel.connect(address, "third")
    server.models = []
    with pytest.raises(ConfigError, match="serves no model"):
        RemoteModel.connect(address, "first")


def test_a_server_that_cannot_be_reached(server: StandInServer) -> None:
    result = chat("--url", "http://127.0.0.1:9", stdin="hello\n")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: cannot connect to http://127.0.0.1:9/v1: Connection refused; check that the server runs, and --url\n"
    )
    result = chat("--url", server.url.replace("/v1", "/v2"), stdin="hello\n")
    assert "nothing here\ncheck --url and --model" in result.stderr


def test_the_api_key_comes_from_the_environment() -> None:
    both = {"PAGEWICK_API_KEY": "p", "OPENAI_API_KEY": "o", "MINE": "m", "BAD": "a\nb", "EMPTY": ""}
    assert api_key_from(None, both) == "p"
    assert api_key_from(None, {"OPENAI_API_KEY": "o"}) == "o"
    assert api_key_from("MINE", both) == "m"
    assert api_key_from(None, {}) is None
    for name, complaint in (("EMPTY", "EMPTY, which is not set"), ("BAD", "characters that no API key has")):
        with pytest.raises(ConfigError, match=complaint):
            api_key_from(name, both)


def test_the_code_at_the_end_of_a_message_is_for_programs() -> None:
    error = {"message": "too long (context_length_exceeded)", "code": "context_length_exceeded"}
    assert str(error_of(400, json.dumps({"error": error}).encode())) == "the server says: too long"
