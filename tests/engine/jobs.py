"""Made-up requests and what each is to give when it runs alone; written from the documentation, not from the scheduler.

A token is a pure function of the tokens before it, of the seed and of the choice's number. So are the log-probabilities
that a beam search sees. Digests name prefixes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from pagewick.engine.messages import EngineRequest, RequestDelta, TokenLogprobs
from pagewick.errors import InvalidRequestError

VOCAB_SIZE = 40
EOS_TOKEN_IDS = (3, 7)


def chain(request: EngineRequest, token_ids: Iterable[int]) -> list[int]:
    """Digest of each prefix, the empty one first. Salts are part of it: their blocks must never be shared."""
    return continued(request, [zlib.crc32((request.options.cache_salt or "").encode())], token_ids)


def continued(request: EngineRequest, digests: list[int], token_ids: Iterable[int]) -> list[int]:
    """The digests of a prefix and of those with one token more each; extra keys are part of them where they begin."""
    digests = list(digests)
    for token_id in token_ids:
        digest = digests[-1]
        for key in sorted({key for start, _, key in request.extra_keys if start == len(digests) - 1}):
            digest = hash((digest, -1, zlib.crc32(key)))
        digests.append(hash((digest, token_id)))
    return digests


def made_up_logprobs(digest: int, token_id: int) -> TokenLogprobs:
    """Make up the log-probability of a token from the digest of the prefix that ends with it."""
    return TokenLogprobs(token_id, -(digest % 1000) / 100, 1, [])


@lru_cache(maxsize=20_000)
def ranking(digest: int) -> list[tuple[int, float]]:
    """Every token with its log-probability after a prefix, for beams; the best first, no two alike."""
    pairs = [(token_id, -(hash((digest, token_id, 1)) % 2**30) / 2**28) for token_id in range(VOCAB_SIZE)]
    return sorted(pairs, key=lambda pair: -pair[1])


def made_up_mu(digest: int) -> float:
    """Where mirostat has got to after a prefix."""
    return digest % 1000 / 100


class MadeUpConstraint:
    """Forbids one token in five, depending on how many there are; raises and is complete where `spec` says so."""

    def __init__(self, spec: object) -> None:
        assert isinstance(spec, dict)
        self._spec = spec
        self._accepted: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self._accepted) == self._spec.get("completes")

    def allowed_mask(self) -> bytes:
        if len(self._accepted) == self._spec.get("fails_in_mask"):
            raise self._failure
        return constraint_mask(len(self._accepted))

    def accept(self, token_id: int) -> None:
        assert is_allowed(token_id, len(self._accepted))
        self._accepted.append(token_id)
        if len(self._accepted) == self._spec.get("fails_in_accept"):
            raise self._failure

    @property
    def _failure(self) -> Exception:
        return InvalidRequestError("too complex") if self._spec.get("is_refused") else ValueError("made up")


def is_allowed(token_id: int, num_output_tokens: int) -> bool:
    return (token_id + num_output_tokens) % 5 != 0


def constraint_mask(num_output_tokens: int) -> bytes:
    bits = sum(1 << token_id for token_id in range(VOCAB_SIZE) if is_allowed(token_id, num_output_tokens))
    return bits.to_bytes(VOCAB_SIZE // 8, "little")


@dataclass
class Choice:
    """One of the streams; all that there will be of it. num_sampled: what the runner has given so far."""

    token_ids: list[int]
    digests: list[int]
    finish_reason: str = ""
    cumulative_logprob: float | None = None
    num_sampled: int = 0


@dataclass
class Job:
    """fails: (choice, number of output tokens) where the model computes no numbers; for beams, all choices."""

    request: EngineRequest
    max_model_len: int
    fails: tuple[int, int] | None = None
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.prompt = request.prompt_token_ids
        self.prompt_digests = chain(request, self.prompt)
        params = request.params
        self.ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS_TOKEN_IDS)}
        room = self.max_model_len - len(self.prompt)
        self.max_output_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self.is_beam_search = params.use_beam_search
        self.choices = self._beams() if self.is_beam_search else [self._stream(index) for index in range(params.n)]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def output_token_ids(self) -> list[int]:
        """All output tokens of the first choice."""
        return self.output(0)

    def output(self, choice_index: int) -> list[int]:
        return self.choices[choice_index].token_ids[self.num_prompt_tokens :]

    @property
    def num_steps(self) -> int:
        """Steps in which it is done at the latest if each gives it one token, whatever is computed twice."""
        lengths = [len(choice.token_ids) for choice in self.choices]
        if not self.is_beam_search:
            return sum(lengths)
        # At worst every beam is computed from the beginning for every token.
        return (self.num_prompt_tokens + self.max_output_tokens) * self.max_output_tokens * len(self.choices)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        digests = self.prompt_digests
        return [made_up_logprobs(digests[place + 1], self.prompt[place]) for place in range(1, len(self.prompt))]

    def next_token(self, digest: int, choice_index: int, num_output_tokens: int) -> int:
        """Return the token that is sampled after a prefix."""
        params, seed = self.request.params, (self.request.seed, choice_index)
        token_id = hash((digest, seed if params.temperature else 0)) % VOCAB_SIZE
        while (num_output_tokens < params.min_tokens and token_id in self.ends) or (
            self.request.constraint is not None and not is_allowed(token_id, num_output_tokens)
        ):
            token_id = (token_id + 1) % VOCAB_SIZE
        return token_id

    def draft_tokens(
        self, choice_index: int, num_tokens: int, number: int, draws: Sequence[float], share: float
    ) -> list[int]:
        """Draft tokens for what comes after `num_tokens` tokens; each is right if its draw is below `share`."""
        digest = self.choices[choice_index].digests[num_tokens]
        found: list[int] = []
        for place in range(number):
            token_id = self.next_token(digest, choice_index, num_tokens - self.num_prompt_tokens + place)
            found.append(token_id if draws[place] < share else (token_id + 1) % VOCAB_SIZE)
            digest = hash((digest, found[-1]))
        return found

    def _stream(self, choice_index: int) -> Choice:
        if self.max_output_tokens == 0:
            return Choice(list(self.prompt), list(self.prompt_digests), "length")
        choice = Choice(list(self.prompt), list(self.prompt_digests))
        constraint = self.request.constraint or {}
        while not choice.finish_reason:
            num_output = len(choice.token_ids) - len(self.prompt)
            fails_all = self.fails == (0, 0)  # the others were to come from what the first one computes
            if fails_all or self.fails == (choice_index, num_output) or constraint.get("fails_in_mask") == num_output:
                choice.finish_reason = "error"
                break
            token_id = self.next_token(choice.digests[-1], choice_index, num_output)
            choice.token_ids.append(token_id)
            choice.digests.append(hash((choice.digests[-1], token_id)))
            if token_id in self.ends or constraint.get("completes") == num_output + 1:
                choice.finish_reason = "stop"
            elif num_output + 1 == self.max_output_tokens:
                choice.finish_reason = "length"
            elif constraint.get("fails_in_accept") == num_output + 1:
                choice.finish_reason = "error"
        return choice

    def _beams(self) -> list[Choice]:
        params = self.request.params
        if self.fails is not None:
            length = self.fails[1]
            if length < self._beams_alone(self.max_output_tokens)[1]:
                return [Choice(list(self.prompt), [], "error") for _ in range(params.n)]
        return self._beams_alone(self.max_output_tokens)[0]

    def _beams_alone(self, length: int) -> tuple[list[Choice], int]:
        """And after how many tokens they were found."""
        lengths = [0]

        def rank(token_ids: list[int]) -> list[tuple[int, float]]:
            lengths.append(len(token_ids) + 1 - self.num_prompt_tokens)
            return ranking(chain(self.request, token_ids)[-1])

        params = self.request.params
        found = plain_beam_search(
            self.prompt, rank, width=params.n, ends=self.ends, length=length, min_tokens=params.min_tokens,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping,
        )  # fmt: skip
        choices = [
            Choice([*self.prompt, *tokens], [], "stop" if tokens[-1] in self.ends else "length", total)
            for _, total, tokens in found
        ]
        return choices, max(lengths)


def plain_beam_search(
    prompt: list[int], rank: Callable[[list[int]], list[tuple[int, float]]], *, width: int, ends: set[int], length: int,
    min_tokens: int, length_penalty: float, early_stopping: bool,
) -> list[tuple[float, float, list[int]]]:  # fmt: skip
    """(score, log-probability, tokens) of the best, after the rules of transformers' generate(num_beams=width).

    rank: every token with its log-probability after a prefix.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, float, list[int]]] = []
    for number in range(1, length + 1):
        following = [
            (total + logprob, [*tokens, token_id])
            for total, tokens in beams
            for token_id, logprob in rank([*prompt, *tokens])
            if number > min_tokens or token_id not in ends
        ]
        following.sort(key=lambda one: -one[0])
        del following[max(2, 1 + len(ends)) * width :]
        for total, tokens in following[:width]:
            if tokens[-1] in ends or number == length:
                finished.append((total / number**length_penalty, total, tokens))
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        beams = [one for one in following if one[1][-1] not in ends][:width]
        if len(finished) == width and (early_stopping or beams[0][0] / number**length_penalty <= finished[-1][0]):
            break
    return finished


@dataclass
class Expected:
    """A request in the engine and what has come of it. unwanted: choices that were aborted.

    added_at: on the simulation's clock. num_deltas, has_prefill_time: what it has been told.
    """

    job: Job
    deadline: float | None
    unwanted: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    added_at: float = 0.0
    num_deltas: int = 0
    has_prefill_time: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids: list[list[int]] = [[] for _ in self.job.choices]

    @property
    def is_over(self) -> bool:
        return self.unwanted | self.finished >= {*range(len(self.job.choices))}

    def take(self, delta: RequestDelta, now: float) -> None:
        """Check news against what the request gives alone."""
        job, index, params = self.job, delta.choice_index, self.job.request.params
        assert index not in self.unwanted | self.finished, "news of a choice that is over"
        choice, got = job.choices[index], self.token_ids[index]
        got += delta.token_ids
        assert got == job.output(index)[: len(got)]
        assert delta.token_ids or delta.prompt_logprobs or delta.finish_reason, "a delta without news"
        if delta.prompt_logprobs is not None:
            assert index == 0 and params.prompt_logprobs is not None
            self.prompt_logprobs += delta.prompt_logprobs
            assert self.prompt_logprobs == job.prompt_logprobs[: len(self.prompt_logprobs)]
        assert (params.logprobs is None) == (delta.logprobs is None) or not delta.token_ids
        assert len(delta.logprobs or delta.token_ids) == len(delta.token_ids)
        assert [one.token_id for one in delta.logprobs or []] == (delta.token_ids if delta.logprobs else [])
        self._check_prefix(delta)
        self._check_times(delta, now)
        assert 0 <= delta.num_accepted_tokens <= delta.num_draft_tokens
        if delta.finish_reason is None:
            assert delta.error is None and delta.stop_token_id is None
            return
        self.finished.add(index)
        if delta.error_kind == "DeadlineExceededError":
            assert self.deadline is not None and self.deadline <= now and delta.error is not None
            return
        assert (delta.finish_reason, got) == (choice.finish_reason, job.output(index))
        ends_by_token = delta.finish_reason == "stop" and got[-1] in job.ends
        assert delta.stop_token_id == (got[-1] if ends_by_token else None)
        assert (delta.error is not None) == (delta.finish_reason == "error")
        assert delta.cumulative_logprob == choice.cumulative_logprob
        if params.prompt_logprobs is not None and index == 0 and delta.finish_reason != "error":
            assert self.prompt_logprobs == job.prompt_logprobs

    def _check_times(self, delta: RequestDelta, now: float) -> None:
        """Told once, and no more than has gone by."""
        assert min(delta.queue_s, delta.prefill_s) >= 0
        assert delta.queue_s + delta.prefill_s <= now - self.added_at
        assert delta.queue_s == 0 or self.num_deltas == 0
        assert delta.decode_s == 0 or (delta.token_ids and 0 < delta.decode_s <= now - self.added_at)
        assert delta.prefill_s == 0 or not self.has_prefill_time
        self.has_prefill_time |= bool(delta.token_ids or delta.finish_reason)
        self.num_deltas += 1

    def _check_prefix(self, delta: RequestDelta) -> None:
        job, miss = self.job, delta.prefix_miss
        assert 0 <= delta.num_cached_tokens < job.num_prompt_tokens
        if delta.num_cached_tokens:
            assert job.request.params.prompt_logprobs is None
        if miss is not None:
            assert delta.num_cached_tokens <= miss.position < job.num_prompt_tokens
            assert job.prompt[miss.position] == miss.token_id != miss.cached_token_id
