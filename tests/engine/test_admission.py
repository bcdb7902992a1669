"""What is refused before it can do harm, and what the refusal says."""

from __future__ import annotations

import pytest

from pagewick.engine.admission import check_request
from pagewick.engine.messages import ModelInfo
from pagewick.errors import ContextLengthError, InvalidRequestError
from tests.engine.requests import request

INFO = ModelInfo(
    model_path="model", architecture="LlamaForCausalLM", dtype="float32", device="cpu", kernels="", vocab_size=100,
    max_model_len=10, max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_kv_blocks=8, kv_cache_bytes=0,
    num_parameters=0, tensor_parallel_size=1,
)  # fmt: skip


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(1, 9), (9, 1), (9, None), (5, 5)])
def test_what_fits_exactly_is_admitted(num_prompt_tokens: int, max_tokens: int | None) -> None:
    check_request(request([99] * num_prompt_tokens, max_tokens=max_tokens, stop_token_ids=[0, 99]), INFO)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"),
    [(1, 10, "max_tokens"), (9, 2, "max_tokens"), (10, None, "messages"), (10, 1, "messages"), (11, 1, "messages")],
)
def test_what_is_too_long_is_refused_with_the_numbers(
    num_prompt_tokens: int, max_tokens: int | None, param: str
) -> None:
    asked = num_prompt_tokens + (max_tokens or 1)
    with pytest.raises(
        ContextLengthError, match=rf"length is 10 tokens.* {asked} tokens \({num_prompt_tokens} in"
    ) as info:
        check_request(request([0] * num_prompt_tokens, max_tokens=max_tokens), INFO)
    assert (info.value.param, info.value.code) == (param, "context_length_exceeded")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        check_request(request([]), INFO)


@pytest.mark.parametrize("token_id", [-1, 100, 2**31])
def test_unknown_token_ids_are_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {token_id} is not in the vocabulary of 100") as info:
        check_request(request([1, token_id, 2]), INFO)
    assert info.value.param == "prompt"
    if token_id > 0:
        with pytest.raises(InvalidRequestError, match="vocabulary") as info:
            check_request(request([1], stop_token_ids=[5, token_id]), INFO)
        assert info.value.param == "stop_token_ids"
