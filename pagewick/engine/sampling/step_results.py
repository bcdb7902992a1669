"""StepResults: the sampled tokens of a step, some of which may still be in transit from the device."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pagewick.engine.batch import NOT_NUMBERS, SlotResult, StreamResults
from pagewick.engine.device_copies import download
from pagewick.engine.sampling.sampler import TokenScores
from pagewick.engine.streams import DeviceStream, Event
from pagewick.errors import InvalidRequestError

_NONE_ALLOWED = (
    "no token was allowed next: allowed_token_ids, bad_words, min_tokens and the constraint together leave none; "
    "loosen one of them"
)


@dataclass(frozen=True, slots=True)
class Unread:
    """Drawn tokens that the host has not read: first those of the streams, then one for each result. Tensors are [N].

    scores: of the rows that want log-probabilities; each entry has some of them. histories: by row, the earlier tokens
    of the sequences that keep them, to which `read` adds the drawn ones.
    """

    streams: StreamResults
    results: list[SlotResult]
    token_ids: Tensor
    is_valid: Tensor
    is_poisoned: Tensor
    scores: Sequence[tuple[list[int], TokenScores]]
    histories: Mapping[int, array[int]]

    def on_host(self) -> Unread:
        """Return copies in host memory, which the device fills when the tensors are computed; on a CPU no copies."""
        tensors = [self.token_ids, self.is_valid, self.is_poisoned]
        copies = iter(download([*tensors, *(tensor for _, scores in self.scores for tensor in scores.tensors())]))
        token_ids, is_valid, is_poisoned = (next(copies) for _ in tensors)
        scores = [(rows, TokenScores(*(next(copies) for _ in of.tensors()))) for rows, of in self.scores]
        return Unread(self.streams, self.results, token_ids, is_valid, is_poisoned, scores, self.histories)

    def read(self) -> None:
        """Store the tokens, errors and scores in the results."""
        token_ids, is_valid, is_poisoned = self.token_ids.tolist(), self.is_valid.tolist(), self.is_poisoned.tolist()
        num_streams = len(token_ids) - len(self.results)
        scores = {row: one for rows, of in self.scores for row, one in zip(rows, of.to_list(), strict=True)}
        self.streams.token_ids = token_ids[:num_streams]
        rare = [row for row in range(num_streams) if row in scores or not is_valid[row]]
        self.streams.details = {row: SlotResult() for row in rare}
        for row, result in [*self.streams.details.items(), *enumerate(self.results, start=num_streams)]:
            if not is_valid[row]:
                fail(result, is_poisoned=is_poisoned[row])
                continue
            result.token_ids.append(token_ids[row])
            if row in scores:
                result.logprobs = [scores[row]]
        for row, history in self.histories.items():
            if is_valid[row]:
                history.append(token_ids[row])


class StepResults:
    """The results of a step's works, in their order, and those of its streams.

    stream: the device's, if it has one.
    """

    def __init__(self, results: list[SlotResult], stream: DeviceStream | None = None) -> None:
        self.results = results
        self.streams = StreamResults()
        self._stream = stream
        self._unread: list[tuple[Unread, Event | None]] = []

    @property
    def is_read(self) -> bool:
        """Whether all results have arrived from the device."""
        return not self._unread

    def leave(self, unread: Unread) -> None:
        """Begin to copy tensors from the device, after all work that is queued there; `get` waits for the copies."""
        copies = unread.on_host()
        # Without an event, reading would also wait for the next step if it has been submitted by then.
        self._unread.append((copies, self._stream.record_event() if self._stream else None))

    def get(self) -> list[SlotResult]:
        """Wait for results in transit, and return those of the works."""
        for copies, event in self._unread:
            if event is not None:
                event.synchronize()
            copies.read()
        self._unread.clear()
        return self.results


def fail(result: SlotResult, *, is_poisoned: bool) -> None:
    """Store an error in a result. is_poisoned: logits were not numbers; else the request allowed no token."""
    result.is_poisoned = is_poisoned
    if is_poisoned:
        result.error = NOT_NUMBERS
    else:
        result.error, result.error_kind = _NONE_ALLOWED, InvalidRequestError.__name__
