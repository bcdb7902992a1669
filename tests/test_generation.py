"""One request under way: what is left of it when it is left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pagewick.generation import MAX_JOINED_LOGPROBS, MAX_WAITING_DELTAS, interleave
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta
from tests.fake_engine import END, NAN_ROW, FakeClient, fake_engine, spell

TEXT = "".join(chr(ord("a") + number % 26) for number in range(200))


def test_a_request_is_forgotten_even_if_who_listens_fails() -> None:
    def listen(delta: ChoiceDelta) -> None:
        if delta.finish_reason is not None:
            raise OSError("the log is full")

    async def main() -> None:
        engine = fake_engine(FakeClient())
        for _ in range(2):
            with pytest.raises(OSError):
                async with engine.request(spell("a"), SamplingParams(), request_id="mine", on_delta=listen):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize("logprobs", [1, None])
@pytest.mark.parametrize("n", [1, 3])
def test_a_slow_reader_gets_all_of_it_in_few_deltas(n: int, logprobs: int | None) -> None:
    heard: list[ChoiceDelta] = []

    async def main() -> list[ChoiceDelta]:
        client = FakeClient()
        client.texts = [TEXT, TEXT[7:], TEXT[100:]]
        engine = fake_engine(client)
        params = SamplingParams(n=n, logprobs=logprobs)
        async with engine.request(spell("a"), params, on_delta=heard.append) as generation:
            while not generation.output.finished:
                await asyncio.sleep(0)
            return [delta async for delta in generation]

    read = asyncio.run(main())
    num_full = 0 if logprobs is None else len(heard) // MAX_JOINED_LOGPROBS
    assert len(heard) > MAX_WAITING_DELTAS + n + num_full >= len(read)
    assert all(len(delta.logprobs or []) <= MAX_JOINED_LOGPROBS for delta in read)
    for index in range(n):
        own = [delta for delta in read if delta.index == index]
        text = TEXT[[0, 7, 100][index] :]
        assert "".join(delta.text for delta in own) == text
        assert [one for delta in own for one in delta.token_ids] == [*spell(text), END]
        named = "".join(one.chosen.token for delta in own for one in delta.logprobs or [])
        assert named == ("" if logprobs is None else text)
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["stop"]
    # Deltas that others have received stay unchanged.
    assert all(len(delta.token_ids) == 1 for delta in heard)


def test_who_reads_along_gets_every_delta_by_itself() -> None:
    async def main() -> list[ChoiceDelta]:
        client = FakeClient()
        client.texts = [TEXT]
        async with fake_engine(client).request(spell("a"), SamplingParams()) as generation:
            return [delta async for delta in generation]

    assert [delta.text for delta in asyncio.run(main())] == [*TEXT, ""]


def test_a_slow_reader_of_several_requests_gets_all_of_them_and_then_the_error() -> None:
    async def main() -> None:
        client = FakeClient()
        client.texts = [TEXT]
        client.pause_at, client.failure = 150, NAN_ROW
        engine = fake_engine(client)
        texts, num_deltas = ["", ""], 0
        with pytest.raises(type(NAN_ROW)):
            async with aclosing(interleave([engine.request(spell(x), SamplingParams()) for x in "ab"])) as deltas:
                async for position, delta in deltas:
                    if not num_deltas:
                        while len(client.finished) + len(client.aborted) < 2:
                            await asyncio.sleep(0)
                    texts[position] += delta.text
                    num_deltas += 1
        assert texts[0] == TEXT[:150] or texts[1] == TEXT[:150]
        assert num_deltas < 300 - 100

    asyncio.run(main())
