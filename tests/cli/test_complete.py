"""`pagewick complete` on a stand-in for LLM: the prompts that it reads, the responses that it prints."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.cli.completing.output_file import OutputFile
from pagewick.sampling_params import SamplingParams
from pagewick.structured_outputs import StructuredOutputsParams
from tests.cli.fake_llm import FakeLLM


def complete(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["complete", *arguments], input=stdin, prog_name="pagewick")


def test_prompts_are_split_at_bars_and_completed_in_order(opened: list[FakeLLM]) -> None:
    result = complete("some/model", "--prompts", " how are you? | hello |bye", "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    assert result.stdout == "> how are you?\nHOW ARE YOU?\n\n> hello\nHELLO\n\n> bye\nBYE\n\n"
    (llm,) = opened
    assert llm.config.model == "some/model"
    assert llm.calls == [
        ("generate", ["how are you?", "hello", "bye"], SamplingParams(temperature=0.6, top_k=20, max_tokens=5))
    ]
    assert llm.is_closed


def test_a_single_prompt_is_streamed(opened: list[FakeLLM]) -> None:
    assert complete("-p", "a | b").stdout == "A | B\n"
    assert opened[0].calls[0][:2] == ("stream", "a | b")


def test_a_dash_stands_for_standard_input(opened: list[FakeLLM]) -> None:
    assert complete("-p", "-", stdin="two\nlines\n").stdout == "TWO\nLINES\n"
    complete("--prompts", "x", "-p", "y", "-p", "-", stdin="z")
    assert opened[1].calls[0][1] == ["x", "y", "z"]


def test_standard_input_must_be_text(opened: list[FakeLLM]) -> None:
    result = complete("-p", "-", stdin=b"caf\xe9\n")
    assert (result.exit_code, opened) == (1, [])
    assert result.stderr == "error: <stdin> is not UTF-8 (invalid continuation byte); convert it first\n"


def test_text_may_begin_with_a_byte_order_mark(opened: list[FakeLLM], tmp_path: Path) -> None:
    """Windows programs write one; -p - may be there twice, and has nothing left the second time."""
    (tmp_path / "schema.json").write_text('\ufeff{"type": "object"}', encoding="utf-8")
    arguments = ["-p", "-", "-p", "-", "-p", "b", "--json-schema", str(tmp_path / "schema.json")]
    result = complete(*arguments, stdin="\ufeffa\n")
    assert result.exit_code == 0, result.output
    (call,) = opened[0].calls
    assert call[1] == ["a", "b"] and call[2].structured_outputs is not None
    assert call[2].structured_outputs.json == '{"type": "object"}'


def test_chat_sends_each_prompt_as_a_users_message(opened: list[FakeLLM]) -> None:
    message = {"role": "user", "content": "hello"}
    assert complete("--chat", "-p", "hello").stdout == "HELLO\n"
    assert opened[0].calls[0][1] == [message]
    complete("--chat", "--prompts", "hello | bye")
    assert opened[1].calls[0][:2] == ("chat", [[message], [{"role": "user", "content": "bye"}]])


@pytest.mark.parametrize("prompts", ["grüße", "grüße | b\tc"])
def test_json_has_one_line_per_response(opened: list[FakeLLM], prompts: str) -> None:
    lines = complete("--json", "--prompts", prompts).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "prompt": prompt,
            "text": f" {prompt.upper()} ",
            "finish_reason": "stop",
            "prompt_tokens": 2,
            "completion_tokens": len(prompt),
        }
        for prompt in prompts.split(" | ")
    ]


def test_several_responses_to_each_prompt(opened: list[FakeLLM]) -> None:
    assert complete("--prompts", "a | b", "--n", "2").stdout == "> a\nA\nA\n\n> b\nB\nB\n\n"
    lines = complete("--json", "-p", "a", "--n", "2").stdout.splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]


def test_sampling_flags_change_the_models_defaults(opened: list[FakeLLM]) -> None:
    complete("-p", "x", "--temperature", "0", "--stop", "ab", "--seed", "4", "--top-p", "0.5")
    params = opened[0].calls[0][2]
    assert params == SamplingParams(temperature=0, top_k=20, top_p=0.5, stop=("ab",), seed=4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to complete; add --prompts"),
        (["--prompts", " | "], "nothing to complete"),
        (["-p", "x", "--temperature", "9"], "temperature must be"),
        (["-p", "x", "--file", "y"], "--prompts or -p and --file cannot be combined"),
        (["--batch", "x", "--file", "y"], "--file and --batch cannot be combined"),
        (["-p", "x", "--separator", "y"], "--separator needs --file"),
        (["-p", "x", "--output", "y"], "--output needs --file or --batch"),
        (["--file", "x", "--output", "y", "--resume"], "--resume needs --batch"),
        (["--batch", "x", "--chat"], "--chat has no meaning with --batch"),
        (["-p", "x", "--n", "0"], "0 is not in the range"),
        (["-p", "x", "--max-tokens", "-1"], "--max-tokens must be"),
        (["-p", "x", "--max-tokens", "many"], "'many' is not a valid integer"),
    ],
)
def test_a_mistake_is_found_before_the_model_is_loaded(
    opened: list[FakeLLM], arguments: list[str], complaint: str
) -> None:
    result = complete(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert opened == []


@pytest.mark.parametrize("by_file", [False, True])
def test_what_is_not_typed_may_be_for_other_runs(
    opened: list[FakeLLM], by_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable or a shared file sets what another run needs; this one has no use for it."""
    output = tmp_path / "out"
    shared = {"output": str(output), "resume": True, "separator": "--", "json": False}
    if by_file:
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in shared.items())
        (tmp_path / "pagewick.toml").write_text("[complete]\n" + "".join(lines))
        monkeypatch.setenv("PAGEWICK_CONFIG", str(tmp_path / "pagewick.toml"))
    else:
        for key, value in shared.items():
            monkeypatch.setenv(f"PAGEWICK_{key.upper()}", str(value))
    result = complete("-p", "a")
    assert (result.exit_code, result.stdout) == (0, "A\n"), result.output
    assert not output.exists()


def test_thoughts_are_only_in_the_json(monkeypatch: pytest.MonkeyPatch, opened: list[FakeLLM]) -> None:
    output = FakeLLM._output

    def with_thoughts(self: FakeLLM, *arguments: Any) -> Any:
        made = output(self, *arguments)
        made.outputs[0].reasoning = "hm"
        return made

    monkeypatch.setattr(FakeLLM, "_output", with_thoughts)
    assert json.loads(complete("--chat", "--json", "-p", "a").stdout)["reasoning"] == "hm"
    assert complete("--chat", "--prompts", "a | b").stdout == "> a\nA\n\n> b\nB\n\n"


class TerminalOutput(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "arguments", [["-p", "x"], ["--prompts", "x | y"], ["--json", "-p", "x"], ["--chat", "-p", "x"], "a file"]
)
def test_responses_cannot_control_the_terminal(
    opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, arguments: list[str] | str
) -> None:
    evil = "\x1b]0;title\x07\x9b"
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", TerminalOutput(raw, encoding="utf-8"))
    monkeypatch.setattr(FakeLLM, "stream", lambda *_, **__: iter(["Hi", evil]))
    output = FakeLLM._output
    monkeypatch.setattr(FakeLLM, "_output", lambda self, text, *rest: output(self, f"Hi{evil}", *rest))
    if isinstance(arguments, str):
        OutputFile(None, can_resume=False).write(f"HI {evil}\n".encode())
    else:
        cli(["complete", *arguments], standalone_mode=False)
    sys.stdout.flush()
    shown = raw.getvalue().decode()
    assert "HI" in shown.upper()
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_a_json_schema_is_the_form_of_every_response(opened: list[FakeLLM], tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}', encoding="utf-8")
    complete("--prompts", "a | b", "--json-schema", str(path))
    params = opened[0].calls[0][2]
    assert params.structured_outputs == StructuredOutputsParams(json='{"type": "object"}')
    batch = complete("--batch", "x.jsonl", "--output", "y.jsonl", "--json-schema", str(path))
    assert batch.exit_code == 2 and "--json-schema has no meaning with --batch" in batch.stderr
    missing = complete("-p", "a", "--json-schema", str(tmp_path / "none.json"))
    assert missing.exit_code == 1
    assert f"cannot read {tmp_path / 'none.json'}: No such file or directory; check the path" in missing.stderr
    path.write_text("{", encoding="utf-8")
    wrong = complete("-p", "a", "--json-schema", str(path))
    assert wrong.exit_code == 1 and f"error: --json-schema: {path} is not valid JSON: " in wrong.stderr


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("[1]", "cannot be honoured: a JSON schema must be an object, true or false"),
        ('""', "cannot be honoured: a JSON schema must be an object, true or false"),
        ('{"type": "nope"}', "cannot be honoured: the JSON schema is not supported: Invalid type: nope"),
        (
            '{"type": "string", "pattern": "("}',
            "cannot be honoured: the JSON schema is not supported: the regular expression (",
        ),
        ('{"enum": [' + "[" * 80 + "]" * 80 + "]}", "cannot be honoured: it is nested deeper than 64 levels"),
        (json.dumps({"const": "x" * 300_000}), "cannot be honoured: the JSON schema has 30"),
    ],
    ids=lambda value: value[:20],
)
@pytest.mark.parametrize("prompts", [("-p", "a"), ("--file", "-")], ids=lambda prompts: prompts[0])
def test_a_schema_that_cannot_be_honoured_is_named_before_the_model_is_loaded(
    schema: str, reason: str, prompts: tuple[str, ...], opened: list[FakeLLM], tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(schema, encoding="utf-8")
    result = complete(*prompts, "--json-schema", str(path), stdin="a")
    assert result.exit_code == 1 and f"error: --json-schema: {path} {reason}" in result.stderr, result.stderr
    assert "structured_outputs" not in result.stderr and len(result.stderr.splitlines()) <= 6
    assert not opened


@pytest.mark.parametrize(
    ("variable", "value"), [("PROMPTS", "x | y"), ("PROMPT", "x"), ("FILE", "none"), ("BATCH", "none")]
)
def test_a_prompt_on_the_command_line_wins_over_those_of_variables(
    variable: str, value: str, opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PAGEWICK_{variable}", value)
    flag = "--prompts" if variable == "PROMPT" else "-p"
    result = complete(flag, "a")
    assert (result.exit_code, result.stdout) == (0, "A\n")
    assert result.stderr == f"note: PAGEWICK_{variable} changes nothing: {flag} is on the command line\n"


def test_variables_that_contradict_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWICK_FILE", "x")
    monkeypatch.setenv("PAGEWICK_BATCH", "y")
    message = "--file and --batch cannot be combined; give one of them (from PAGEWICK_FILE, PAGEWICK_BATCH)."
    assert message in " ".join(complete().stderr.split())


def test_a_prompt_in_another_encoding_is_refused(opened: list[FakeLLM]) -> None:
    result = CliRunner().invoke(cli, ["complete", "-p", "caf\udce9"], prog_name="pagewick")
    assert result.exit_code == 2 and "a prompt is not UTF-8; convert it first" in " ".join(result.stderr.split())
    assert opened == []
