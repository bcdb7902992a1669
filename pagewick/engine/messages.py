"""What crosses the process border between an EngineClient and the engine process.

Plain data, encoded as msgpack, each frame preceded by its length (4 bytes, big-endian). The client speaks first: one
Start; the engine process answers Ready or Failed. After that Add and Abort go in, Outputs come back. Closing the
connection stops the engine.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import Any, TypeVar

import msgspec

from pagewick.config import EngineConfig
from pagewick.sampling_params import SamplingParams

# Anything larger is not ours.
MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_Part = TypeVar("_Part")


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is served, as far as that does not change its tokens.

    priority: the lower, the sooner (vLLM's meaning). fairness_key: whom it is served for; keys get equal shares.
    cache_salt: separates prefix-cache users who must not see each other's hits.
    session_id: a conversation; its blocks are kept for its next request until the session's time to live is over.
    timeout_s: seconds from arrival after which it is ended wherever it stands.
    """

    priority: int = 0
    fairness_key: str = ""
    cache_salt: str | None = None
    session_id: str | None = None
    timeout_s: float | None = None


class EngineRequest(msgspec.Struct, kw_only=True):
    """A prompt and what is to become of it: `params.n` choices, or as many beams.

    seed is always set, so that a sample never depends on the engine's state. The engine knows no text: `params.stop`
    and `params.best_of` stay behind, and what is text in params comes as tokens too.

    bad_word_ids: token sequences that must not appear. dry_breaker_ids: those that end a repetition for DRY.
    dry_breaker_mask: the tokens that do so alone, one bit per token of the vocabulary, least significant first; may be
        empty.
    constraint: what the engine's constraint_factory makes a TokenConstraint of.
    extra_keys: (start, end, key): what the cache holds of the tokens at positions [start, end) depends on more than
        their ids, such as an image or an adapter, and `key` names it. Requests share a prefix only if these agree, too,
        as far as it goes. A range may end behind the prompt; the order of ranges does not matter.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    options: RequestOptions = RequestOptions()
    bad_word_ids: list[list[int]] = []
    dry_breaker_ids: list[list[int]] = []
    dry_breaker_mask: bytes = b""
    constraint: Any = None
    extra_keys: list[tuple[int, int, bytes]] = []


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One position: the token there, its log-probability and rank (from 1), and the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PrefixMiss(msgspec.Struct, array_like=True, frozen=True):
    """Why a prompt was not found further in the prefix cache.

    position: of the first prompt token that differs from the closest cached prefix. token_id: the prompt's there.
    cached_token_id: the cached one's; None if that prefix ends there, because it was never longer or has been evicted.
    """

    position: int
    token_id: int
    cached_token_id: int | None


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step gave one choice of a request.

    stop_token_id: the token that ended the choice, if one did; it is the last of token_ids.
    prompt_logprobs: for prompt tokens from the second on, as far as this step computed them; choice 0 has them.
    prefix_miss: with the first delta of choice 0, if the prompt was looked for in the prefix cache and not found whole.
    num_draft_tokens, num_accepted_tokens: of speculation, over the whole choice so far.
    cumulative_logprob: of a beam.
    queue_s: with a request's first delta, seconds from its arrival until it was first scheduled, or ended waiting.
    prefill_s: seconds from there until its prompt was computed, with the first delta that has a token or ends a choice.
    error: why this choice alone failed (finish_reason is then "error"); error_kind names the class in pagewick.errors.
    retry_after_s: of a QueueFullError.
    """

    request_id: str
    choice_index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    prefix_miss: PrefixMiss | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cumulative_logprob: float | None = None
    error: str | None = None
    error_kind: str = "EngineError"
    retry_after_s: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0


# Upper bounds of EngineStats.iteration_token_counts; what is above the last one is counted behind it. They are vLLM's.
ITERATION_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges and running totals of the engine; blocks are those of all cache groups together.

    num_blocks: those that are open now; the pools grow. num_referenced_blocks: held by running sequences;
    num_session_blocks: held by nobody but sessions. num_leaked_blocks: contradictions found when the engine was idle
    last; anything but 0 is a bug. oldest_wait_s: how long the request that waits longest has waited.
    num_expert_hits, num_expert_copies: how often an expert that a step needed was on the device, and was copied there
    (in a layer of a model some of whose experts are in host memory); expert_copy_bytes: so many of rank 0's.
    num_iteration_tokens: prompt tokens computed and tokens generated, over all steps. iteration_token_counts: how many
    steps had so many of them, by ITERATION_TOKEN_BOUNDS; steps without any are not counted.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_waiting_tokens: int = 0
    oldest_wait_s: float = 0.0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_referenced_blocks: int = 0
    num_session_blocks: int = 0
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    num_leaked_blocks: int = 0
    num_sessions: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_expired: int = 0
    num_refused: int = 0
    num_blocks_saved: int = 0
    num_blocks_loaded: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_expert_hits: int = 0
    num_expert_copies: int = 0
    expert_copy_bytes: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_iteration_tokens: int = 0
    iteration_token_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ITERATION_TOKEN_BOUNDS) + 1))

    def count_iteration(self, num_tokens: int) -> None:
        """Note a step of so many tokens."""
        if num_tokens:
            self.num_iteration_tokens += num_tokens
            self.iteration_token_counts[bisect_left(ITERATION_TOKEN_BOUNDS, num_tokens)] += 1


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the engine loaded and decided. timeline: what it did until it was ready, each with the seconds it took.

    rotations: how its rotary embeddings turn, each in words of its own: flags can change that.
    """

    model_path: str
    architecture: str
    dtype: str
    device: str
    kernels: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_cache_bytes: int
    num_parameters: int
    tensor_parallel_size: int
    kv_cache_dtype: str = "auto"
    rotations: list[str] = []
    eos_token_ids: list[int] = []
    timeline: list[tuple[str, float]] = []


class Start(msgspec.Struct, tag=True):
    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    """choices: (request id, choice index) of single choices to stop; the request goes on while it has others."""

    request_ids: list[str] = []
    choices: list[tuple[str, int]] = []


class Ready(msgspec.Struct, tag=True):
    info: ModelInfo


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or died of `message`. `kind` names the exception class in pagewick.errors."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag=True):
    deltas: list[RequestDelta]
    stats: EngineStats


ToEngine = Start | Add | Abort
FromEngine = Ready | Failed | Outputs

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """The message as one length-prefixed frame; as several, of a part each, if its requests or deltas need them."""
    body = _encoder.encode(message)
    if len(body) <= MAX_FRAME_BYTES:
        return _LENGTH.pack(len(body)) + body
    halves: list[ToEngine | FromEngine]
    if isinstance(message, Add) and len(message.requests) > 1:
        halves = [Add(part) for part in _halves(message.requests)]
    else:
        # What one request may ask for, and be given, has limits that are far below a frame's.
        assert isinstance(message, Outputs) and len(message.deltas) > 1, f"a part of {len(body)} bytes fits no frame"
        halves = [Outputs(part, message.stats) for part in _halves(message.deltas)]
    return b"".join(encode_frame(half) for half in halves)


def _halves(parts: list[_Part]) -> list[list[_Part]]:
    middle = len(parts) // 2
    return [parts[:middle], parts[middle:]]


def frame_length(header: bytes) -> int:
    """Bytes that follow the 4-byte header. Raises ValueError if no frame of ours is that long."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return int(length)


FRAME_HEADER_BYTES = _LENGTH.size


def decode_to_engine(body: bytes) -> ToEngine:
    decoded: Any = msgspec.msgpack.decode(body, type=ToEngine)
    return decoded  # type: ignore[no-any-return]


def decode_from_engine(body: bytes) -> FromEngine:
    decoded: Any = msgspec.msgpack.decode(body, type=FromEngine)
    return decoded  # type: ignore[no-any-return]
