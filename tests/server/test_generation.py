"""One request under way: what is left of it when it is left."""

from __future__ import annotations

import asyncio

import pytest

from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta
from tests.fake_engine import FakeClient, fake_engine, spell


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
