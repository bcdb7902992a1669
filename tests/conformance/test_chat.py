"""Points 19 to 41 and 74: chat completions."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import openai
import pytest

from tests.conformance import shapes
from tests.conformance.callers import Caller, Way, error_of, forcing, user
from tests.conformance.servers import MODEL, SECOND_NAME, Server

CHAT = "/v1/chat/completions"
QUESTION = [user("Which port does the server listen on by default?")]
# The built-in model was not trained on this, so its sampled responses differ.
STRANGE = [user("Repeat xqz")]


def refused(way: Way, param: str, **fields: Any) -> dict[str, Any]:
    """Return the error of a request with one wrong field, which the error must name."""
    with pytest.raises(openai.BadRequestError) as failure:
        way.chat(**fields)
    error = error_of(failure.value)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert failure.value.response.headers["content-type"] == "application/json"
    return error


def test_the_model_knows_what_it_is_asked(way: Way) -> None:
    """The other tests rest on this: the model responds, and the response is right."""
    response = way.chat(messages=QUESTION, temperature=0)
    assert "8000" in response.text and response.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["8000"]},
        {"max_tokens": 0},
        {"user": "me", "metadata": {"a": "b"}, "store": False},
    ],
    ids=str,
)
def test_point_19_shape(server: Server, fields: dict[str, Any]) -> None:
    """A response, and every chunk of a stream, has the shape of OpenAI's specification."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, **fields}
    shapes.check_chat(server.http.post(CHAT, json=body).content)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = server.http.post(CHAT, json={**body, **options}).text.split("\n\n")
    chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert len(chunks) >= 3
    for chunk in chunks:
        shapes.check_chat_chunk(chunk)


def test_point_20_created(way: Way) -> None:
    """created is the time in whole seconds."""
    before = int(time.time())
    created = way.chat(max_tokens=1).created
    assert type(created) is int and before <= created <= time.time()


def test_point_21_model(way: Way) -> None:
    """model is the name under which the model is served, the first of several."""
    for name in (MODEL, SECOND_NAME):
        assert way.chat(model=name, max_tokens=1).model == MODEL
        assert way.completion(model=name, prompt="Hi", max_tokens=1).model == MODEL


def test_point_22_usage(way: Way, server: Server) -> None:
    """Usage sums up; its prompt tokens are what /tokenize counts."""
    for messages in (QUESTION, [{"role": "system", "content": "Be brief. 😀"}, *STRANGE]):
        usage = way.chat(messages=messages, max_tokens=7, extra_body={"ignore_eos": True}).usage
        assert usage.prompt_tokens == server.num_tokens(messages)
        assert usage.completion_tokens == 7
        assert usage.total_tokens == usage.prompt_tokens + 7
    several = way.chat(messages=QUESTION, n=3, max_tokens=7, extra_body={"ignore_eos": True}).usage
    assert (several.prompt_tokens, several.completion_tokens) == (server.num_tokens(QUESTION), 21)
    ended = way.chat(messages=QUESTION, temperature=0)
    # One more than the text's tokens: the token that ended it.
    assert ended.usage.completion_tokens == len(server.tokens(ended.text)) + 1


def test_point_23_max_tokens(way: Way) -> None:
    """max_tokens=5 ends with the reason length after 5 tokens."""
    response = way.chat(messages=STRANGE, max_tokens=5)
    assert (response.finish_reason, response.usage.completion_tokens) == ("length", 5)


def test_point_24_max_completion_tokens(way: Way) -> None:
    """max_completion_tokens does the same, and wins over max_tokens."""
    for fields in ({}, {"max_tokens": 2}, {"max_tokens": 9}):
        response = way.chat(messages=STRANGE, max_completion_tokens=5, **fields)
        assert (response.finish_reason, response.usage.completion_tokens) == ("length", 5)


def test_point_25_stop(way: Way) -> None:
    """A stop string is not in the text, and ends it with the reason stop."""
    whole = way.chat(messages=QUESTION, temperature=0).text
    place = whole.index("8000")
    for stop in ("8000", ["8000"], ["never", "8000"]):
        response = way.chat(messages=QUESTION, temperature=0, stop=stop)
        assert (response.text, response.finish_reason) == (whole[:place], "stop")


def test_point_26_stop_across_tokens(way: Way, server: Server) -> None:
    """A stop string across tokens ends the text, and no part of it is sent; one that does not occur changes nothing."""
    whole = way.chat(messages=QUESTION, temperature=0).text
    body = {"prompt": whole, "add_special_tokens": False, "return_token_strs": True}
    pieces = server.http.post("/tokenize", json=body).json()["token_strs"]
    assert "".join(pieces) == whole
    for left, right in itertools.islice(itertools.pairwise(pieces), 1, 4):
        stop = left[-1:] + right[:1]
        expected = whole[: whole.index(stop)]
        response = way.chat(messages=QUESTION, temperature=0, stop=stop)
        assert (response.text, response.finish_reason) == (expected, "stop")
    almost = way.chat(messages=QUESTION, temperature=0, stop=[left[-1:] + "\0", whole + "!"])
    assert almost.text == whole


def test_point_27_number_of_stops(way: Way) -> None:
    """4 stop strings, and up to 16, are accepted; more give 400."""
    whole = way.chat(messages=QUESTION, temperature=0).text
    for count in (4, 16):
        stops = [f"never {number}" for number in range(count - 1)] + ["8000"]
        assert way.chat(messages=QUESTION, temperature=0, stop=stops).text == whole[: whole.index("8000")]
    refused(way, "stop", stop=[f"never {number}" for number in range(17)])


def test_point_28_temperature_0(way: Way) -> None:
    """Temperature 0 gives the same text twice."""
    first, second = (way.chat(messages=STRANGE, temperature=0, max_tokens=12) for _ in range(2))
    assert first.text == second.text != ""


def test_point_29_seed(way: Way) -> None:
    """A seed gives the same text twice, and another seed gives another text."""

    def sample(seed: int) -> str:
        return way.chat(messages=STRANGE, temperature=1, seed=seed, max_tokens=6).text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(7, 10)}) > 1


def test_point_30_n(way: Way) -> None:
    """n=3 gives three choices, which differ above temperature 0."""
    response = way.chat(messages=STRANGE, n=3, temperature=2, seed=1, max_tokens=6)
    assert len({choice.text for choice in response.choices}) == 3
    response = way.chat(messages=STRANGE, n=3, temperature=0, max_tokens=6)
    assert len({choice.text for choice in response.choices}) == 1 and len(response.choices) == 3


def test_point_31_n_out_of_range(way: Way) -> None:
    """n=129 and n=0 give 400, n=128 is served."""
    for n in (129, 0, -1, 2**40):
        refused(way, "n", n=n)
    assert len(way.chat(n=128, max_tokens=1).choices) == 128


def test_point_32_logit_bias(way: Way, server: Server) -> None:
    """A bias of 100 forces a token, one of -100 bans it; a wrong token or a wrong number gives 400."""
    (forced,) = server.tokens(" models")
    response = way.chat(temperature=0, max_tokens=3, logit_bias={str(forced): 100})
    assert response.text == " models" * 3
    free = way.chat(messages=QUESTION, temperature=0, max_tokens=1).text
    (first,) = server.tokens(free)
    assert way.chat(messages=QUESTION, temperature=0, max_tokens=1, logit_bias={str(first): -100}).text != free
    for key in ("no token", "-1", "4096", "1.5", "99999999999999999999", ""):
        refused(way, "logit_bias", logit_bias={key: 1})
    for bias in (101, -101):
        refused(way, "logit_bias", logit_bias={"5": bias})
    assert way.chat(messages=QUESTION, temperature=0, max_tokens=1).text == free


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("bias", ["NaN", "Infinity", "-Infinity", "1e309", '"1"', "null"])
def test_point_32_logit_bias_that_is_no_number(server: Server, bias: str, is_streamed: bool) -> None:
    """A bias that is not a number gives 400, and the next request is served."""
    stream = json.dumps(is_streamed)
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "logit_bias": {{"5": {bias}}}, "stream": {stream}}}'
    assert server.http.post(CHAT, content=body).status_code == 400
    assert server.http.post(CHAT, json={"messages": [user("Hi")], "max_tokens": 1}).status_code == 200


def test_point_33_penalties_out_of_range(way: Way) -> None:
    """A presence or frequency penalty out of range gives 400."""
    for name in ("presence_penalty", "frequency_penalty"):
        for value in (2.01, -2.01, 1e300):
            refused(way, name, **{name: value})
        for value in (2, -2):
            assert way.chat(**{name: value}, max_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e309", "-0.1", "2.1", '"1"', "true", "[]"])
def test_point_34_temperature_out_of_range(server: Server, value: str, is_streamed: bool) -> None:
    """A temperature that is not a number, or out of range, gives 400."""
    stream = json.dumps(is_streamed)
    for name in ("temperature", "top_p"):
        body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "{name}": {value}, "stream": {stream}}}'
        response = server.http.post(CHAT, content=body)
        assert response.status_code == 400, name
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_point_35_developer(way: Way) -> None:
    """The role developer is accepted, and means system."""
    responses = [
        way.chat(messages=[{"role": role, "content": "Response in one word."}, *QUESTION], temperature=0, max_tokens=20)
        for role in ("system", "developer")
    ]
    assert responses[0].text == responses[1].text
    assert responses[0].usage.prompt_tokens == responses[1].usage.prompt_tokens


def test_point_36_content_parts(way: Way, server: Server) -> None:
    """A list of text parts is as good as a string."""
    text = str(QUESTION[0]["content"])
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    assert server.num_tokens(parts) == server.num_tokens(QUESTION)
    assert way.chat(messages=parts, temperature=0).text == way.chat(messages=QUESTION, temperature=0).text
    halves = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    prompt = server.http.post("/apply-template", json={"messages": [{"role": "user", "content": halves}]}).json()
    assert text[:20] in prompt["prompt"] and text[20:] in prompt["prompt"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "Hm.", "tool_calls": None},
        {"role": "assistant", "content": "Hm.", "tool_calls": []},
        {"role": "assistant", "content": [], "tool_calls": [CALL], "function_call": None},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": None, "audio": None, "annotations": []},
    ],
    ids=str,
)
def test_point_37_messages_with_calls(caller: Caller, message: dict[str, Any]) -> None:
    """Assistant messages without content, and calls that are null or none, are accepted."""
    messages = [*STRANGE, message]
    if message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": "It is here."})
    assert Way(caller, is_streamed=False).chat(messages=[*messages, *QUESTION], max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    "result",
    [
        {"content": [{"type": "text", "text": "It is here."}]},
        {"content": "It is here.", "name": "look"},
        {"content": ""},
        {"content": "{}", "status": "success"},
    ],
    ids=str,
)
def test_point_37_results_of_calls(caller: Caller, result: dict[str, Any]) -> None:
    """Results may be parts, empty, or named; a message may have several calls, with results in any order."""
    calls = [CALL, {**CALL, "id": "call_2"}]
    results = [{"role": "tool", "tool_call_id": call["id"], **result} for call in reversed(calls)]
    messages = [*STRANGE, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert Way(caller, is_streamed=False).chat(messages=messages, max_tokens=2).finish_reason == "length"


def test_point_37_former_calls(caller: Caller) -> None:
    """Messages in the form that OpenAI's API had before tools, too."""
    call = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    messages = [*STRANGE, call, {"role": "function", "name": "look", "content": "It is here."}]
    assert Way(caller, is_streamed=True).chat(messages=messages, max_tokens=2).finish_reason == "length"


def test_point_38_no_messages(way: Way) -> None:
    """No messages give 400, and the next request is served."""
    refused(way, "messages", messages=[])
    assert way.chat(max_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("text", ["😀", "日", "é😀"])
def test_point_39_characters_across_tokens(way: Way, server: Server, text: str) -> None:
    """A character of several tokens is sent whole, never as replacement characters, also in a stream."""
    token_ids = server.tokens(text)
    assert len(token_ids) > len(text)
    assert way.chat(**forcing(token_ids)).text == text
    # If the output ends within a character, a stream has sent no part of it too early.
    for count in range(1, len(token_ids)):
        fields = forcing(token_ids[:count])
        response = way.chat(**fields)
        assert text.startswith(response.text.rstrip("\ufffd"))
        if way.is_streamed:
            assert response.text == way.caller.chat(**fields).choices[0].message.content


def test_point_39_echoed_characters(way: Way) -> None:
    """An echoed prompt has its characters of several tokens whole."""
    prompt = "ß😀é 日本 🧑‍🚀"
    assert way.completion(prompt=prompt, echo=True, max_tokens=0).text == prompt


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
    ],
    ids=str,
)
def test_point_40_images(caller: Caller, part: dict[str, Any]) -> None:
    """Images, audio and files give 400 with a text-only model, and the message says so."""
    message = {"role": "user", "content": [{"type": "text", "text": "See:"}, part]}
    error = refused(Way(caller, is_streamed=True), "messages[0].content", messages=[message])
    assert part["type"] in error["message"]


def test_point_41_response_format_text(way: Way) -> None:
    """The response format text is always supported."""
    plain = way.chat(messages=QUESTION, temperature=0)
    assert way.chat(messages=QUESTION, temperature=0, response_format={"type": "text"}).text == plain.text


def test_point_74_reasoning(way: Way, caller: Caller, server: Server) -> None:
    """Thoughts are in reasoning_content and in reasoning, never in the content; usage counts them."""
    fields = forcing(server.tokens("<think> because</think> Four"))
    num_thoughts = len(server.tokens("<think> because</think>"))
    response = way.chat(**fields)
    assert (response.text, response.choices[0].reasoning) == (" Four", " because")
    assert response.usage.completion_tokens_details.reasoning_tokens == num_thoughts
    message = caller.chat(**fields).choices[0].message
    assert message.reasoning == message.reasoning_content == " because"  # type: ignore[attr-defined]
    for chunk in caller.chat_chunks(**fields):
        delta = chunk.choices[0].delta
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
    without = way.chat(messages=QUESTION, temperature=0, max_tokens=4)
    assert without.usage.completion_tokens_details.reasoning_tokens == 0
    assert not hasattr(caller.chat(max_tokens=1).choices[0].message, "reasoning")
