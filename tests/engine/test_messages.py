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
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    Outputs,
    PrefixMiss,
    Ready,
    RequestDelta,
    RequestOptions,
    Start,
    ToEngine,
    TokenLogprobs,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from pagewick.engine.model_info import ModelInfo
from pagewick.sampling_params import SamplingParams

INFO = ModelInfo(
    model_path="/some/Größe", architecture="Llama", dtype="float32", device="cpu", kernels="", vocab_size=100,
    embedding_size=8, max_model_len=10, max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_kv_blocks=8,
    kv_cache_bytes=2**40, num_parameters=0, tensor_parallel_size=1,
)  # fmt: skip
TO_ENGINE: list[ToEngine] = [
    Start(EngineConfig(model="/some/Größe", kv_cache_memory="1GiB", seed=-1)),  # type: ignore[arg-type]
    Add([]),
    Add(
        [
            EngineRequest(request_id="first", prompt_token_ids=[], params=SamplingParams(), seed=-(2**63)),
            EngineRequest(
                request_id="\U0001f600",
                prompt_token_ids=[0, 2**31 - 1],
                params=SamplingParams(
                    n=3, temperature=0.7, top_k=-1, stop_token_ids=[1, 2], logprobs=0, prompt_logprobs=20, min_tokens=3,
                    logit_bias={5: -1.5, 2**31: 100}, bad_words=("a", "\u00fc"), allowed_token_ids=(7,),
                ),
                seed=2**63 - 1,
                options=RequestOptions(
                    priority=-5, fairness_key="key", cache_salt="salt", session_id="s", timeout_s=0.25
                ),
                bad_word_ids=[[1], [2, 3]],
                dry_breaker_ids=[[4, 5]],
                dry_breaker_mask=b"\x00\xff\x81",
                constraint={"kind": "regex", "pattern": "a+"},
                extra_keys=[(0, 1, b"\x00\xff"), (1, 2**31 - 1, b"k" * 300)],
            ),
        ]
    ),
    Abort([]),
    Abort(["first", "second"], [("third", 0), ("third", 127)]),
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
                prefix_miss=PrefixMiss(32, 7, None),
                choice_index=5,
                num_draft_tokens=9,
                num_accepted_tokens=4,
                cumulative_logprob=-12.5,
                error="something",
                error_kind="QueueFullError",
                retry_after_s=3,
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


def decoded_frames(data: bytes) -> list[bytes]:
    """The bodies of the frames in it, none of them longer than a frame may be."""
    bodies = []
    while data:
        end = FRAME_HEADER_BYTES + frame_length(data[:FRAME_HEADER_BYTES])
        bodies.append(data[FRAME_HEADER_BYTES:end])
        data = data[end:]
    return bodies


@pytest.mark.parametrize("limit", [1100, 1717, 4000, 10**6])
def test_what_fits_no_frame_goes_as_several(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("pagewick.engine.messages.MAX_FRAME_BYTES", limit)
    deltas = [RequestDelta(request_id=str(number), token_ids=[5] * (number % 7 * 40)) for number in range(43)]
    stats = EngineStats(num_steps=5)
    outputs = [decode_from_engine(body) for body in decoded_frames(encode_frame(Outputs(deltas, stats)))]
    assert [delta for one in outputs for delta in one.deltas] == deltas  # type: ignore[union-attr]
    assert all(one.stats == stats for one in outputs)  # type: ignore[union-attr]
    requests = [
        EngineRequest(request_id=str(number), prompt_token_ids=[0], params=SamplingParams(), seed=number)
        for number in range(7)
    ]
    adds = [decode_to_engine(body) for body in decoded_frames(encode_frame(Add(requests)))]
    assert [request for one in adds for request in one.requests] == requests  # type: ignore[union-attr]
    assert (len(outputs) > 1, len(adds) > 1) == (limit < 10**6,) * 2


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Exit", encode_frame(FROM_ENGINE[0])[4:]])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(body)


def test_a_truncated_message_is_refused() -> None:
    body = encode_frame(FROM_ENGINE[-1])[FRAME_HEADER_BYTES:]
    for end in range(len(body)):
        with pytest.raises(msgspec.DecodeError):
            decode_from_engine(body[:end])
