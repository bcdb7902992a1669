"""Deltas that wait keep their order, and those that are held back for others are not the first ones."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from pagewick.delta_queue import MAX_WAITING_DELTAS, DeltaQueue, Growing
from pagewick.text.output_stream import ChoiceDelta


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_of_each_choice_stay_in_order_however_fast_they_are_read(seed: int) -> None:
    async def main() -> list[list[int]]:
        random, queue = Random(seed), DeltaQueue()
        read: list[list[int]] = [[], [], []]

        async def get() -> None:
            item = await queue.get()
            assert isinstance(item, ChoiceDelta)
            read[item.index] += item.token_ids

        for token_id in range(300):
            queue.put(ChoiceDelta(random.randrange(3), token_ids=[token_id]))
            if random.random() < 0.2:
                for _ in range(random.randrange(len(queue) + 1)):
                    await get()
            assert len(queue) <= MAX_WAITING_DELTAS + 3
        while queue:
            await get()
        return read

    read = asyncio.run(main())
    assert all(token_ids == sorted(token_ids) for token_ids in read)
    assert sorted(token_id for token_ids in read for token_id in token_ids) == [*range(300)]


def test_news_without_tokens_is_not_the_first_delta_that_does_not_wait() -> None:
    """The log-probabilities of a prompt come in such deltas, one for each of its chunks."""
    growing = Growing(4)
    assert growing.take([ChoiceDelta(0)]) == growing.take([ChoiceDelta(0)]) == [ChoiceDelta(0)]
    assert growing.take([ChoiceDelta(0, token_ids=[1])]) == [ChoiceDelta(0, token_ids=[1])]
    assert growing.take([ChoiceDelta(0, token_ids=[2]), ChoiceDelta(0)]) == []
    assert growing.take([ChoiceDelta(0, finish_reason="stop")]) == [ChoiceDelta(0, token_ids=[2], finish_reason="stop")]
