"""`pagewick chat` on a stand-in for LLM: conversations, commands, messages from a pipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.cli.chatting.commands import COMMANDS, Commands, LeaveChat
from pagewick.cli.chatting.conversation import Conversation
from pagewick.cli.chatting.local_model import LocalModel
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError, ContextLengthError, InvalidRequestError
from pagewick.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM


def chat(*arguments: str, stdin: str | bytes) -> Result:
    return CliRunner().invoke(cli, ["chat", *arguments], input=stdin, prog_name="pagewick")


@pytest.fixture
def conversation(opened: list[FakeLLM]) -> Conversation:
    llm = FakeLLM(config=EngineConfig())
    return Conversation(LocalModel(llm, "fake"), ChatSettings(), "be kind")  # type: ignore[arg-type]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def commands(conversation: Conversation, said: list[str]) -> Commands:
    return Commands(conversation, said.append)


SYSTEM = {"role": "system", "content": "be kind"}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def respond(conversation: Conversation, text: str) -> str:
    return "".join(piece.text for piece in conversation.say(text) if piece.kind == "text")


def test_every_line_of_a_pipe_gets_a_response(opened: list[FakeLLM]) -> None:
    result = chat("some/model", "--temperature", "0", stdin="hello\n\n  you there \nbye")
    assert result.exit_code == 0, result.output
    assert result.stdout == "HELLO\nYOU THERE\nBYE\n"
    (llm,) = opened
    assert llm.calls[-1][1] == [
        message("user", "hello"),
        message("assistant", "HELLO"),
        message("user", "you there"),
        message("assistant", "YOU THERE"),
        message("user", "bye"),
    ]
    assert llm.calls[0][2] == SamplingParams(temperature=0, top_k=20)
    assert llm.is_closed


def test_commands_work_in_a_pipe_and_only_responses_are_printed(opened: list[FakeLLM]) -> None:
    result = chat("--system", "be kind", stdin="hello\n/reset\nyou\n/retry\n///x\n/retry\n/exit\nnever\n")
    assert result.stdout == "HELLO\nYOU\nYOU\n//X\n//X\n"
    assert result.stderr == "A new conversation.\n"
    assert opened[0].calls[1][1] == [SYSTEM, message("user", "you")]
    assert opened[0].calls[2][1] == [SYSTEM, message("user", "you")]


def test_a_pipe_must_have_text_and_may_begin_with_a_byte_order_mark(opened: list[FakeLLM]) -> None:
    result = chat(stdin=b"\xef\xbb\xbf/set temperature 0\nhello\n" + b"x" * 9000 + b"\ncaf\xe9\n")
    assert (result.exit_code, result.stdout) == (1, "HELLO\n")
    complaint = "error: <stdin> is not UTF-8 (invalid continuation byte); convert it first"
    assert result.stderr.splitlines()[1:] == [complaint]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/load nofile", "cannot read "),
        ("/set temperature 9", "temperature must be"),
        ("/foo", "There is no command /foo"),
        ("/save", "/save needs the name of a file"),
    ],
)
def test_a_command_that_fails_ends_a_pipe(opened: list[FakeLLM], line: str, complaint: str) -> None:
    result = chat(stdin=f"hello\n{line}\nyou\n")
    assert (result.exit_code, result.stdout) == (1, "HELLO\n")
    assert result.stderr.startswith(f"error: {complaint}")


def test_messages_of_several_lines(opened: list[FakeLLM]) -> None:
    chat(stdin='one\\\n  two\\\nthree\n"""a\n\n /b\nc"""\nlast\\')
    contents = [call[1][-1]["content"] for call in opened[0].calls]
    assert contents == ["one\n  two\nthree", "a\n\n /b\nc", "last"]


def test_thoughts_are_not_part_of_the_response(opened: list[FakeLLM]) -> None:
    result = chat("--thinking", stdin="hello\nyou\n")
    assert (result.stdout, result.stderr) == ("HELLO\nYOU\n", "")
    assert opened[0].calls[1][1][1] == message("assistant", "HELLO")
    result = chat("--thinking", "--show-thinking", stdin="hello\n")
    assert (result.stdout, result.stderr) == ("HELLO\n", "hmm\n")


def test_a_conversation_that_no_longer_fits_is_an_error_in_a_pipe(opened: list[FakeLLM]) -> None:
    result = chat(stdin="hello\n" + "x" * 200)
    assert result.exit_code == 1
    assert result.stdout == "HELLO\n"
    assert "maximum context length" in result.stderr


def test_an_api_key_needs_a_server(opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    result = chat("--api-key-env", "KEY", stdin="")
    assert result.exit_code == 2
    assert "--api-key-env needs --url" in result.stderr
    assert opened == []
    monkeypatch.setenv("PAGEWICK_API_KEY_ENV", "KEY")
    assert chat(stdin="hello").stdout == "HELLO\n", "the variable may be meant for chats with a server"


def test_the_part_of_an_interrupted_response_is_kept(conversation: Conversation) -> None:
    pieces = conversation.say("hello")
    assert [next(pieces).text, next(pieces).text] == ["H", "E"]
    pieces.close()
    assert conversation.messages == [SYSTEM, message("user", "hello"), message("assistant", "HE")]
    assert conversation.model.response_end.num_tokens == 2


def test_a_message_that_is_interrupted_before_its_response_is_forgotten(conversation: Conversation) -> None:
    conversation.settings.change("thinking", "on")
    pieces = conversation.say("hello")
    assert next(pieces).kind == "thoughts"
    pieces.close()
    assert conversation.messages == [SYSTEM]


def test_a_message_that_does_not_fit_is_forgotten(conversation: Conversation) -> None:
    with pytest.raises(ContextLengthError):
        list(conversation.say("x" * 200))
    assert conversation.messages == [SYSTEM]
    assert respond(conversation, "you") == "YOU"


def test_only_one_slash_is_a_command(commands: Commands, said: list[str]) -> None:
    assert [commands.message_of(line) for line in ("/x", "//x", "x", "")] == ["", "/x", "x", ""]
    assert len(said) == 1


def test_every_command_exists(commands: Commands, said: list[str]) -> None:
    for usage in COMMANDS:
        assert callable(getattr(commands, usage.split()[0].replace("/", "_")))
    commands.message_of("/help")
    assert all(any(line.startswith(usage) for line in said) for usage in COMMANDS)


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("/rest", "There is no command /rest; did you mean /reset?"),
        ("/quti", "There is no command /quti; did you mean /quit?"),
        ("/xyz", "There is no command /xyz; /help lists the commands."),
        ("/set temprature 1", "there is no setting temprature; did you mean temperature?"),
        ("/set zzz", "there is no setting zzz; /set lists them"),
        ("/set temperature 9", "temperature must be a number from 0 to 2; got 9"),
        ("/set top_k many", "top_k must be an integer from -1 to 2147483648; got 'many'"),
        ("/set n 2", "there is no setting n; /set lists them"),
        ("/set thinking maybe", "thinking is on or off; got maybe"),
        ("/undo", "There is nothing to take back."),
        ("/retry", "There is nothing to send again."),
        ("/thoughts", "There were no thoughts before the last response."),
        ("/save", "/save needs the name of a file: /save talk.json"),
        ("/load /no/such/file", "cannot read /no/such/file: No such file or directory"),
        ("/load ~nosuchuser/x", "~nosuchuser/x: there is no such home directory; write the absolute path"),
        ("/save ~nosuchuser/x", "~nosuchuser/x: there is no such home directory; write the absolute path"),
        ("/load a\0b", "the name of a file cannot contain the character U+0000"),
        ("/save a\0b", "the name of a file cannot contain the character U+0000"),
        ("/save /" + "x" * 300, f"cannot write /{'x' * 300}: File name too long; choose another place"),
        ("/load /" + "x" * 300, f"cannot read /{'x' * 300}: File name too long"),
        (
            "/load talk.MD",
            "/load reads JSON only, not the Markdown of talk.MD; save with /save talk.json to go on later",
        ),
        ("/set seed " + "1" * 5000, "seed: a number of 5000 digits is too long"),
        ("/set seed " + "[" * 100_000, "seed: the value is nested too deeply"),
        ("/set stop " + "[" * 100_000, "stop: the value is nested too deeply"),
    ],
    ids=lambda text: text[:24].replace("\0", "NUL"),
)
def test_mistakes_are_shown_and_the_chat_continues(commands: Commands, said: list[str], line: str, reply: str) -> None:
    assert commands.message_of(line) == ""
    assert said == [reply]


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_leaving(commands: Commands, line: str) -> None:
    with pytest.raises(LeaveChat):
        commands.message_of(line)


def test_undo_removes_a_message_and_its_response(
    conversation: Conversation, commands: Commands, said: list[str]
) -> None:
    respond(conversation, "one")
    respond(conversation, "two")
    commands.message_of("/undo")
    assert conversation.messages == [SYSTEM, message("user", "one"), message("assistant", "ONE")]
    assert said == ["Taken back: two"]
    assert commands.message_of("/retry") == "one"
    assert conversation.messages == [SYSTEM]


def test_a_retry_that_must_get_the_same_response_is_noted(
    conversation: Conversation, commands: Commands, said: list[str]
) -> None:
    conversation.settings.change("temperature", "0")
    respond(conversation, "one")
    commands.message_of("/retry")
    assert "the response is the same" in said[0]


def test_the_system_message_can_change(conversation: Conversation, commands: Commands, said: list[str]) -> None:
    commands.message_of("/system speak  Latin")
    assert conversation.messages == [message("system", "speak  Latin")]
    commands.message_of("/system -")
    assert conversation.messages == []
    commands.message_of("/system")
    assert said[1:] == ["There is no system message."] * 2


def test_settings_apply_to_the_next_response(
    conversation: Conversation, commands: Commands, said: list[str], opened: list[FakeLLM]
) -> None:
    for line in ("/set temperature 0.25", "/set stop END", "/set max-tokens=7", "/set thinking on"):
        commands.message_of(line)
    assert said == [
        "temperature = 0.25  (changed)", 'stop = ["END"]  (changed)', "max_tokens = 7  (changed)", "thinking = on",
    ]  # fmt: skip
    respond(conversation, "one")
    params = SamplingParams(temperature=0.25, stop=("END",), max_tokens=7, top_k=20)
    assert opened[0].calls[-1][2] == params
    assert conversation.thoughts == "hmm"
    commands.message_of("/set temperature default")
    assert said[-1] == "temperature = 0.6"
    commands.message_of("/set")
    assert "top_k = 20" in said
    assert not any(line.startswith("n =") for line in said)


def test_a_conversation_is_saved_as_a_request_and_loaded(
    conversation: Conversation, commands: Commands, said: list[str], tmp_path: Path
) -> None:
    conversation.settings.change("temperature", "0.5")
    respond(conversation, "grüße")
    path = tmp_path / "talk.json"
    commands.message_of(f"/save {path}")
    turns = [message("user", "grüße"), message("assistant", "GRÜSSE")]
    assert json.loads(path.read_text()) == {"model": "fake", "messages": [SYSTEM, *turns], "temperature": 0.5}
    assert path.stat().st_mode & 0o777 == 0o600
    commands.message_of("/reset")
    commands.message_of("/system other")
    commands.message_of(f"/load {path}")
    assert conversation.messages == [SYSTEM, *turns]
    assert said[-1] == f"Loaded 3 messages from {path}."
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    commands.message_of("/reset")
    commands.message_of(f"/load {path}")
    assert conversation.messages == [SYSTEM, *turns], "a byte order mark is no part of the text"
    respond(conversation, "more")
    commands.message_of(f"/save {path}")
    assert len(json.loads(path.read_text())["messages"]) == 5
    assert list(tmp_path.iterdir()) == [path]
    path.write_text(json.dumps([message("user", "hi")]))
    commands.message_of(f"/load {path}")
    assert said[-1] == f"Loaded 1 message from {path}."


def test_a_conversation_is_saved_as_markdown(conversation: Conversation, tmp_path: Path) -> None:
    respond(conversation, "one")
    conversation.save(tmp_path / "talk.md")
    assert (tmp_path / "talk.md").read_text() == "## System\n\nbe kind\n\n## You\n\none\n\n## Model\n\nONE\n\n"
    (tmp_path / "talk.txt").write_text("## You")
    with pytest.raises(ConfigError, match="is not JSON; /load reads what /save"):
        conversation.load(tmp_path / "talk.txt")


def test_other_files_are_not_overwritten(conversation: Conversation, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"mine\.json exists already; choose another name"):
        conversation.save(tmp_path / "mine.json")
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        conversation.save(tmp_path / "no" / "talk.json")
    assert (tmp_path / "mine.json").read_text() == "[]"


def test_content_that_no_file_can_have_is_an_error(conversation: Conversation, tmp_path: Path) -> None:
    (tmp_path / "digits.json").write_text("1" * 5000)
    with pytest.raises(ConfigError, match="is not JSON"):
        conversation.load(tmp_path / "digits.json")
    respond(conversation, "half a character \ud83d")
    for name in ("talk.json", "talk.md"):
        with pytest.raises(ConfigError, match=r"cannot write .*: the conversation contains half of a surrogate pair"):
            conversation.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["digits.json"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "has no conversation"),
        ({"messages": 3}, "has no conversation"),
        ([{"role": "tool", "content": "x"}], "message 1 must have the role system or user or assistant"),
        ([{"role": "user", "content": "x"}, SYSTEM], "message 2 must have the role user or assistant"),
        ([{"role": "user", "content": ["x"]}], "and a text as content"),
        (["x"], "message 1"),
    ],
)
def test_files_without_a_conversation_are_not_loaded(
    conversation: Conversation, tmp_path: Path, content: Any, complaint: str
) -> None:
    respond(conversation, "one")
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=complaint):
        conversation.load(path)
    assert len(conversation.turns) == 2


def test_wrong_settings_leave_the_old_ones() -> None:
    settings = ChatSettings({"temperature": 0.5})
    with pytest.raises(InvalidRequestError):
        settings.change("temperature", "[]")
    assert settings.changes == {"temperature": 0.5}
    assert settings.as_request_fields() == {"temperature": 0.5}
    settings.change("thinking", "off")
    assert settings.as_request_fields()["chat_template_kwargs"] == {"enable_thinking": False}
