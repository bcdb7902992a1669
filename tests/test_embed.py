"""LLM.embed and AsyncEngine.embed, with the built-in model."""

from __future__ import annotations

import asyncio
import math

import pytest

from pagewick import LLM, AsyncEngine, InvalidRequestError, PoolingParams, RequestOptions, SamplingParams
from pagewick.errors import ArgumentError, ContextLengthError

TEXTS = ["Where is the station?", "a", "Where is the station?"]


def length(vector: list[float]) -> float:
    return math.sqrt(sum(number * number for number in vector))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_batched_tokens=64, num_threads=1)


def test_each_prompt_has_a_vector_of_length_1(llm: LLM) -> None:
    outputs = llm.embed(TEXTS)
    vectors = [output.outputs.embedding for output in outputs]
    assert {len(vector) for vector in vectors} == {llm.info.embedding_size}
    assert all(math.isclose(length(vector), 1, abs_tol=1e-6) for vector in vectors)
    assert vectors[0] == vectors[2] != vectors[1]
    assert outputs[0].prompt == TEXTS[0] and outputs[0].finished
    (alone,) = llm.embed(outputs[0].prompt_token_ids)
    assert alone.outputs.embedding == vectors[0] and alone.prompt is None


def test_requests_for_text_beside_them_are_not_disturbed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (before,) = llm.generate(TEXTS[0], params)
    stream = llm.stream_outputs(TEXTS[0], params)
    next(stream)
    (vector,) = llm.embed("x" * 300, PoolingParams(pooling="mean"))
    last = [output.outputs[0].text for output in stream][-1]
    assert last == before.outputs[0].text and len(vector.outputs.embedding) == llm.info.embedding_size


def test_the_mean_is_of_all_tokens(llm: LLM) -> None:
    """The mean of the hidden states, each of which is the last one of a prefix of the prompt."""
    raw = {pooling: PoolingParams(pooling=pooling, normalize=False) for pooling in ("last", "mean")}
    (whole,) = llm.embed("One two three", raw["mean"])
    token_ids = whole.prompt_token_ids
    each = llm.embed([token_ids[: end + 1] for end in range(len(token_ids))], raw["last"])
    columns = zip(*(output.outputs.embedding for output in each), strict=True)
    expected = [math.fsum(column) / len(token_ids) for column in columns]
    assert whole.outputs.embedding == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_dimensions_keep_the_first_numbers(llm: LLM) -> None:
    (whole,) = llm.embed("cat")
    (short,) = llm.embed("cat", PoolingParams(dimensions=5))
    first = whole.outputs.embedding[:5]
    assert short.outputs.embedding == pytest.approx([number / length(first) for number in first], rel=1e-6)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (PoolingParams(pooling="max"), "pooling"),
        (PoolingParams(dimensions=0), "dimensions"),
        (PoolingParams(dimensions=2**20), "dimensions"),
        (PoolingParams(dimensions=True), "dimensions"),
        (PoolingParams(normalize=1), "normalize"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_wrong_parameters_are_named(llm: LLM, params: PoolingParams, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        llm.embed("a", params)
    assert caught.value.param == param


def test_wrong_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="the prompt has"):
        llm.embed([[5] * (llm.info.max_model_len + 1)])
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.embed([[]])
    with pytest.raises(ArgumentError, match=r"LLM\.embed"):
        llm.embed("a", temperature=1)
    # As long as the context: nothing is generated.
    (longest,) = llm.embed([[5] * llm.info.max_model_len])
    assert len(longest.outputs.embedding) == llm.info.embedding_size


def test_an_async_engine_embeds_beside_other_requests() -> None:
    async def run() -> list[list[float]]:
        engine = await AsyncEngine.start(num_threads=1)
        try:
            options = RequestOptions(cache_salt="mine")
            outputs = await asyncio.gather(*(engine.embed(text, options=options) for text in TEXTS))
            async for _ in engine.generate(TEXTS[1], SamplingParams(max_tokens=2)):
                pass
            with pytest.raises(InvalidRequestError, match="dimensions"):
                await engine.embed("a", PoolingParams(dimensions=-1))
        finally:
            await engine.close()
        return [output.outputs.embedding for output in outputs]

    vectors = asyncio.run(run())
    assert vectors[0] == vectors[2] and all(math.isclose(length(vector), 1, abs_tol=1e-6) for vector in vectors)
