"""ScriptedEngine: pagewick.engine.engine.Engine without a model; a test's function says which tokens it generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta, TokenLogprobs
from pagewick.engine.model_info import ModelInfo

Script = Callable[[EngineRequest], list[int]]


class ScriptedEngine:
    """An engine whose `script` returns a request's output token ids; each choice gets `tokens_per_step` in each step.

    requests: all that were ever added. aborted: the ids that were aborted while running; aborted_choices: the (id,
    choice index) of single choices that were aborted. failing: by request id, the fields of the delta that ends it.
    session_ends: the time, by time.monotonic, at which its only session ends, if it has one.
    logprobs: choice i's tokens have logprobs[i % len(logprobs)], if asked for. on_step is called in the middle of every
    step. A choice whose output ends with `eos_token_id` finishes with "stop", any other with "length".
    """

    def __init__(
        self, config: EngineConfig, *, script: Script, vocab_size: int, eos_token_id: int, max_model_len: int = 512
    ) -> None:
        self.config = config
        self.info = ModelInfo(
            model_path=config.model,
            architecture="Fake",
            dtype="float32",
            device="cpu",
            kernels="none",
            vocab_size=vocab_size,
            embedding_size=4,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=16,
            num_kv_blocks=1000,
            kv_cache_bytes=0,
            num_parameters=0,
            tensor_parallel_size=1,
        )
        self.script = script
        self.tokens_per_step = 1
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_idle_checks = 0
        self.aborted_choices: list[tuple[str, int]] = []
        self.failing: dict[str, dict[str, Any]] = {}
        self.logprobs: Sequence[float] = [-0.5]
        self.on_step: Callable[[], None] = lambda: None
        self.session_ends: float | None = None
        self.is_closed = False
        self._eos_token_id = eos_token_id
        self._left: dict[str, dict[int, list[int]]] = {}
        self._known: dict[str, EngineRequest] = {}
        self._fresh: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: EngineRequest) -> None:
        check_request(request, self.info)
        assert request.request_id not in self._left
        self.requests.append(request)
        self._fresh.add(request.request_id)
        self._known[request.request_id] = request
        token_ids = self.script(request)[: request.params.max_tokens]
        self._left[request.request_id] = dict.fromkeys(range(request.params.n), token_ids)

    def abort(self, request_ids: Iterable[str], choices: Iterable[tuple[str, int]] = ()) -> None:
        for request_id in request_ids:
            if self._left.pop(request_id, None) is not None:
                self.aborted.append(request_id)
        for request_id, index in choices:
            if self._left.get(request_id, {}).pop(index, None) is not None:
                self.aborted_choices.append((request_id, index))
                self._forget_if_done(request_id)

    def step(self) -> list[RequestDelta]:
        assert self._left, "a step without work"
        deltas = [self._advance(request_id, index) for request_id, left in self._left.items() for index in left]
        self.on_step()
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._left[delta.request_id][delta.choice_index]
                self._forget_if_done(delta.request_id)
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(num_requests_running=len(self._left), num_sessions=int(self.session_ends is not None))

    def check_when_idle(self) -> float | None:
        assert not self.has_work
        self.num_idle_checks += 1
        if self.session_ends is not None and self.session_ends <= time.monotonic():
            self.session_ends = None
        return None if self.session_ends is None else self.session_ends - time.monotonic()

    def close(self) -> None:
        self.is_closed = True

    def _forget_if_done(self, request_id: str) -> None:
        if not self._left[request_id]:
            del self._left[request_id]

    def _advance(self, request_id: str, index: int) -> RequestDelta:
        delta = RequestDelta(request_id=request_id, choice_index=index)
        if request_id in self.failing:
            return structs.replace(delta, finish_reason="error", **self.failing[request_id])
        left, request = self._left[request_id], self._known[request_id]
        delta.token_ids, left[index] = left[index][: self.tokens_per_step], left[index][self.tokens_per_step :]
        if request.params.logprobs is not None:
            logprob = self.logprobs[index % len(self.logprobs)]
            delta.logprobs = [TokenLogprobs(token_id, logprob, 1, []) for token_id in delta.token_ids]
        if request_id in self._fresh:
            self._fresh.remove(request_id)
            delta.num_cached_tokens = 3
            if request.params.prompt_logprobs is not None:
                later = request.prompt_token_ids[1:]
                delta.prompt_logprobs = [TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5)]) for token_id in later]
        if not left[index]:
            is_end = delta.token_ids[-1:] == [self._eos_token_id]
            delta.finish_reason = "stop" if is_end else "length"
            delta.stop_token_id = self._eos_token_id if is_end else None
        return delta
