"""AsyncEngine over a fake engine: texts, fan-out, aborts; and no torch in the process that uses it."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pagewick.async_llm import AsyncEngine
from pagewick.config import EngineConfig
from pagewick.engine.client import EngineClient
from pagewick.errors import ContextLengthError, EngineDeadError, EngineError, InvalidRequestError, ModelLoadError
from pagewick.generation import interleave
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from tests.fake_engine import DEATH, END, MAX_MODEL_LEN, NAN_ROW, TOKENIZER, FakeClient, fake_engine, spell
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend, write_model_directory

Body = Callable[[AsyncEngine, FakeClient], Coroutine[Any, Any, None]]


def run(body: Body, **behaviour: Any) -> FakeClient:
    """Run the body with an engine and its client, and see that nothing runs afterwards."""
    client = FakeClient()
    for name, value in behaviour.items():
        setattr(client, name, value)

    async def main() -> None:
        await body(fake_engine(client), client)
        assert not client.running
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
        assert (request.seed, request.choice_index) == (7, 0)

    run(body)


def test_prompts_of_all_kinds() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        output = await last_of(engine, "hé")
        assert (output.prompt, output.finished, output.num_cached_tokens) == ("hé", True, 3)
        assert output.outputs[0].token_ids == [*spell("Hello 😀!"), END]
        assert (await last_of(engine, [1, 2, 3])).prompt_token_ids == [1, 2, 3]
        messages = [{"role": "user", "content": "<|im_end|>"}]
        output = await last_of(engine, messages)
        assert output.prompt_token_ids == await engine.encode_chat(messages)
        assert output.prompt_token_ids.count(TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]) == 1

    run(body, num_cached_tokens=3)


def test_choices_are_separate_requests_with_one_seed() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        params = SamplingParams(n=3, stop=("l",), prompt_logprobs=2)
        output = await last_of(engine, [5, 6], params)
        assert [choice.text for choice in output.outputs] == ["He", "hi", "one, two"]
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
        assert output.prompt_logprobs is not None and [len(one or {}) for one in output.prompt_logprobs] == [0, 1]
        assert [request.request_id for request in client.requests] == [f"{output.request_id}-{i}" for i in range(3)]
        assert [request.choice_index for request in client.requests] == [0, 1, 2]
        assert len({request.seed for request in client.requests}) == 1
        assert [request.params.prompt_logprobs for request in client.requests] == [2, None, None]
        assert all(request.params.stop == () and request.params.n == 1 for request in client.requests)

    client = run(body, texts=["Hello", "hi", "one, two"])
    # The stop string ended the first choice here, so that the engine was told.
    assert [request_id[-2:] for request_id in client.aborted] == ["-0"]


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
        assert len(client.aborted) == 2 and not client.finished

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
        with pytest.raises(EngineDeadError, match="not running"):
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
        assert [one.num_output_tokens for one in generations] == [4, 12]

    run(body)


def test_interleave_aborts_all_when_one_fails() -> None:
    async def body(engine: AsyncEngine, client: FakeClient) -> None:
        with pytest.raises(EngineError):
            async for _ in interleave([engine.request([1], SamplingParams()), engine.request([2], SamplingParams())]):
                client.failure = NAN_ROW

    run(body, pause_at=3)


def test_start_loads_the_text_and_passes_the_directory_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []

    async def start(config: EngineConfig) -> FakeClient:
        configs.append(config)
        return FakeClient()

    monkeypatch.setattr(EngineClient, "start", start)
    path = write_model_directory(
        tmp_path, byte_level_backend(), chat_template=QWEN_TEMPLATE, generation_config={"temperature": 0.5, "top_k": 9}
    )
    engine = asyncio.run(AsyncEngine.start(EngineConfig(model=str(path), max_num_seqs=3)))
    assert (engine.default_params.temperature, engine.default_params.top_k) == (0.5, 9)
    assert configs == [EngineConfig(model=str(path), max_num_seqs=3)]
    assert engine.is_alive and engine.info.architecture == "Fake" and engine.stats.num_blocks == 100
    write_model_directory(tmp_path, byte_level_backend(), generation_config={"temperature": -1})
    with pytest.raises(ModelLoadError, match="generation_config"):
        asyncio.run(AsyncEngine.start(EngineConfig(model=str(path))))


@pytest.mark.parametrize("module", ["pagewick.async_llm", "pagewick.server.app"])
def test_the_http_process_never_imports_torch(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
