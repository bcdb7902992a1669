"""ScriptedEngine: pagewick.engine.engine.Engine without a model. It answers with what a script says, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.messages import EngineRequest, EngineStats, ModelInfo, RequestDelta, TokenLogprobs

Script = Callable[[EngineRequest], list[int]]


class ScriptedEngine:
    """`script` gives a request's output token ids, of which `tokens_per_step` come at every step.

    requests: all that were ever added. aborted: all ids that were aborted while running. on_step is called in the
    middle of every step. A request whose output ends with `eos_token_id` finishes with "stop", otherwise "length".
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
        self.failing: dict[str, str] = {}
        self.on_step: Callable[[], None] = lambda: None
        self.is_closed = False
        self._eos_token_id = eos_token_id
        self._left: dict[str, list[int]] = {}
        self._fresh: dict[str, EngineRequest] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: EngineRequest) -> None:
        check_request(request, self.info)
        assert request.request_id not in self._left
        self.requests.append(request)
        self._fresh[request.request_id] = request
        self._left[request.request_id] = self.script(request)[: request.params.max_tokens]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._left.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def step(self) -> list[RequestDelta]:
        assert self._left, "a step without work"
        deltas = [self._advance(request_id) for request_id in list(self._left)]
        self.on_step()
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._left[delta.request_id]
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(num_requests_running=len(self._left))

    def close(self) -> None:
        self.is_closed = True

    def _advance(self, request_id: str) -> RequestDelta:
        if request_id in self.failing:
            return RequestDelta(request_id=request_id, finish_reason="error", error=self.failing[request_id])
        left = self._left[request_id]
        token_ids, self._left[request_id] = left[: self.tokens_per_step], left[self.tokens_per_step :]
        delta = RequestDelta(request_id=request_id, token_ids=token_ids)
        request = self._fresh.pop(request_id, None)
        if request is not None:
            delta.num_cached_tokens = 3
            if request.params.prompt_logprobs is not None:
                later = request.prompt_token_ids[1:]
                delta.prompt_logprobs = [TokenLogprobs(token_id, -0.5, 1, [(token_id, -0.5)]) for token_id in later]
        if not self._left[request_id]:
            is_end = token_ids[-1:] == [self._eos_token_id]
            delta.finish_reason = "stop" if is_end else "length"
            delta.stop_token_id = self._eos_token_id if is_end else None
        return delta
