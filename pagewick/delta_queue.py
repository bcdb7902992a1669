"""DeltaQueue: the deltas of a request that wait for their reader, joined where many wait. Imports no torch."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable

import msgspec

from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs

# A reader that keeps up gets every delta by itself. Once this number of deltas wait, those of a choice are joined.
MAX_WAITING_DELTAS = 16
# A joined delta has no more positions with log-probabilities than this, so that none becomes a huge event.
MAX_JOINED_LOGPROBS = 16

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[PositionLogprobs])


def joined(changes: Iterable[ChoiceDelta]) -> list[ChoiceDelta]:
    """Join the deltas of each choice; one with log-probabilities stays alone, because an event with many is large."""
    latest: dict[int, ChoiceDelta] = {}
    result = []
    for change in changes:
        known = latest.get(change.index)
        if known is None or change.logprobs is not None:
            latest[change.index] = change
            result.append(change)
        else:
            known.add(change)
    return result


class Growing:
    """Joins the deltas of each choice until they have `interval` tokens. The first and the last do not wait.

    The first is the first with tokens: a prompt's log-probabilities come in deltas without any, before it.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, ChoiceDelta] = {}

    def take(self, changes: Iterable[ChoiceDelta]) -> list[ChoiceDelta]:
        """Return the deltas that need not wait any longer."""
        ready = []
        for change in changes:
            held = self._held.get(change.index)
            if held is None:
                ready.append(change)
                if change.token_ids:
                    self._held[change.index] = ChoiceDelta(change.index)
                continue
            held.add(change)
            if self._is_ready(held):
                ready.append(held)
                self._held[change.index] = ChoiceDelta(change.index)
        return ready

    def rest(self) -> list[ChoiceDelta]:
        """Return everything that waits, because nothing more will come."""
        held, self._held = self._held, {}
        return [one for one in held.values() if one.token_ids]

    def _is_ready(self, held: ChoiceDelta) -> bool:
        num_tokens = len(held.token_ids)
        is_large = num_tokens >= self._interval or len(held.logprobs or ()) >= MAX_JOINED_LOGPROBS
        return is_large or held.finish_reason is not None


class DeltaQueue:
    """A queue of deltas for one reader."""

    def __init__(self) -> None:
        self._items: deque[ChoiceDelta | _Joined | Exception] = deque()
        self._joined: dict[int, _Joined] = {}  # by choice: the waiting delta to which later ones are added
        self._is_filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ChoiceDelta | Exception) -> None:
        if isinstance(item, ChoiceDelta) and len(self) >= MAX_WAITING_DELTAS:
            last = self._joined.get(item.index)
            if last is None or last.is_full:
                last = self._joined[item.index] = _Joined(item)
                self._items.append(last)
            last.add(item)
        else:
            self._items.append(item)
            if isinstance(item, ChoiceDelta):
                # Later deltas come after this one, so none is added to a delta that waits before it.
                self._joined.pop(item.index, None)
        self._is_filled.set()

    async def get(self) -> ChoiceDelta | Exception:
        while not self._items:
            self._is_filled.clear()
            await self._is_filled.wait()
        item = self._items.popleft()
        if not isinstance(item, _Joined):
            return item
        whole = item.whole()
        if self._joined.get(whole.index) is item:
            del self._joined[whole.index]
        return whole


class _Joined:
    """Several deltas of a choice, as one.

    It is full when it has enough log-probabilities; these are then packed, because as objects they take a multiple of
    the memory that they will take as text.
    """

    def __init__(self, first: ChoiceDelta) -> None:
        # A new one, because on_delta may have kept the deltas.
        self._delta = ChoiceDelta(first.index, logprobs=None if first.logprobs is None else [])
        self._packed = b""

    @property
    def is_full(self) -> bool:
        return bool(self._packed)

    def add(self, delta: ChoiceDelta) -> None:
        self._delta.add(delta)
        if len(self._delta.logprobs or ()) >= MAX_JOINED_LOGPROBS:
            self._packed = zlib.compress(_encoder.encode(self._delta.logprobs), 1)
            self._delta.logprobs = []

    def whole(self) -> ChoiceDelta:
        """Return the joined delta."""
        if self._packed:
            self._delta.logprobs = _decoder.decode(zlib.decompress(self._packed))
        return self._delta
