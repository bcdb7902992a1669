"""Messages between an EngineClient and the engine process.

They are plain data, encoded as msgpack, each frame preceded by its length (4 bytes, big-endian). The client sends one
Start; the engine process answers Ready or Failed. After that the client sends Add, Abort and ChangeAdapter and gets
Outputs, and an AdapterChanged for each ChangeAdapter, in their order. Closing the connection stops the engine.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from pagewick.config import EngineConfig
from pagewick.engine.model_info import ModelInfo
from pagewick.sampling_params import SamplingParams

# No message of ours is larger.
MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_Part = TypeVar("_Part")


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is served, as far as that does not change its tokens.

    priority: the lower, the sooner (as in vLLM). fairness_key: the user; all keys get equal shares.
    cache_salt: separates prefix-cache users who must not see each other's hits.
    session_id: a conversation; its blocks are kept for its next request until the session's time to live is over.
    timeout_s: seconds from arrival after which the request is ended, whatever its state.
    lowers_max_tokens: if max_tokens exceeds the room in the context, respond until that is full instead of refusing.
    is_prefill: the blocks of the prompt are wanted, on a disk that servers share, before the request ends.
    """

    priority: int = 0
    fairness_key: str = ""
    cache_salt: str | None = None
    session_id: str | None = None
    timeout_s: float | None = None
    lowers_max_tokens: bool = False
    is_prefill: bool = False


class ImageInput(msgspec.Struct, array_like=True, frozen=True):
    """An image in a prompt, whose `num_tokens` tokens begin at position `start`.

    height, width: in pixels, after the model's resizing. pixels: [height, width, 3], red, green and blue of 8 bits;
    empty where no rank needs them any more. row_length: placeholders in a row, which one other token follows; 0: all
    tokens are placeholders. layout: where the pictures of an image lie that is cut, on which positions of its first
    tokens may depend; empty for a whole image. edges: of a picture that is read in tiles and has rows of tokens, each
    with one more of its own behind it: rows of patches at the upper and at the lower edge that have no tokens, and
    columns at the left and at the right; None for other pictures. has_end: of one of these, whether a token of its own
    is behind all of them.
    """

    start: int
    num_tokens: int
    height: int
    width: int
    pixels: bytes = b""
    row_length: int = 0
    layout: bytes = b""
    edges: tuple[int, int] | None = None
    has_end: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of placeholder tokens that follow each other: all of them, or each row."""
        length = self.row_length or self.num_tokens
        for start in range(self.start, self.end, length + 1):
            yield start, start + length


class EngineRequest(msgspec.Struct, kw_only=True):
    """Asks for `params.n` choices, or as many beams, that continue a prompt.

    seed is always set, so that a sample never depends on the engine's state. The engine knows no text: it does not use
    `params.stop` and `params.best_of`, and gets the tokens of other text in params in the fields below.

    bad_word_ids: token sequences that must not appear. dry_breaker_ids: those that end a repetition for DRY.
    dry_breaker_mask: the tokens that do so alone, one bit per token of the vocabulary, least significant first; may be
        empty.
    opening_ids: tokens that may begin a thought. With a constraint, they are allowed as the first token only if one of
        them is the most likely of all tokens: the constraint must not make a model think that would not.
    constraint: data from which the engine's constraint_factory makes a TokenConstraint.
    extra_keys: (start, end, key): the keys and values of the tokens at positions [start, end) depend on more than the
        token ids, such as an image or an adapter, which `key` names. Requests share a prefix only if its extra keys
        agree, too. A range may end after the prompt; the order of ranges does not matter.
    images: those that the prompt has, in order; the engine adds an extra key for each.
    adapter: the name of the LoRA adapter that changes the model's weights; empty: none. adapter_number: its number,
        which the engine looks up.
    pooling: "cls", "last" or "mean": the request wants the prompt's embedding, and params.max_tokens is 0; see
        pooling.py. "score": it wants logits: of the tokens label_ids after the last one, or of the model's labels.
    separator_id: the token that ends the first text of a pair, in models with types of tokens; -1: there is no pair.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    options: RequestOptions = RequestOptions()
    bad_word_ids: list[list[int]] = []
    dry_breaker_ids: list[list[int]] = []
    dry_breaker_mask: bytes = b""
    opening_ids: list[int] = []
    constraint: Any = None
    extra_keys: list[tuple[int, int, bytes]] = []
    images: list[ImageInput] = []
    adapter: str = ""
    adapter_number: int = -1
    pooling: str = ""
    label_ids: list[int] = []
    separator_id: int = -1


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The token at one position, its log-probability and rank (from 1), and the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PrefixMiss(msgspec.Struct, array_like=True, frozen=True):
    """The place where a prompt differs from the closest prefix in the cache.

    position: that of the first prompt token that differs. token_id: the prompt's token there. cached_token_id: the
    cached prefix's token there; None if that prefix ends, because it was never longer or the rest has been evicted.
    """

    position: int
    token_id: int
    cached_token_id: int | None


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one choice of a request from one step.

    stop_token_id: the token that ended the choice, if one did; it is the last of token_ids.
    prompt_logprobs: for prompt tokens from the second on, as far as this step computed them; only in choice 0.
    prefix_miss: in the first delta of choice 0, if the prefix cache was searched and did not have the whole prompt.
    num_draft_tokens, num_accepted_tokens: totals of speculation for the choice so far.
    cumulative_logprob: only for beams. embedding: with the last delta of a request that wants one, or
    logits; float32 numbers.
    queue_s: in a request's first delta, seconds from its arrival until it was first scheduled, or ended while waiting.
    prefill_s: in the first delta that has a token or ends a choice, seconds from there until the prompt was computed.
    decode_s: in a delta with tokens, seconds from the request's first token to the last of these.
    error: why this choice alone failed (finish_reason is then "error"); error_kind names the class in pagewick.errors.
    retry_after_s: only with a QueueFullError.
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
    embedding: bytes = b""
    error: str | None = None
    error_kind: str = "EngineError"
    retry_after_s: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


# Upper bounds of EngineStats.iteration_token_counts, the same as vLLM's. One more count is for steps above the last.
ITERATION_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges and running totals of the engine; blocks are those of all cache groups together.

    num_blocks: blocks that are open now; the pools grow. num_referenced_blocks: blocks held by running sequences.
    num_session_blocks: blocks kept only by sessions. num_leaked_blocks: contradictions found when the engine was last
    idle; anything but 0 is a bug. oldest_wait_s: seconds that the oldest waiting request has waited.
    num_constrained_requests: requests with a grammar. num_compiled_grammars, grammar_compile_s: grammars compiled, and
    the seconds that took. num_grammar_masks, grammar_mask_s: likewise for the masks of single tokens.
    num_grammar_violations: tokens that a grammar does not allow; anything but 0 is a bug.
    num_expert_hits, num_expert_copies: how often an expert that a step needed was on the device, and how often it had
    to be copied there from host memory. expert_copy_bytes: bytes copied so on rank 0.
    num_iteration_tokens: prompt tokens computed and tokens generated, over all steps. iteration_token_counts: number of
    steps by how many such tokens they had, see ITERATION_TOKEN_BOUNDS; steps without any are not counted.
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
    num_constrained_requests: int = 0
    num_compiled_grammars: int = 0
    grammar_compile_s: float = 0.0
    num_grammar_masks: int = 0
    grammar_mask_s: float = 0.0
    num_grammar_violations: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_iteration_tokens: int = 0
    iteration_token_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(ITERATION_TOKEN_BOUNDS) + 1))

    def count_iteration(self, num_tokens: int) -> None:
        """Note a step that computed `num_tokens` tokens."""
        if num_tokens:
            self.num_iteration_tokens += num_tokens
            self.iteration_token_counts[bisect_left(ITERATION_TOKEN_BOUNDS, num_tokens)] += 1


class Start(msgspec.Struct, tag=True):
    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    """choices: (request id, choice index) of single choices to stop; the request continues while it has others."""

    request_ids: list[str] = []
    choices: list[tuple[str, int]] = []


class ChangeAdapter(msgspec.Struct, tag=True):
    """Loads the LoRA adapter at `path` under a name; an empty path unloads it. replaces: see Adapters.load."""

    name: str
    path: str = ""
    replaces: bool = False


class Ready(msgspec.Struct, tag=True):
    info: ModelInfo


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or died of `message`. `kind` names the exception class in pagewick.errors."""

    kind: str
    message: str


class Outputs(msgspec.Struct, tag=True):
    deltas: list[RequestDelta]
    stats: EngineStats


class AdapterChanged(msgspec.Struct, tag=True):
    """adapters: the loaded ones, as in ModelInfo. kind, message: the error, as in Failed; empty: the change is made."""

    adapters: dict[str, str]
    kind: str = ""
    message: str = ""


ToEngine = Start | Add | Abort | ChangeAdapter
FromEngine = Ready | Failed | Outputs | AdapterChanged

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Encode a message as one length-prefixed frame, or as several if its requests or deltas do not fit in one."""
    body = _encoder.encode(message)
    if len(body) <= MAX_FRAME_BYTES:
        return _LENGTH.pack(len(body)) + body
    halves: list[msgspec.Struct]
    if isinstance(message, Add) and len(message.requests) > 1:
        halves = [Add(part) for part in _halves(message.requests)]
    else:
        # The limits of a single request and of a single delta are far below a frame's.
        assert isinstance(message, Outputs) and len(message.deltas) > 1, f"a part of {len(body)} bytes fits no frame"
        halves = [Outputs(part, message.stats) for part in _halves(message.deltas)]
    return b"".join(encode_frame(half) for half in halves)


def _halves(parts: list[_Part]) -> list[list[_Part]]:
    middle = len(parts) // 2
    return [parts[:middle], parts[middle:]]


def frame_length(header: bytes | bytearray) -> int:
    """Return the number of bytes after the 4-byte header. Raises ValueError if no frame of ours is that long."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return int(length)


FRAME_HEADER_BYTES = _LENGTH.size

decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Yield the bodies of all complete frames at the front of what was received, and remove these frames.

    Raises as `frame_length` does.
    """
    start = 0
    try:
        while len(received) - start >= FRAME_HEADER_BYTES:
            body = start + FRAME_HEADER_BYTES
            end = body + frame_length(received[start:body])
            if end > len(received):
                break
            yield bytes(received[body:end])
            start = end
    finally:
        del received[:start]
