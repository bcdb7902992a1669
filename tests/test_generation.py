"""One request under way: what is left of it when it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from pagewick.delta_queue import MAX_JOINED_LOGPROBS, MAX_WAITING_DELTAS
from pagewick.engine.messages import EngineRequest, RequestDelta, RequestOptions, TokenLogprobs
from pagewick.errors import DeadlineExceededError, EngineError, InvalidRequestError
from pagewick.generation import Generation, Listener, interleave, run_all
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


class Scripted(FakeClient):
    """A client whose news come when a test calls `say`, as many deltas at once as it gives."""

    def open(
        self, request: EngineRequest, take: Callable[[list[RequestDelta] | Exception], None]
    ) -> Callable[[], None]:
        self.say = take
        return lambda: self.aborted.append(request.request_id)


def delta(text: str, index: int = 0, **fields: Any) -> RequestDelta:
    return RequestDelta(request_id="mine", choice_index=index, token_ids=spell(text), **fields)


class SmallReader:
    """A Reader that is full after every `size` deltas, until it is emptied."""

    def __init__(self, size: int) -> None:
        self.deltas: list[ChoiceDelta] = []
        self._size = size
        self._room = size
        self._emptied = asyncio.Event()

    def take(self, delta: ChoiceDelta) -> bool:
        self.deltas.append(delta)
        self._room -= 1
        return self._room > 0

    async def until_ready(self) -> None:
        await self._emptied.wait()
        self._emptied.clear()

    def empty(self) -> None:
        self._room = self._size
        self._emptied.set()


def test_deltas_that_come_at_once_are_one_for_each_choice() -> None:
    async def main() -> None:
        client, heard = Scripted(), list[ChoiceDelta]()
        params = SamplingParams(n=2, max_tokens=9)
        async with fake_engine(client).request(spell("a"), params, on_delta=heard.append) as generation:
            client.say([delta("x"), delta("q", 1), delta("y"), delta("z", finish_reason="length"), delta("r", 1)])
            client.say([delta("s", 1, finish_reason="length")])
            read = [one async for one in generation]
        assert read == heard
        assert [(one.index, one.text, one.finish_reason) for one in read] == [
            (0, "xyz", "length"), (1, "qr", None), (1, "s", "length")
        ]  # fmt: skip
        assert [one.text for one in generation.output.outputs] == ["xyz", "qrs"]

    asyncio.run(main())


def test_deltas_with_logprobs_stay_apart() -> None:
    async def main() -> None:
        client = Scripted()
        async with fake_engine(client).request(spell("a"), SamplingParams(logprobs=1)) as generation:
            news = [delta(letter, logprobs=[TokenLogprobs(spell(letter)[0], -0.5, 1, [])]) for letter in "abc"]
            news[-1].finish_reason = "length"
            client.say(news)
            assert [one.text async for one in generation] == ["a", "b", "c"]

    asyncio.run(main())


def test_an_error_comes_after_the_text_before_it() -> None:
    async def main() -> None:
        client = Scripted()
        generation = fake_engine(client).request(spell("a"), SamplingParams(n=2), request_id="mine")
        async with generation:
            failure = {"finish_reason": "error", "error": "no number", "error_kind": "EngineError"}
            client.say([delta("x"), delta("", 1, **failure), delta("y")])
            assert (await anext(generation)).text == "x"
            with pytest.raises(EngineError, match="no number"):
                await anext(generation)
            assert client.aborted == ["mine"]

    asyncio.run(main())


def test_a_reader_is_given_deltas_without_a_turn_of_the_event_loop() -> None:
    async def main() -> None:
        client, taken = Scripted(), list[str]()
        async with fake_engine(client).request(spell("a"), SamplingParams()) as generation:
            passing = asyncio.create_task(generation.pass_to(Listener(lambda one: taken.append(one.text))))
            client.say([delta("a")])
            while not taken:
                await asyncio.sleep(0)
            for letter in "bcd":
                client.say([delta(letter)])
            assert taken == [*"abcd"]
            client.say([delta("e", finish_reason="length")])
            await passing
            assert taken == [*"abcde"]

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_deltas_wait_for_a_reader_that_is_full(size: int) -> None:
    async def main() -> None:
        client, reader = Scripted(), SmallReader(size)
        async with fake_engine(client).request(spell("a"), SamplingParams()) as generation:
            passing = asyncio.create_task(generation.pass_to(reader))
            for letter in TEXT[:50]:
                client.say([delta(letter)])
                await asyncio.sleep(0)
            # One more than it has room for: it is asked only after it has taken one.
            assert len(reader.deltas) <= size + 1
            client.say([delta("!", finish_reason="length")])
            while not passing.done():
                reader.empty()
                await asyncio.sleep(0)
            await passing
        assert "".join(one.text for one in reader.deltas) == TEXT[:50] + "!"
        assert len(reader.deltas) < 40

    asyncio.run(main())


def test_a_reader_that_fails_ends_the_request() -> None:
    def take(one: ChoiceDelta) -> None:
        if one.text == "b":
            raise OSError("the pipe is broken")

    async def main() -> None:
        client = Scripted()
        async with fake_engine(client).request(spell("a"), SamplingParams(), request_id="mine") as generation:
            passing = asyncio.create_task(generation.pass_to(Listener(take)))
            for letter in "abc":
                client.say([delta(letter)])
                await asyncio.sleep(0)
            with pytest.raises(OSError, match="pipe"):
                await passing
        assert "mine" in client.aborted
        assert generation.output.outputs[0].finish_reason == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("logprobs", [1, None])
@pytest.mark.parametrize(("interval", "lengths"), [(1, [1] * 11), (4, [1, 4, 4, 2]), (10, [1, 10]), (40, [1, 10])])
def test_an_interval_joins_the_tokens_between_the_first_and_the_last(
    interval: int, lengths: list[int], logprobs: int | None
) -> None:
    heard: list[ChoiceDelta] = []

    async def main() -> list[ChoiceDelta]:
        client = FakeClient()
        client.texts = [TEXT[:10]]
        engine = fake_engine(client)
        plan = await engine.prepare(SamplingParams(logprobs=logprobs))
        async with engine.generation(spell("a"), plan, on_delta=heard.append, stream_interval=interval) as generation:
            return [delta async for delta in generation]

    read = asyncio.run(main())
    assert [len(delta.token_ids) for delta in read] == [len(delta.token_ids) for delta in heard] == lengths
    assert "".join(delta.text for delta in read) == TEXT[:10]
    assert read[-1].finish_reason == "stop"
    if logprobs is not None:
        assert sum(len(delta.logprobs or []) for delta in read) == 10


def test_tokens_that_wait_come_before_an_error() -> None:
    read: list[ChoiceDelta] = []

    async def main() -> None:
        client = FakeClient()
        client.texts, client.pause_at, client.failure = [TEXT], 6, NAN_ROW
        engine = fake_engine(client)
        plan = await engine.prepare(SamplingParams())
        async with engine.generation(spell("a"), plan, stream_interval=4) as generation:
            with pytest.raises(EngineError, match="no number"):
                async for delta in generation:
                    read.append(delta)

    asyncio.run(main())
    assert [delta.text for delta in read] == [TEXT[0], TEXT[1:5], TEXT[5]]


def test_tokens_that_wait_come_with_the_abort_when_a_client_leaves() -> None:
    heard: list[ChoiceDelta] = []

    async def main() -> None:
        client = FakeClient()
        client.texts, client.pause_at = [TEXT], 3
        engine = fake_engine(client)
        plan = await engine.prepare(SamplingParams())
        async with engine.generation(spell("a"), plan, on_delta=heard.append, stream_interval=8) as generation:
            await anext(generation)
            while not client.num_paused:
                await asyncio.sleep(0)

    asyncio.run(main())
    assert [(delta.text, delta.finish_reason) for delta in heard] == [(TEXT[0], None), (TEXT[1:3], "abort")]


def test_after_an_error_there_is_nothing_more() -> None:
    async def main() -> None:
        client = Scripted()
        async with fake_engine(client).request(spell("a"), SamplingParams()) as generation:
            client.say(EngineError("it is gone"))
            with pytest.raises(EngineError, match="it is gone"):
                await anext(generation)
            assert [one async for one in generation] == []

    asyncio.run(asyncio.wait_for(main(), 10))


class OneAtATime(Scripted):
    """A Scripted client that refuses an id which is in use, as an EngineClient does."""

    def open(
        self, request: EngineRequest, take: Callable[[list[RequestDelta] | Exception], None]
    ) -> Callable[[], None]:
        if request.request_id in self.running:
            raise InvalidRequestError("in use", param="request_id")
        self.running.add(request.request_id)
        return super().open(request, take)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        self.aborted += request_ids


def test_a_refused_request_leaves_the_running_one_of_its_id_in_the_list() -> None:
    async def main() -> None:
        client = OneAtATime()
        engine = fake_engine(client)
        first, second = (engine.request(spell("a"), SamplingParams(), request_id="mine") for _ in range(2))
        async with first:
            with pytest.raises(InvalidRequestError, match="in use"):
                async with second:
                    await anext(second)
            await engine.abort("mine")
            assert client.aborted == ["mine"]
        client.aborted.clear()
        await engine.abort("mine")
        assert client.aborted == []

    asyncio.run(main())


class Counting(FakeClient):
    """Counts the requests that have not left it, and remembers their timeouts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open = self.most = 0
        self.timeouts: list[float] = []

    def open(self, request: EngineRequest, take: Any) -> Callable[[], None]:
        leave = super().open(request, take)
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        self.timeouts.append(request.options.timeout_s or 0.0)

        def count_and_leave() -> None:
            self.num_open -= 1
            leave()

        return count_and_leave


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (3, 3), (None, 8), (20, 8)])
def test_only_some_of_many_requests_are_in_the_engine_at_once(at_once: int | None, most: int) -> None:
    async def main() -> None:
        client = Counting()
        engine = fake_engine(client)
        generations = [engine.request(spell("abc"), SamplingParams()) for _ in range(8)]
        places = [place async for place, delta in interleave(generations, at_once) if delta.finish_reason is not None]
        assert sorted(places) == list(range(8)) and client.most == most
        assert all(generation.output.finished for generation in generations)

    asyncio.run(main())


def test_the_timeouts_of_requests_that_are_not_in_the_engine_yet_run_on() -> None:
    async def main() -> None:
        client = Counting()
        engine = fake_engine(client)

        def request(timeout_s: float) -> Generation:
            return engine.request(spell("abc"), SamplingParams(), options=RequestOptions(timeout_s=timeout_s))

        await run_all([request(60.0) for _ in range(3)], at_once=1)
        assert 60 >= client.timeouts[0] > client.timeouts[1] > client.timeouts[2] > 50
        with pytest.raises(DeadlineExceededError, match="not finished within its timeout of 1e-06 s"):
            await run_all([request(60.0), request(1e-6)], at_once=1)
        assert len(client.timeouts) == 4 and not client.num_open

    asyncio.run(main())
