"""`pagewick chat` on a stand-in for LLM: conversations, commands, lines from a pipe."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.cli.chat import Conversation, obey
from pagewick.config import EngineConfig
from pagewick.errors import ContextLengthError
from pagewick.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM


def chat(*arguments: str, stdin: str) -> Result:
    return CliRunner().invoke(cli, ["chat", *arguments], input=stdin, prog_name="pagewick")


@pytest.fixture
def conversation(opened: list[FakeLLM]) -> Conversation:
    llm = FakeLLM(config=EngineConfig())
    return Conversation(llm, SamplingParams(), "be kind")  # type: ignore[arg-type]


SYSTEM = {"role": "system", "content": "be kind"}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_every_line_of_a_pipe_is_answered(opened: list[FakeLLM]) -> None:
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


def test_reset_and_exit_work_in_a_pipe(opened: list[FakeLLM]) -> None:
    result = chat("--system", "be kind", stdin="hello\n/reset\nyou\n/exit\nnever\n")
    assert result.stdout == "HELLO\nYOU\n"
    assert opened[0].calls[-1][1] == [SYSTEM, message("user", "you")]


def test_a_conversation_that_no_longer_fits_is_an_error_in_a_pipe(opened: list[FakeLLM]) -> None:
    result = chat(stdin="hello\n" + "x" * 200)
    assert result.exit_code == 1
    assert result.stdout == "HELLO\n"
    assert "maximum context length" in result.stderr


def test_an_interrupted_answer_stays_as_far_as_it_came(conversation: Conversation) -> None:
    pieces = conversation.say("hello")
    assert [next(pieces), next(pieces)] == ["H", "E"]
    pieces.close()
    assert conversation.messages == [SYSTEM, message("user", "hello"), message("assistant", "HE")]
    assert conversation.num_answer_tokens == 2


def test_a_message_that_does_not_fit_is_forgotten(conversation: Conversation) -> None:
    with pytest.raises(ContextLengthError):
        list(conversation.say("x" * 200))
    assert conversation.messages == [SYSTEM]
    assert "".join(conversation.say("you")) == "YOU"


def test_only_exit_leaves(conversation: Conversation) -> None:
    list(conversation.say("hello"))
    assert [obey(conversation, line) for line in ("hello", "/help", "/exit", "/quit")] == [True, True, False, False]
    assert len(conversation.messages) == 3
    assert obey(conversation, "/reset")
    assert conversation.messages == [SYSTEM]
