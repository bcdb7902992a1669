"""Every message survives the border between the processes; what is not a message of ours does not."""

from __future__ import annotations

import math

import msgspec
import pytest

from pagewick.config import EngineConfig
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    Add,
    EngineStats,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    RequestDelta,
    Start,
    ToEngine,
    TokenLogprobs,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from tests.engine.requests import request
from tests.engine.test_admission import INFO

TO_ENGINE: list[ToEngine] = [
    Start(EngineConfig(model="/some/Größe", kv_cache_memory="1GiB", seed=-1)),  # type: ignore[arg-type]
    Add([]),
    Add(
        [
            request([], "first", seed=-(2**63)),
            request([0, 2**31 - 1], "\U0001f600", seed=2**63 - 1, priority=-5, cache_salt="salt", temperature=0.7,
                    top_k=-1, stop=["a", "b"], stop_token_ids=[1, 2], logprobs=0, prompt_logprobs=20, min_tokens=3),
        ]
    ),
    Abort([]),
    Abort(["first", "second"]),
]  # fmt: skip
FROM_ENGINE: list[FromEngine] = [
    Ready(INFO),
    Failed("ConfigError", "a\nmessage"),
    Outputs([], EngineStats()),
    Outputs(
        [
            RequestDelta(request_id="first"),
            RequestDelta(
                request_id="second",
                token_ids=[1, 2],
                logprobs=[TokenLogprobs(1, -0.25, 1, []), TokenLogprobs(2, -math.inf, 40, [(1, -1e-9), (3, -2.5)])],
                prompt_logprobs=[],
                finish_reason="stop",
                stop_token_id=2,
                num_cached_tokens=32,
                error="something",
            ),
        ],
        EngineStats(num_requests_running=1, num_steps=2**40),
    ),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_to_the_engine_come_through(message: ToEngine) -> None:
    frame = encode_frame(message)
    assert frame_length(frame[:FRAME_HEADER_BYTES]) == len(frame) - FRAME_HEADER_BYTES
    assert decode_to_engine(frame[FRAME_HEADER_BYTES:]) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_from_the_engine_come_through(message: FromEngine) -> None:
    frame = encode_frame(message)
    assert frame_length(frame[:FRAME_HEADER_BYTES]) == len(frame) - FRAME_HEADER_BYTES
    assert decode_from_engine(frame[FRAME_HEADER_BYTES:]) == message


def test_params_are_checked_on_the_way_in() -> None:
    (add,) = [message for message in TO_ENGINE if isinstance(message, Add) and message.requests]
    body = encode_frame(add)[FRAME_HEADER_BYTES:]
    assert body.count(b"top_p\xcb") == 2
    with pytest.raises(Exception, match="top_p"):
        decode_to_engine(body.replace(b"top_p\xcb\x3f\xf0", b"top_p\xcb\x40\xf0"))


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(ValueError, match=str(length)):
        frame_length(length.to_bytes(FRAME_HEADER_BYTES, "big"))


def test_the_longest_frame_is_accepted() -> None:
    assert frame_length(MAX_FRAME_BYTES.to_bytes(FRAME_HEADER_BYTES, "big")) == MAX_FRAME_BYTES


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Exit", encode_frame(FROM_ENGINE[0])[4:]])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(body)


def test_a_truncated_message_is_refused() -> None:
    body = encode_frame(FROM_ENGINE[-1])[FRAME_HEADER_BYTES:]
    for end in range(len(body)):
        with pytest.raises(msgspec.DecodeError):
            decode_from_engine(body[:end])
