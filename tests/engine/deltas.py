"""The deltas of a request as an async iterator, for tests of engine clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.generation import Client


async def deltas_of(client: Client, request: EngineRequest) -> AsyncGenerator[RequestDelta]:
    """Yield the deltas that `open` gives. Closing the iterator ends the request."""
    queue: asyncio.Queue[list[RequestDelta] | Exception] = asyncio.Queue()
    num_unfinished = request.params.n
    leave = client.open(request, queue.put_nowait)
    try:
        while num_unfinished:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            for delta in news:
                num_unfinished -= delta.finish_reason is not None
                yield delta
    finally:
        leave()
