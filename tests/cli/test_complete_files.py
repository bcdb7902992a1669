"""`pagewick complete --file` and `--batch`, on an engine that responds with the prompt in capitals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pagewick.async_llm import AsyncEngine
from pagewick.cli import cli
from pagewick.cli.completing import batch_run, files
from pagewick.cli.completing.batch_lines import (
    BatchLine,
    BatchMistake,
    BatchRequest,
    BatchResponse,
    BatchResult,
    read_batch,
)
from pagewick.cli.completing.batch_run import Respond, opened_responder, run_batch
from pagewick.cli.completing.files import split_prompts, unescaped
from pagewick.cli.completing.output_file import OutputFile
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from tests.cli.fake_llm import FakeLLM
from tests.fake_engine import MAX_MODEL_LEN, FakeClient, fake_engine


def complete(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["complete", *arguments], input=stdin, prog_name="pagewick")


def prompt_of(request: BatchRequest) -> str:
    return str(request.body.get("prompt") or request.body["messages"][-1]["content"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BatchRequest]:
    """The requests that got a response: their prompt in capitals, or an error if it is "bad"."""
    requests: list[BatchRequest] = []

    async def respond(request: BatchRequest) -> BatchResponse:
        requests.append(request)
        text = prompt_of(request)
        # The longer the prompt, the later its response.
        await asyncio.sleep(len(text) / 1000)
        if text == "bad":
            return BatchResponse(request.custom_id, 400, b'{"error": {"message": "it is bad"}}')
        choices = [
            {"text": f" {text.upper()}{'!' * index}", "finish_reason": "stop"}
            | ({"token_ids": [1] * (len(text) + index)} if request.body.get("return_token_ids") else {})
            for index in range(request.body.get("n", 1))
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": sum(len(text) + index for index in range(len(choices)))}
        body = {"choices": choices, "usage": usage}
        return BatchResponse(request.custom_id, 200, json.dumps(body).encode())

    @asynccontextmanager
    async def opened(config: EngineConfig) -> AsyncIterator[tuple[Respond, int]]:
        yield respond, 4

    monkeypatch.setattr(files, "opened_responder", opened)
    return requests


def records(path: Path) -> dict[str, dict[str, Any]]:
    return {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_file_has_a_prompt_on_each_line(asked: list[BatchRequest], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a much longer one\n\n  grüße \nc", encoding="utf-8")
    result = complete("--file", str(path), "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    expected = "> a much longer one\nA MUCH LONGER ONE\n\n> grüße\nGRÜSSE\n\n> c\nC\n\n"
    assert result.stdout_bytes.decode() == expected
    assert asked[0].body == {"prompt": "a much longer one", "max_tokens": 5}


def test_prompts_of_several_lines_have_a_separator(asked: list[BatchRequest], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    result = complete(
        "--file", "-", "--separator", r"---\n", "--chat", "--json", "--n", "2", "--output", str(output),
        stdin="one\ntwo\n---\nthree\n---\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["prompt"], line["index"]) for line in lines] == [
        ("one\ntwo", 0), ("one\ntwo", 1), ("three", 0), ("three", 1),
    ]  # fmt: skip
    assert [line["completion_tokens"] for line in lines] == [7, 8, 5, 6], "those of each response alone"
    assert all("total_completion_tokens" not in line for line in lines)
    assert asked[0].body["messages"] == [{"role": "user", "content": "one\ntwo"}]


@pytest.mark.parametrize(
    ("content", "separator"),
    [
        (b"one\r\ntwo\r\n---\r\nthree\r\n---\r\n", r"\n---\n"),
        (b"\xef\xbb\xbfone\ntwo\n---\nthree\n---\n", r"\n---\n"),
        (b"\xef\xbb\xbfone\r\nthree\r\n", r"\n"),
    ],
)
@pytest.mark.parametrize("is_stdin", [False, True])
def test_files_of_windows_hold_the_same_prompts(
    asked: list[BatchRequest], tmp_path: Path, content: bytes, separator: str, is_stdin: bool
) -> None:
    """Their lines end with CR LF, and many begin with a byte order mark."""
    (tmp_path / "in.txt").write_bytes(content)
    name = "-" if is_stdin else str(tmp_path / "in.txt")
    result = complete("--file", name, "--separator", separator, stdin=content if is_stdin else None)
    assert result.exit_code == 0, result.output
    assert [prompt_of(request) for request in asked] == ["one\ntwo" if b"two" in content else "one", "three"]


def test_a_batch_may_begin_with_a_byte_order_mark(asked: list[BatchRequest], tmp_path: Path) -> None:
    content = '\ufeff{"prompt": "x"}\r\n{"prompt": "y"}\r\n'.encode()
    (tmp_path / "in.jsonl").write_bytes(content)
    for name, stdin in ((str(tmp_path / "in.jsonl"), None), ("-", content)):
        result = complete("--batch", name, stdin=stdin)
        assert result.exit_code == 0, result.output
    assert [prompt_of(request) for request in asked] == ["x", "y"] * 2


def test_a_prompt_that_fails_does_not_stop_the_others(asked: list[BatchRequest]) -> None:
    result = complete("--file", "-", stdin="a\nbad\nc\n")
    assert result.exit_code == 1
    assert result.stdout == "> a\nA\n\n> bad\nerror: it is bad\n\n> c\nC\n\n"
    assert result.stderr == "error: 2 answered, 1 failed; the output says why for each of them\n"


def test_the_json_of_a_file_is_that_of_prompts(asked: list[BatchRequest], opened: list[FakeLLM]) -> None:
    result = complete("--file", "-", "--json", stdin="a\nbad\n")
    first, second = map(json.loads, result.stdout.splitlines())
    (alone,) = map(json.loads, complete("-p", "a", "--json").stdout.splitlines())
    assert list(first) == list(alone) and first["completion_tokens"] == alone["completion_tokens"] == 1
    assert second == {"prompt": "bad", "error": "it is bad"}


def test_every_line_of_a_batch_gets_a_response(asked: list[BatchRequest], tmp_path: Path) -> None:
    lines = [
        '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello", "temperature": 1}}',
        '{"prompt": "bad"}',
        "",
        "{not json",
        '{"messages": [{"role": "user", "content": "hi"}], "custom_id": "y"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    arguments = ("--batch", str(tmp_path / "in.jsonl"), "--output", str(output))
    result = complete(*arguments, "--temperature", "0", "--max-tokens", "9")
    assert result.exit_code == 1
    assert "2 answered, 2 failed" in result.stderr
    found = records(output)
    assert set(found) == {"x", "line-2", "line-4", "y"}
    assert found["x"]["response"]["body"]["choices"][0]["text"] == " HELLO"
    assert (found["x"]["response"]["status_code"], found["x"]["error"]) == (200, None)
    assert found["line-2"]["response"]["status_code"] == 400
    assert found["line-4"]["response"] is None
    assert found["line-4"]["error"]["code"] == "invalid_line"
    assert len({record["id"] for record in found.values()}) == 4
    bodies = {request.custom_id: request.body for request in asked}
    assert bodies["x"] == {"prompt": "hello", "temperature": 1, "max_tokens": 9}
    assert bodies["y"]["temperature"] == 0

    again = complete(*arguments)
    assert again.exit_code == 1
    assert "exists already; remove it or choose another --output, or --resume the batch" in again.stderr


def test_a_batch_has_no_use_for_variables_of_other_runs(
    asked: list[BatchRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"JSON": "1", "CHAT": "1", "RESUME": "1", "SEPARATOR": "-", "JSON_SCHEMA": "none.json"}.items():
        monkeypatch.setenv(f"PAGEWICK_{name}", value)
    result = complete("--batch", "-", stdin='{"prompt": "x"}')
    assert result.exit_code == 0, result.output
    assert [request.body for request in asked] == [{"prompt": "x"}]


def test_flags_that_no_line_of_a_batch_takes_are_named(asked: list[BatchRequest], tmp_path: Path) -> None:
    batch, flags = tmp_path / "batch.jsonl", ("--temperature", "0.5", "--max-tokens", "5", "--n", "2")
    embedding = {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "a", "prompt": "a"}}
    said = "note: flags without effect: --max-tokens, --temperature, --n; they are for lines of /v1/chat/completions"
    batch.write_text(json.dumps(embedding))
    assert said in complete("--batch", str(batch), *flags).stderr and asked[-1].body == embedding["body"]
    assert "note" not in complete("--batch", str(batch)).stderr
    batch.write_text(json.dumps(embedding) + '\n{"custom_id": "b", "prompt": "b"}')
    assert "note" not in complete("--batch", str(batch), *flags).stderr and asked[-1].body["n"] == 2


def test_a_batch_resumes_after_an_incomplete_line(asked: list[BatchRequest], tmp_path: Path) -> None:
    lines = [json.dumps({"custom_id": f"id {index}", "prompt": "p"}) for index in range(5)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    output = tmp_path / "out.jsonl"
    output.write_text('{"custom_id": "id 1", "old": true}\n{"custom_id": "id 3"}\n{"custom_id": "id 4", "respo')
    result = complete("--batch", str(tmp_path / "in.jsonl"), "--output", str(output), "--resume")
    assert result.exit_code == 0, result.output
    assert sorted(request.custom_id for request in asked) == ["id 0", "id 2", "id 4"]
    found = records(output)
    assert set(found) == {f"id {index}" for index in range(5)}
    assert found["id 1"] == {"custom_id": "id 1", "old": True}


def failed_line(custom_id: str, status: int) -> str:
    response = {"status_code": status, "request_id": "r", "body": {"error": {"message": "old"}}}
    return json.dumps({"id": "r", "custom_id": custom_id, "response": response, "error": None}) + "\n"


def test_resuming_a_batch_repeats_what_failed(asked: list[BatchRequest], tmp_path: Path) -> None:
    """Whatever failed is asked again: a busy server, an invalid line that was changed, and one that was not."""
    prompts = {"done": "p", "busy": "p", "mended": "p", "invalid": "bad"}
    lines = [json.dumps({"custom_id": name, "prompt": prompt}) for name, prompt in prompts.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    output, target = tmp_path / "out.jsonl", tmp_path / "elsewhere.jsonl"
    output.symlink_to(target)
    done = '{"custom_id": "done", "response": {"status_code": 200, "body": {}}, "error": null}\n'
    mistake = '{"custom_id": "mended", "response": null, "error": {"code": "invalid_line", "message": "old"}}\n'
    output.write_text(failed_line("busy", 429) + done + mistake + failed_line("invalid", 400))
    target.chmod(0o640)
    arguments = ("--batch", str(tmp_path / "in.jsonl"), "--output", str(output), "--resume")
    result = complete(*arguments)
    assert (result.exit_code, result.stderr) == (
        1,
        "error: 2 answered, 1 failed; the output says why for each of them\n",
    )
    assert sorted(request.custom_id for request in asked) == ["busy", "invalid", "mended"]
    assert len(output.read_text().splitlines()) == 4, "the new lines replace the old ones"
    found = records(output)
    assert {name: record["response"]["status_code"] for name, record in found.items()} == {
        "done": 200, "busy": 200, "mended": 200, "invalid": 400,
    }  # fmt: skip
    assert "old" not in output.read_text()
    assert output.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.jsonl", "in.jsonl", "out.jsonl"]

    again = complete(*arguments)
    assert again.exit_code == 1, "a batch with a failed line never succeeds"
    assert "0 answered, 1 failed" in again.stderr
    assert [request.custom_id for request in asked[3:]] == ["invalid"]

    (tmp_path / "in.jsonl").write_text("\n".join(lines[:3]) + "\n")
    shorter = complete(*arguments)
    assert (shorter.exit_code, len(asked)) == (1, 4)
    assert "0 answered, 0 failed, 1 failed earlier and not repeated" in shorter.stderr


def test_errors_that_a_killed_run_has_replaced_are_removed_by_the_next(
    asked: list[BatchRequest], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": "p"}\n{"custom_id": "b", "prompt": "p"}\n')
    output = tmp_path / "out.jsonl"
    output.write_text(failed_line("a", 503) + failed_line("b", 503) + '{"custom_id": "a", "response": null}\n')
    result = complete("--batch", str(tmp_path / "in.jsonl"), "--output", str(output), "--resume")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["a", "b"]
    assert [request.custom_id for request in asked] == ["b"]

    output.write_text(failed_line("b", 503) + output.read_text())
    result = complete("--batch", str(tmp_path / "in.jsonl"), "--output", str(output), "--resume")
    assert result.exit_code == 0, result.output
    assert (len(output.read_text().splitlines()), len(asked)) == (2, 1), "also where nothing is left to ask"


@pytest.mark.parametrize("content", ["not json\n", '{"no": "id"}\n', "[]\n"])
def test_a_file_that_is_not_an_output_is_not_changed(content: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(content)
    with pytest.raises(ConfigError, match="is not the output of a batch"):
        OutputFile(tmp_path / "notes.txt", can_resume=True, resumes=True)
    assert (tmp_path / "notes.txt").read_text() == content


def test_unusable_files_are_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    result = complete("--batch", str(tmp_path / "none.jsonl"))
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: cannot read {tmp_path}/none.jsonl: No such file or directory; check the path\n",
    )
    (tmp_path / "in.jsonl").write_text("{}")
    result = complete("--batch", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "no" / "out"))
    assert "cannot write" in result.stderr


def test_a_full_disk_is_answered_with_what_the_command_can_do(asked: list[BatchRequest], tmp_path: Path) -> None:
    """Only a batch can be resumed: the lines of other outputs do not say which prompts they belong to."""
    (tmp_path / "in").write_text('{"prompt": "hello"}')
    (tmp_path / "there").write_text("x")
    full = ("--output", "/dev/full")
    batch, prompts = (complete(option, str(tmp_path / "in"), *full).stderr for option in ("--batch", "--file"))
    assert "cannot write the output: No space left on device; free space, then continue with --resume" in batch
    assert "cannot write the output: No space left on device; free space, then remove /dev/full and start" in prompts
    there = complete("--file", str(tmp_path / "in"), "--output", str(tmp_path / "there"))
    assert there.stderr.endswith("there exists already; remove it or choose another --output\n")


def test_a_file_that_is_not_text(asked: list[BatchRequest], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"fine\n" + b"\xff\xfe" * 9)
    assert "is not UTF-8" in complete("--file", str(tmp_path / "x")).stderr
    assert "<stdin> is not UTF-8" in complete("--file", "-", stdin=(tmp_path / "x").read_bytes()).stderr


@pytest.mark.parametrize("is_stdin", [True, False])
def test_a_line_of_a_batch_that_is_not_utf8_does_not_stop_the_others(
    asked: list[BatchRequest], tmp_path: Path, is_stdin: bool
) -> None:
    content = b'{"prompt": "x"}\n{"prompt": "Gr\xfc\xdfe"}\n{"prompt": "y"}\n'
    (tmp_path / "in.jsonl").write_bytes(content)
    name = "-" if is_stdin else str(tmp_path / "in.jsonl")
    result = complete("--batch", name, "--output", str(tmp_path / "out"), stdin=content if is_stdin else None)
    assert result.exit_code == 1 and "2 answered, 1 failed" in result.stderr
    found = records(tmp_path / "out")
    assert found["line-2"]["error"] == {"code": "invalid_line", "message": "the line is not UTF-8; convert it"}
    assert {found[name]["error"] for name in ("line-1", "line-3")} == {None}


def test_a_batch_in_another_encoding_is_refused_as_a_whole(asked: list[BatchRequest]) -> None:
    result = complete("--batch", "-", stdin='{"prompt": "x"}\n'.encode("utf-16"))
    assert (result.exit_code, asked) == (1, [])
    assert result.stderr == "error: the batch is not UTF-8; convert it first\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[]", "must be a JSON object"),
        ('{"custom_id": 3, "prompt": "x"}', "custom_id must be a string"),
        ('{"temperature": 1}', 'needs "prompt" or "messages"'),
        ('{"prompt": "x", "messages": []}', 'needs "prompt" or "messages"'),
        ('{"url": "/v1/completions"}', "body must be a JSON object"),
        ('{"body": {}}', "url must be a path like /v1/chat/completions; got None"),
        ('{"url": "http://x", "body": {}}', "url must be a path"),
        (r'{"url": "/v1/\ud800", "body": {}}', r"url must be a path like /v1/chat/completions; got '/v1/\ud800'"),
        (r'{"url": "/v1/\u00fc", "body": {}}', "url must be a path like /v1/chat/completions; got '/v1/ü'"),
        ('{"url": "/v1/completions", "body": {}, "method": "GET"}', "method must be POST; got 'GET'"),
        ('{"url": "/v1/completions", "body": {}, "temperature": 1}', "temperature has no meaning beside url and body"),
        ('{"prompt": "x", "stream": true}', "not streamed"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_lines_that_are_not_requests(line: str, complaint: str) -> None:
    (found,) = read_batch([line], {})
    assert isinstance(found, BatchMistake)
    assert complaint in found.error


def test_defaults_fill_in_missing_fields_of_a_line() -> None:
    lines = [
        '{"prompt": "x", "max_completion_tokens": 3, "n": null}',
        '{"url": "/v1/embeddings", "body": {"input": "x"}}',
    ]
    simple, other = read_batch(lines, {"max_tokens": 7, "n": 2})
    assert isinstance(simple, BatchRequest)
    assert simple.body == {"prompt": "x", "max_completion_tokens": 3, "n": 2}
    assert isinstance(other, BatchRequest)
    assert other.body == {"input": "x"}


@pytest.mark.parametrize(
    "fields", [{"n_predict": 3, "repeat_penalty": 1.5}, {"max_tokens": 3, "repetition_penalty": 1.5}]
)
def test_defaults_stay_out_where_a_line_has_the_field_under_any_name(fields: dict[str, Any]) -> None:
    """The server refuses a request that has a field twice."""
    (line,) = read_batch([json.dumps({"prompt": "x", **fields})], {"max_tokens": 7, "repetition_penalty": 1.2, "n": 2})
    assert isinstance(line, BatchRequest) and line.body == {"prompt": "x", **fields, "n": 2}


@given(st.text("ab-\n", max_size=60), st.integers(1, 5), st.sampled_from(["\n", "-", "--", "-\n-", "ab"]))
def test_prompts_are_those_of_split_wherever_the_file_is_cut(text: str, size: int, separator: str) -> None:
    file = io.StringIO(text)
    file.readline = lambda _=None, read=file.readline: read(size)  # type: ignore[method-assign,assignment,misc]
    assert list(split_prompts(file, separator)) == [part.strip() for part in text.split(separator) if part.strip()]


def test_separators_may_have_escapes() -> None:
    assert unescaped(r"--\n\t") == "--\n\t"
    assert unescaped("\r\n-\r") == "\n-\n"
    with pytest.raises(ConfigError, match="must not be empty"):
        unescaped("")


def many_lines(count: int, taken: list[int]) -> Iterator[BatchLine]:
    for index in range(count):
        taken.append(index)
        yield BatchRequest(str(index), "/v1/completions", {"prompt": str(index)})


@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_input_is_read_as_it_is_needed(is_ordered: bool) -> None:
    """Only a few lines are in memory, however many there are."""
    taken: list[int] = []
    passed: list[str] = []
    running = most_running = most_ahead = 0

    async def respond(request: BatchRequest) -> BatchResponse:
        nonlocal running, most_running, most_ahead
        running += 1
        most_running = max(most_running, running)
        most_ahead = max(most_ahead, len(taken) - len(passed))
        await asyncio.sleep(0.001 if int(request.custom_id) % 5 else 0.004)
        running -= 1
        return BatchResponse(request.custom_id, 200, b"{}")

    def on_result(line: BatchLine, result: BatchResult) -> None:
        assert line.custom_id == result.custom_id
        passed.append(line.custom_id)

    asyncio.run(run_batch(many_lines(500, taken), respond, on_result, max_in_flight=7, is_ordered=is_ordered))
    names = [str(index) for index in range(500)]
    assert (passed == names) if is_ordered else (sorted(passed, key=int) == names and passed != names)
    assert most_running == 7
    assert most_ahead <= 7 + batch_run.LINES_READ_AHEAD + 1


def test_a_failure_cancels_the_requests_in_flight() -> None:
    cancelled: list[str] = []

    others: list[str] = []

    async def respond(request: BatchRequest) -> BatchResponse:
        if request.custom_id == "0":
            while len(others) < 2:
                await asyncio.sleep(0)
            return BatchResponse("0", 200, b"{}")
        others.append(request.custom_id)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(request.custom_id)
            raise
        raise AssertionError

    def disk_full(line: object, result: object) -> None:
        raise ConfigError("full")

    with pytest.raises(ConfigError, match="full"):
        asyncio.run(run_batch(many_lines(50, []), respond, disk_full, max_in_flight=3, is_ordered=False))
    assert sorted(cancelled) == ["1", "2"]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_result_is_passed_on_while_the_input_is_still_open(is_ordered: bool) -> None:
    passed: list[str] = []

    async def main() -> None:
        is_passed = asyncio.Event()
        goes_on = threading.Event()

        def lines() -> Iterator[BatchLine]:
            yield from many_lines(3, [])
            assert goes_on.wait(60), "no result is passed on before the input ends"

        async def respond(request: BatchRequest) -> BatchResponse:
            return BatchResponse(request.custom_id, 200, b"{}")

        def on_result(line: BatchLine, result: BatchResult) -> None:
            passed.append(line.custom_id)
            if len(passed) == 3:
                is_passed.set()

        batch = asyncio.create_task(run_batch(lines(), respond, on_result, max_in_flight=7, is_ordered=is_ordered))
        try:
            await asyncio.wait_for(is_passed.wait(), 10)
        finally:
            goes_on.set()
        await batch

    asyncio.run(main())
    assert sorted(passed) == ["0", "1", "2"]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_results_are_passed_on_before_an_interruption_ends_the_batch(is_ordered: bool) -> None:
    """The first line gets no response; the others have theirs at the moment of the interruption."""
    passed: list[str] = []
    cancelled: list[str] = []

    async def main() -> None:
        finished: list[str] = []

        async def respond(request: BatchRequest) -> BatchResponse:
            if request.custom_id == "0":
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.append(request.custom_id)
                    raise
            finished.append(request.custom_id)
            if len(finished) == 2:
                batch.cancel()
            return BatchResponse(request.custom_id, 200, b"{}")

        batch = asyncio.create_task(
            run_batch(
                many_lines(3, []), respond, lambda line, _: passed.append(line.custom_id),
                max_in_flight=7, is_ordered=is_ordered,
            )
        )  # fmt: skip
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    assert (passed, cancelled) == (["1", "2"], ["0"])


def test_results_are_passed_on_before_unreadable_input_ends_the_batch() -> None:
    passed: list[str] = []

    def lines() -> Iterator[BatchLine]:
        yield from many_lines(2, [])
        raise ConfigError("not UTF-8")

    async def respond(request: BatchRequest) -> BatchResponse:
        await asyncio.sleep(60 if request.custom_id == "0" else 0)
        return BatchResponse(request.custom_id, 200, b"{}")

    async def main() -> None:
        await run_batch(
            lines(), respond, lambda line, _: passed.append(line.custom_id), max_in_flight=7, is_ordered=True
        )

    with pytest.raises(ConfigError, match="not UTF-8"):
        asyncio.run(main())
    assert passed == ["1"]


def test_prompts_from_a_pipe_are_available_line_by_line() -> None:
    """A prompt is available as soon as its separator was written, though the pipe stays open."""
    read_end, write_end = os.pipe()
    with (
        os.fdopen(write_end, "w", encoding="utf-8", buffering=1) as writer,
        os.fdopen(read_end, encoding="utf-8") as file,
    ):
        prompts = split_prompts(file, "\n")
        for text in ("one", "two"):
            writer.write(f"{text}\n")
            read, _, _ = select.select([file], [], [], 60)
            assert read
            with deadline(20):
                assert next(prompts) == text


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a test that would hang for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def server_responses(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[BatchRequest]], list[BatchResponse]]:
    """Return the responses of the real application over a fake engine."""

    async def start(config: EngineConfig) -> AsyncEngine:
        return fake_engine(FakeClient())

    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.setenv("PAGEWICK_LOG_LEVEL", "WARNING")

    async def ask(requests: list[BatchRequest]) -> list[BatchResponse]:
        async with opened_responder(EngineConfig(model="m")) as (respond, max_in_flight):
            assert max_in_flight == 16
            return [await respond(request) for request in requests]

    return lambda requests: asyncio.run(ask(requests))


def test_keys_of_a_server_in_the_environment_close_no_batch(
    server_responses: Callable[[list[BatchRequest]], list[BatchResponse]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has exported the key for `serve` or `chat --url` runs batches beside them; one key is too short."""
    for key in ("a-long-enough-key", "short"):
        monkeypatch.setenv("PAGEWICK_API_KEY", key)
        (response,) = server_responses([BatchRequest("a", "/v1/completions", {"prompt": "ab"})])
        assert response.status == 200, response


def test_an_unexpected_error_is_that_of_its_line(
    server_responses: Callable[[list[BatchRequest]], list[BatchResponse]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such an error is a bug, so the log has its traceback; the other lines get their responses."""
    post = batch_run.post

    async def post_or_fail(app: Any, path: str, body: bytes) -> tuple[int, bytes, tuple[str, ...]]:
        if b"boom" in body:
            raise RuntimeError("it broke")
        return await post(app, path, body)

    monkeypatch.setattr(batch_run, "post", post_or_fail)
    bodies = [{"prompt": text} for text in ("ab", "boom", "ba")]
    responses = server_responses([BatchRequest("a", "/v1/completions", body) for body in bodies])
    assert [response.status for response in responses] == [200, 500, 200]
    assert responses[1].error == "internal error (RuntimeError: it broke); the log says more"
    (record,) = caplog.records
    assert record.exc_info and "the request of line a failed" in record.message


def test_a_simple_line_may_limit_its_response_under_any_name(
    server_responses: Callable[[list[BatchRequest]], list[BatchResponse]],
) -> None:
    bodies = [{"prompt": "ab", "n_predict": 2}, {"prompt": "ab", "max_tokens": 2}]
    for response in server_responses([BatchRequest("a", "/v1/completions", body, is_simple=True) for body in bodies]):
        assert response.status == 200, response


def test_fields_without_effect_are_named(
    server_responses: Callable[[list[BatchRequest]], list[BatchResponse]],
) -> None:
    messages = [{"role": "user", "content": "x", "colour": "red"}]
    plain, chat = server_responses(
        [
            BatchRequest("plain", "/v1/completions", {"prompt": "ab"}),
            BatchRequest("chat", "/v1/chat/completions", {"messages": messages, "max_token": 3}),
        ]
    )
    assert (plain.status, plain.ignored) == (200, ())
    assert (chat.status, set(chat.ignored)) == (200, {"max_token", "messages[].colour"})


def test_a_note_names_fields_without_effect_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @asynccontextmanager
    async def opened(config: EngineConfig) -> AsyncIterator[tuple[Respond, int]]:
        async def respond(request: BatchRequest) -> BatchResponse:
            return BatchResponse(request.custom_id, 200, b"{}", tuple(request.body.keys() - {"prompt"}))

        yield respond, 1

    monkeypatch.setattr(files, "opened_responder", opened)
    lines = [{"prompt": "a"}, {"prompt": "b", "max_token": 1}, {"prompt": "c", "max_token": 1}]
    result = complete("--batch", "-", stdin="\n".join(map(json.dumps, lines)))
    assert (result.exit_code, result.stderr) == (0, "note: fields without effect: max_token (first in line-2)\n")
    assert complete("--batch", "-", stdin='{"prompt": "a"}').stderr == ""


def test_responses_are_those_of_the_server(
    server_responses: Callable[[list[BatchRequest]], list[BatchResponse]],
) -> None:
    messages = [{"role": "user", "content": "x"}]
    responses = server_responses(
        [
            BatchRequest("chat", "/v1/chat/completions", {"messages": messages, "model": "m"}),
            BatchRequest("simple", "/v1/completions", {"prompt": "ab"}, is_simple=True),
            BatchRequest("model", "/v1/completions", {"prompt": "ab", "model": "other"}),
            BatchRequest("url", "/v1/nothing", {}),
            BatchRequest("surrogate", "/v1/completions", {"prompt": "\ud800"}, is_simple=True),
            BatchRequest("long", "/v1/completions", {"prompt": "a" * MAX_MODEL_LEN}, is_simple=True),
        ]
    )
    assert [(response.custom_id, response.status) for response in responses] == [
        ("chat", 200), ("simple", 200), ("model", 404), ("url", 404), ("surrogate", 400), ("long", 400),
    ]  # fmt: skip
    chat, simple = (json.loads(response.body) for response in responses[:2])
    assert chat["choices"][0]["message"]["content"] == "Hello 😀!"
    assert (simple["choices"][0]["text"], simple["choices"][0]["finish_reason"]) == ("Hello 😀!", "stop")
    assert all(json.loads(response.body)["error"]["message"] for response in responses[2:])
