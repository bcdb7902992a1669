"""AsyncEngine over a fake engine: texts, fan-out, aborts; and no torch in the process that uses it."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pagewick import outputs
from pagewick.async_llm import AsyncEngine
from pagewick.config import EngineConfig
from pagewick.engine import messages
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import RequestOptions
from pagewick.engine.supervisor import Supervisor
from pagewick.errors import (
    ArgumentError,
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
)
from pagewick.generation import interleave
from pagewick.local_models import with_local_models
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.grammars.checker import GrammarChecker
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.request_maker import PlanFields
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.checks import checked_offer
from tests.fake_engine import DEATH, END, MAX_MODEL_LEN, NAN_ROW, TOKENIZER, FakeClient, fake_engine, spell
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend, sentencepiece_backend, write_model_directory

Body = Callable[[AsyncEngine, FakeClient], Coroutine[Any, Any, None]]


def run(body: Body, **behaviour: Any) -> FakeClient:
    """Run the body with an engine and its client, and see that nothing runs afterwards."""
    client = FakeClient()
    for name, value in behaviour.items():
        setattr(client, name, value)

    async def main() -> None:
        await body(fake_engine(client), client)
        assert not client.running
        for _ in range(4):  # turns for the fake client's cancelled tasks to end
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    return client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def last_of(engine: AsyncEngine, prompt: Any, params: SamplingParams | None = None) -> RequestOutput:
    return [output async for output in engine.generate(prompt, params)][-1]


def test_generate_grows_to_the_whole_text() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        texts = [output.outputs[0].text async for output in engine.generate("ab", SamplingParams(seed=7))]
        assert texts[-1] == "Hello 😀!"
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
        (request,) = client.requests
        assert request.prompt_token_ids == TOKENIZER.encode("ab", add_special_tokens=True)
        assert (request.seed, request.params.n) == (7, 1)

    run(body)


def test_prompts_of_all_kinds() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        output = await last_of(engine, "hé")
        assert (output.prompt, output.finished, output.num_cached_tokens) == ("hé", True, 3)
        assert output.outputs[0].token_ids == [*spell("Hello 😀!"), END]
        assert (await last_of(engine, [1, 2, 3])).prompt_token_ids == [1, 2, 3]
        found = list(np.array([1, 2, 3]))
        assert {*map(type, (await last_of(engine, found)).prompt_token_ids)} == {int}
        async with engine.request(found, SamplingParams()) as generation:
            assert {*map(type, generation.output.prompt_token_ids)} == {int}
        messages = [{"role": "user", "content": "<|im_end|>"}]
        output = await last_of(engine, messages)
        assert output.prompt_token_ids == await engine.encode_chat(messages)
        assert output.prompt_token_ids.count(TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]) == 1

    run(body, extras={"num_cached_tokens": 3})


def test_all_choices_are_one_request() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        params = SamplingParams(n=3, stop=("l",), prompt_logprobs=2)
        output = await last_of(engine, [5, 6], params)
        assert [choice.text for choice in output.outputs] == ["He", "hi", "one, two"]
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        assert output.prompt_logprobs is not None and [len(one or {}) for one in output.prompt_logprobs] == [0, 1]
        (request,) = client.requests
        assert request.request_id == output.request_id
        assert (request.params.n, request.params.stop, request.params.prompt_logprobs) == (3, (), 2)
        # The stop string ended the first choice here, so that the engine was told; the others went on.
        assert client.aborted_choices == [(output.request_id, 0)]
        assert (client.finished, client.aborted) == ([output.request_id], [])

    run(body, texts=["Hello", "hi", "one, two"])


def test_best_of_gives_the_likeliest_per_token() -> None:
    """By their sums, the two shortest would be the best."""

    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        params = SamplingParams(n=2, best_of=4, stop=("!",), prompt_logprobs=0)
        seen = [
            ([choice.text for choice in output.outputs], output.finished)
            async for output in engine.generate([5, 6], params)
        ]
        assert seen == [(["longer", "yes"], True)] * 2
        (request,) = client.requests
        assert (request.params.n, request.params.best_of, request.params.logprobs) == (4, None, 0)
        output = await last_of(engine, [5, 6], params)
        assert [choice.index for choice in output.outputs] == [0, 1]
        assert [choice.finish_reason for choice in output.outputs] == ["stop", "stop"]
        assert [choice.logprobs for choice in output.outputs] == [None, None]
        assert [choice.cumulative_logprob for choice in output.outputs] == [7 * -0.25, 4 * -0.375]
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 2

    run(body, texts=["hi", "yes", "longer", "no! never"], logprobs=[-0.5, -0.375, -0.25, -1.0])


def test_best_of_keeps_what_was_asked_for_and_counts_everything() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        deltas: list[ChoiceDelta] = []
        async with engine.request([5], SamplingParams(best_of=2, logprobs=2), on_delta=deltas.append) as generation:
            async for delta in generation:
                assert generation.output.finished
                assert (delta.index, delta.text, delta.finish_reason) == (0, "good", "stop")
                assert delta.token_ids == [*spell("good"), END]
                assert [one.chosen.token for one in delta.logprobs or []] == list("good")
        assert len(deltas) == 1
        (choice,) = generation.output.outputs
        assert choice.logprobs is not None and [len(one) for one in choice.logprobs] == [2] * 4 + [1]
        assert generation.stream.num_output_tokens == len("bad") + len("good") + 2
        assert client.requests[0].params.logprobs == 2

    run(body, texts=["bad", "good"], logprobs=[-2.0, -1.0])


def test_leaving_ends_every_candidate() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        deltas: list[ChoiceDelta] = []
        async with engine.request([5], SamplingParams(n=2, best_of=3), on_delta=deltas.append):
            await until(lambda: client.num_paused == 1)
        assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "abort"), (1, "abort")]
        assert len(client.aborted) == 1

    run(body, pause_at=2)


def test_beams_are_told_their_scores() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        output = await last_of(engine, [5], SamplingParams(n=2, use_beam_search=True))
        assert [(one.text, one.cumulative_logprob) for one in output.outputs] == [("one", -1.5), ("two", -2.5)]
        (request,) = client.requests
        assert request.params.use_beam_search and request.params.n == 2

    run(body, texts=["one", "two"])


def test_what_the_engine_says_of_cache_and_speculation_is_told() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        output = await last_of(engine, [5, 6, 7, 8])
        assert output.num_cached_tokens == 2
        assert output.prefix_miss == outputs.PrefixMiss(position=2, token_id=7, cached_token_id=9)
        assert (output.outputs[0].num_draft_tokens, output.outputs[0].num_accepted_tokens) == (5, 3)
        assert output.outputs[0].cumulative_logprob is None

    miss = messages.PrefixMiss(2, 7, 9)
    run(body, extras={"num_cached_tokens": 2, "prefix_miss": miss, "num_draft_tokens": 5, "num_accepted_tokens": 3})


def test_strings_for_the_sampler_go_as_tokens() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        params = SamplingParams(bad_words=("x",), dry_multiplier=0.5, dry_sequence_breakers=("\n",))
        await engine.prepare(params)
        await last_of(engine, [5], params)
        (request,) = client.requests
        assert request.bad_word_ids == [spell("x"), spell(" x")]
        (newline,) = spell("\n")
        assert int.from_bytes(request.dry_breaker_mask, "little") == 1 << newline
        assert request.dry_breaker_ids == []

    run(body)


def test_options_reach_the_engine() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        options = RequestOptions(priority=-3, cache_salt="s", session_id="me", timeout_s=1.5, fairness_key="key")
        async for _ in engine.generate([5], options=options):
            pass
        await last_of(engine, [5])
        assert [request.options for request in client.requests] == [options, RequestOptions()]

    run(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 2**31), ("priority", 0.5), ("timeout_s", 0), ("timeout_s", float("nan")), ("timeout_s", "1"),
     ("cache_salt", ""), ("cache_salt", "x" * 257), ("session_id", "\ud800"), ("session_id", 3)],
)  # fmt: skip
def test_wrong_options_are_refused(name: str, value: Any) -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(InvalidRequestError, match=name.removesuffix("_s")):
            engine.request([5], SamplingParams(), options=RequestOptions(**{name: value}))

    run(body)


@pytest.mark.parametrize("n", [1, 2])
def test_an_engines_refusal_has_its_own_class(n: int) -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        for fields, kind in (
            ({"error_kind": "QueueFullError", "retry_after_s": 7}, QueueFullError),
            ({"error_kind": "DeadlineExceededError"}, DeadlineExceededError),
            ({"error_kind": "ContextLengthError"}, ContextLengthError),
            ({}, EngineError),
        ):
            client.failure = {"error": "because", **fields}
            deltas: list[ChoiceDelta] = []
            with pytest.raises(kind, match="because") as caught:
                async with engine.request([5], SamplingParams(n=n), on_delta=deltas.append) as generation:
                    await anext(generation)
            assert type(caught.value) is kind
            assert getattr(caught.value, "retry_after_s", 7) == 7
            assert [delta.finish_reason for delta in deltas] == ["error"] * n

    run(body, pause_at=0)


def test_seeds_differ_unless_the_engine_has_one() -> None:
    def seeds(seed: int | None) -> list[int]:
        client = FakeClient()
        engine = AsyncEngine(client, TOKENIZER, None, seed=seed)

        async def main() -> None:
            for _ in range(2):
                await last_of(engine, [1])

        asyncio.run(main())
        return [request.seed for request in client.requests]

    assert len({*seeds(None), *seeds(None)}) == 4
    assert seeds(3) == seeds(3)
    assert all(0 <= seed < 2**63 for seed in seeds(3))


def test_closing_the_iterator_aborts_every_choice() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        outputs = engine.generate([1], SamplingParams(n=2))
        async for _ in outputs:
            break
        await outputs.aclose()
        assert len(client.aborted) == 1 and not client.finished

    run(body, pause_at=2)


def test_cancelling_the_task_aborts() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        task = asyncio.create_task(last_of(engine, [1]))
        await until(lambda: client.num_paused == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(client.aborted) == 1

    run(body, pause_at=2)


def test_abort_ends_the_iterator() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        outputs: list[RequestOutput] = []

        async def consume() -> None:
            async for output in engine.generate([1], request_id="mine"):
                outputs.append(output)

        task = asyncio.create_task(consume())
        await until(lambda: client.num_paused == 1)
        await engine.abort("unknown")
        await engine.abort("mine")
        await task
        assert outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].outputs[0].text == "He"

    run(body, pause_at=2)


@pytest.mark.parametrize(("failure", "kind"), [(NAN_ROW, EngineError), (DEATH, EngineDeadError)])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_reaches_the_caller(failure: Exception, kind: type[Exception], n: int) -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(kind, match=str(failure)):
            await last_of(engine, [1], SamplingParams(n=n))

    run(body, failure=failure, pause_at=1)


def test_closing_fails_what_is_in_flight() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        task = asyncio.create_task(last_of(engine, [1]))
        await until(lambda: client.num_paused == 1)
        await engine.close()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await task
        assert client.is_closed
        with pytest.raises(EngineDeadError, match="it was closed"):
            engine.request([1], SamplingParams())

    run(body, pause_at=2)


def test_what_can_never_be_served_is_refused_at_once() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(ContextLengthError, match=f"maximum context length is {MAX_MODEL_LEN} tokens"):
            engine.request([1] * MAX_MODEL_LEN, SamplingParams())
        with pytest.raises(ContextLengthError, match="maximum context length"):
            await engine.encode("a" * 100_000)
        with pytest.raises(InvalidRequestError):
            engine.request([], SamplingParams())
        with pytest.raises(InvalidRequestError, match="must not set messages"):
            await engine.encode_chat([], chat_template_kwargs={"messages": []})
        async with engine.request([1], SamplingParams(), request_id="twice"):
            with pytest.raises(InvalidRequestError, match="already running"):
                engine.request([1], SamplingParams(), request_id="twice")
        with pytest.raises(InvalidRequestError, match="no chat template"):
            await AsyncEngine(client, TOKENIZER, None).encode_chat([{"role": "user", "content": "x"}])

    run(body)


def test_interleave_names_the_request_of_each_delta() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        generations = [engine.request([1], SamplingParams(max_tokens=4)), engine.request([2], SamplingParams())]
        texts = ["", ""]
        async for position, delta in interleave(generations):
            texts[position] += delta.text
        assert texts == ["Hell", "Hello 😀!"]
        assert [one.stream.num_output_tokens for one in generations] == [4, 12]

    run(body)


def test_interleave_aborts_all_when_one_fails() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(EngineError):
            async for _ in interleave([engine.request([1], SamplingParams()), engine.request([2], SamplingParams())]):
                client.failure = NAN_ROW

    run(body, pause_at=3)


def test_the_end_of_every_request_is_heard_when_one_fails() -> None:
    """Their consumer stops at the failure and cancels generators that are just about to report their ends."""

    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        heard: dict[str, list[Any]] = {"a": [], "b": []}
        generations = [
            engine.request([1], SamplingParams(n=2), request_id=name, on_delta=deltas.append)
            for name, deltas in heard.items()
        ]
        with pytest.raises(EngineDeadError):
            async for _ in interleave(generations):
                pass
        ends = [
            sorted((one.index, one.finish_reason) for one in deltas if one.finish_reason) for deltas in heard.values()
        ]
        assert all([index for index, _ in one] == [0, 1] for one in ends)
        assert {reason for one in ends for _, reason in one} <= {"error", "abort"}
        # Nothing holds their ids any more.
        engine.request([1], SamplingParams(), request_id="a")
        engine.request([1], SamplingParams(), request_id="b")

    run(body, failure=DEATH, pause_at=1)


def test_start_loads_the_text_and_passes_the_directory_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    async def start(config: EngineConfig, **how: Any) -> FakeClient:
        started.append((config, how))
        return FakeClient()

    monkeypatch.setattr(Supervisor, "start", start)
    path = write_model_directory(
        tmp_path, byte_level_backend(), chat_template=QWEN_TEMPLATE, generation_config={"temperature": 0.5, "top_k": 9}
    )
    config = EngineConfig(model=str(path), max_num_seqs=3)
    engine = asyncio.run(AsyncEngine.start(config, hang_timeout_s=7.0))
    assert (engine.default_params.temperature, engine.default_params.top_k) == (0.5, 9)
    assert started == [(config, {"hang_timeout_s": 7.0, "at_each_start": None})]
    assert engine.is_alive and engine.info.architecture == "Fake" and engine.stats.num_blocks == 50
    ask = [{"role": "user", "content": "why?"}]
    assert asyncio.run(engine.render_chat(ask, add_generation_prompt=False)) == "<|im_start|>user\nwhy?<|im_end|>\n"
    other = asyncio.run(AsyncEngine.start(config, chat_template="[{{ messages[0].content }}]{# [THINK] #}"))
    assert asyncio.run(other.render_chat(ask)) == "[why?]"
    assert other.reasoning_tags is not None and other.reasoning_tags.start == "[THINK]"
    with pytest.raises(ModelLoadError, match="chat template is not valid"):
        asyncio.run(AsyncEngine.start(config, chat_template="{% if %}"))
    write_model_directory(tmp_path, byte_level_backend(), generation_config={"temperature": -1})
    with pytest.raises(ModelLoadError, match="generation_config"):
        asyncio.run(AsyncEngine.start(EngineConfig(model=str(path))))


def test_start_takes_the_arguments_of_an_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    async def start(config: EngineConfig, **how: Any) -> FakeClient:
        started.append(config)
        return FakeClient()

    monkeypatch.setattr(Supervisor, "start", start)
    path = write_model_directory(tmp_path, byte_level_backend())
    asyncio.run(AsyncEngine.start(path, max_num_seqs=3, gpu_memory_utilization=0.9))
    assert started == [EngineConfig(model=str(path), max_num_seqs=3, gpu_memory_utilization=0.9)]
    with pytest.raises(TypeError, match="model must be a directory, a Hugging Face id or an EngineConfig; got 5"):
        asyncio.run(AsyncEngine.start(5))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a config or options, not both"):
        asyncio.run(AsyncEngine.start(EngineConfig(), max_num_seqs=3))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((5,), "a prompt must be a text, a list of token ids or a dict with one; got 5"),
        (({"promt": "hi"},), "a prompt has no promt; known are prompt and prompt_token_ids"),
        (("hi", {"temperature": 0}), r"sampling_params must be SamplingParams; write SamplingParams\(temperature=0\)"),
    ],
)
def test_a_wrong_type_is_a_type_error_in_one_line(arguments: Any, complaint: str) -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(TypeError, match=complaint):
            await anext(engine.generate(*arguments))

    run(body)


@pytest.mark.parametrize(
    ("method", "arguments", "complaint"),
    [
        ("encode", (5,), "prompt must be a text; got 5"),
        ("encode", ([5],), r"prompt must be a text; got \[5\]"),
        ("encode_chat", (5,), "messages must be a list such as .*; got 5"),
        ("chat_input", ("hi",), "messages must be a list such as .*; got 'hi'"),
        ("render_chat", ([5],), r"messages must be a list such as .*; got \[5\]"),
        ("encode_infill", ("", None), "suffix must be a text; got None"),
        ("decode", (5,), "token_ids must be a list of whole numbers; got 5"),
        ("decode", ("ab",), "token_ids must be a list of whole numbers; got 'ab'"),
        ("token_strings", ([1.5],), r"token_ids must be a list of whole numbers; got \[1.5\]"),
        ("token_strings", (["long" * 50],), r"token_ids must be a list of whole numbers; got \['long.{72,80}\.\.\.$"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_named(method: str, arguments: Any, complaint: str) -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(ArgumentError, match=complaint):
            made = getattr(engine, method)(*arguments)
            await made

    run(body)


def test_a_closed_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(engine.generate("hi"))
        with pytest.raises(EngineDeadError, match="this AsyncEngine is closed; start another one"):
            await engine.render_chat([{"role": "user", "content": "hi"}])

    run(body)


ASK = [{"role": "user", "content": "why?"}]
THINK, CLOSE = (TOKENIZER.encode(tag, add_special_tokens=False)[0] for tag in ("<think>", "</think>"))


def test_thoughts_are_told_from_text_where_that_is_wanted() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        assert engine.reasoning_tags is not None and engine.reasoning_tags.start == "<think>"
        assert engine.can_think_by_switch
        opened = [*await engine.encode_chat(ASK), THINK]
        for split, expected in ((True, ("hm </think>Hi", "")), (False, ("", "hm </think>Hi"))):
            deltas: list[ChoiceDelta] = []
            async with engine.request(
                opened, SamplingParams(), split_reasoning=split, on_delta=deltas.append
            ) as generation:
                async for _ in generation:
                    pass
            # The letters of a tag are not its token.
            choice = generation.output.outputs[0]
            assert (choice.reasoning, choice.text) == expected
            assert "".join(delta.reasoning for delta in deltas) == choice.reasoning
            assert sum(delta.num_reasoning_tokens for delta in deltas) == choice.num_reasoning_tokens == 13 * split

    run(body, texts=["hm </think>Hi"])


def test_a_conversation_is_split_and_a_text_is_not() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        begun = [*ASK, {"role": "assistant", "content": "<think>\nso"}]
        token_ids = await engine.encode_chat(begun, continue_final_message=True)
        text = await engine.render_chat(begun, continue_final_message=True)
        assert TOKENIZER.encode(text, add_special_tokens=False) == token_ids
        assert text.endswith("<think>\nso")
        for prompt, is_split, expected in (
            (token_ids, True, "hm"),
            (token_ids, None, ""),
            (text, None, ""),
            (ASK, None, ""),
        ):
            output = [one async for one in engine.generate(prompt, split_reasoning=is_split)][-1]
            assert output.outputs[0].reasoning == expected
        opening = ChatTemplate({"default": QWEN_TEMPLATE + "{{ '<think>\\n' }}"}, TOKENIZER)
        output = [one async for one in AsyncEngine(client, TOKENIZER, opening).generate(ASK)][-1]
        assert (output.outputs[0].reasoning, output.outputs[0].text) == ("hm", "")

    run(body, texts=["hm"])


def test_a_budget_of_thought_reaches_the_engine() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        async for _ in engine.generate(ASK, thinking_budget=5):
            pass
        opened = [*await engine.encode_chat(ASK), THINK]
        params = SamplingParams(n=2)
        await engine.prepare(params, thinking_budget=0)
        async with engine.request(opened, params, thinking_budget=0):
            await until(lambda: len(client.requests) == 2)
        answered = [*opened, CLOSE, *spell("so")]
        async with engine.request(answered, params, thinking_budget=3):
            await until(lambda: len(client.requests) == 3)
        said = [request.constraint for request in client.requests]
        assert [one and (one["budget"], one["is_open"]) for one in said] == [(5, False), (0, True), None]
        with pytest.raises(InvalidRequestError, match="use_beam_search") as caught:
            engine.request(opened, SamplingParams(use_beam_search=True, n=2), thinking_budget=3)
        assert caught.value.param == "thinking_budget"

    run(body)


def test_a_model_without_tags_has_no_thoughts() -> None:
    async def main() -> None:
        tokenizer = Tokenizer(sentencepiece_backend(), config={})
        client = FakeClient()
        engine = AsyncEngine(client, tokenizer, None)
        assert engine.reasoning_tags is None and not engine.can_think_by_switch
        async with engine.request([5], SamplingParams(), split_reasoning=True):
            await until(lambda: len(client.requests) == 1)
        with pytest.raises(InvalidRequestError, match="no tags around its thoughts"):
            engine.request([5], SamplingParams(), thinking_budget=3)

    asyncio.run(main())


def test_more_ways_to_a_prompt_and_back() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        bare = await engine.encode("hello you", add_special_tokens=False)
        assert await engine.encode("hello you", add_special_tokens=False, truncate_prompt_tokens=2) == bare[-2:]
        whole = await engine.encode_chat(ASK)
        assert await engine.encode_chat(ASK, truncate_prompt_tokens=4) == whole[-4:]
        kept = await engine.encode("a" * 2000, truncate_prompt_tokens=-1, num_output_tokens=12)
        assert len(kept) == MAX_MODEL_LEN - 12
        template = "{{ messages[0].content }}|{{ documents[0].text }}|{{ tone }}"
        how: dict[str, Any] = {"documents": [{"text": "d"}], "chat_template_kwargs": {"tone": "t"}}
        assert await engine.render_chat(ASK, chat_template=template, **how) == "why?|d|t"
        token_ids = await engine.encode_chat(ASK, chat_template=template, **how)
        assert (engine.decode(token_ids), "".join(engine.token_strings(token_ids))) == ("why?|d|t",) * 2
        with pytest.raises(InvalidRequestError, match="cannot infill"):
            await engine.encode_infill("a", "b")
        with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
            engine.decode([10**6])

    run(body)


def test_health_is_the_clients() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        assert engine.health == EngineHealth("ready") and engine.is_alive
        client.health = EngineHealth("restarting", "it died", retry_after_s=3)
        assert engine.health.retry_after_s == 3 and not engine.is_alive
        with pytest.raises(EngineDeadError):
            engine.request([5], SamplingParams())

    run(body)


@pytest.mark.parametrize("module", ["pagewick.async_llm", "pagewick.server.app"])
def test_the_http_process_never_imports_torch(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


NEVER_CLOSED = """
import asyncio, sys, threading
from pagewick import AsyncEngine, SamplingParams

async def main():
    engine = await AsyncEngine.start()
    outputs = engine.generate("Once", SamplingParams(max_tokens=300, ignore_eos=True))
    await anext(outputs)
    print(*engine._client._client.child.process_ids, flush=True)
    return engine, outputs

if sys.argv[1].startswith("run"):
    asyncio.run(main())
    if sys.argv[1] == "run and go on":
        for thread in threading.enumerate():
            if thread.name.startswith("asyncio-waitpid"):  # asyncio waits there for the end of a process
                thread.join(20)
else:
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(main())
    if sys.argv[1] == "closed loop":
        loop.close()
"""


@pytest.mark.parametrize("way", ["run", "run and go on", "open loop", "closed loop"])
def test_an_engine_that_nobody_closes_ends_quietly_with_the_program(way: str) -> None:
    environment = {**os.environ, "PAGEWICK_LOG_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED, way], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == ""
    left = [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]
    assert not psutil.wait_procs(left, timeout=20)[1]


def test_every_model_that_is_named_becomes_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    tokens: list[str | None] = []

    def resolve_model(
        model: str,
        *,
        weight_file: str | None = None,
        revision: str | None = None,
        hub: str,
        token: str | None,
        check: Any = None,
        with_images: bool = False,
        mmproj: str | None = None,
    ) -> Path:
        asked.append((model if weight_file is None else f"{model}/{weight_file}", revision, hub))
        tokens.append(token)
        return Path("/models") / model

    monkeypatch.setattr("pagewick.local_models.resolve_model", resolve_model)
    monkeypatch.setattr("pagewick.local_models.resolve_tokenizer", resolve_model)
    config = EngineConfig(
        model="big", weight_file="f", tokenizer="words", revision="v2", speculative_model="small", hub="modelscope"
    )
    found = with_local_models(config)
    assert (found.model, found.weight_file, found.speculative_model) == ("/models/big", None, "/models/small")
    # A revision is the large model's.
    names = [("big/f", "v2"), ("words", None), ("small", None)]
    assert asked == [(name, revision, "modelscope") for name, revision in names]
    assert found.tokenizer == "/models/words"
    tokens.clear()
    assert with_local_models(EngineConfig(model="big"), "hf_secret").speculative_model is None
    with_local_models(EngineConfig(model="big"), hf_token=True)
    assert tokens == ["hf_secret", None]


def test_quantization_gguf_wants_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization gguf: pagewick-demo holds safetensors"):
        with_local_models(EngineConfig(model="pagewick-demo", quantization="gguf"))
    file = tmp_path / "model.gguf"
    file.touch()
    # Else the file is read, to find its part that sees.
    config = with_local_models(EngineConfig(model=str(file), quantization="GGUF", language_model_only=True))
    assert (config.model, config.quantization) == (str(file), None)


def tools_with(name: str) -> PlanFields:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return PlanFields(split_parts=True, offer=checked_offer([tool]))


def test_tools_are_checked_beside_the_event_loop_and_known_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    may_end = threading.Event()

    def try_out(checker: GrammarChecker, key: tuple[str, tuple[str, ...]]) -> None:
        threads.append(threading.get_ident())
        if "costly" in key[0]:
            may_end.wait(10)

    monkeypatch.setattr(GrammarChecker, "_try", try_out)

    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        plan = await engine.prepare(SamplingParams(), **tools_with("weather"))
        engine.generation(spell("a"), plan)
        assert len(threads) == 1 and threading.get_ident() not in threads
        costly = asyncio.create_task(engine.prepare(SamplingParams(), **tools_with("costly")))
        await until(lambda: len(threads) == 2)
        async with asyncio.timeout(5):
            await engine.prepare(SamplingParams(), **tools_with("weather"))
        assert not costly.done() and len(threads) == 2
        may_end.set()
        engine.generation(spell("a"), await costly)
        assert len(threads) == 2 and threading.get_ident() not in threads

    run(body)


def test_the_constructor_names_the_way_to_start() -> None:
    for arguments in ((), ("some/model",)):
        with pytest.raises(ArgumentError, match=r"await AsyncEngine\.start\(model\)"):
            AsyncEngine(*arguments)  # type: ignore[arg-type]
