"""What crosses the process border between an EngineClient and the engine process.

Plain data, encoded as msgpack, each frame preceded by its length (4 bytes, big-endian). The client speaks first: one
Start; the engine process answers Ready or Failed. After that Add and Abort go in, Outputs come back. Closing the
connection stops the engine.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from pagewick.config import EngineConfig
from pagewick.sampling_params import SamplingParams

# A frame carries at most one step's outputs or one prompt; anything larger is not ours.
MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate. A user's request with n > 1 becomes n of these.

    seed is always set, so that a sample never depends on the engine's state. `params.stop` stays behind: the engine
    knows no text. cache_salt separates prefix-cache users who must not see each other's hits.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choice_index: int = 0
    priority: int = 0
    cache_salt: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One position: the token there, its log-probability and rank (from 1), and the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RequestDelta(msgspec.Struct, kw_only=True):
    """What one step gave one request.

    stop_token_id: the token that ended the sequence, if one did; it is the last of token_ids.
    prompt_logprobs: for prompt tokens from the second on, as far as this step computed them.
    error: why this sequence alone failed (finish_reason is then "error").
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges and running totals of the engine; blocks are those of all cache groups together."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_referenced_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the engine loaded and decided."""

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


class Start(msgspec.Struct, tag=True):
    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


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
    """The message as one length-prefixed frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


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
