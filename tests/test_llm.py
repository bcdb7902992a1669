"""LLM over a scripted engine: order, batching, chat, choices, stop strings, streams, errors and interrupts."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import pagewick.engine.engine
from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.errors import (
    ArgumentError,
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    UnsupportedError,
)
from pagewick.llm import LLM
from pagewick.sampling_params import SamplingParams, default_sampling_params
from pagewick.server.api.messages import ChatMessage
from pagewick.text.content_parts import ROLES
from pagewick.text.tokenizer import Tokenizer
from tests.scripted_engine import ScriptedEngine
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend, write_model_directory

GENERATION_CONFIG = {"eos_token_id": [1], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_model_directory(
        directory, byte_level_backend(), chat_template=QWEN_TEMPLATE, generation_config=GENERATION_CONFIG
    )


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_directory(model)


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("</s>", add_special_tokens=False)[0]


Open = Callable[..., tuple[LLM, ScriptedEngine]]


@pytest.fixture(scope="module")
def make_engine(tokenizer: Tokenizer, eos: int) -> Callable[..., ScriptedEngine]:
    """An engine that answers with the prompt in capitals."""

    def shout(request: EngineRequest) -> list[int]:
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return [*tokenizer.encode(text.upper(), add_special_tokens=False), eos]

    return lambda config, **_: ScriptedEngine(config, script=shout, vocab_size=tokenizer.vocab_size, eos_token_id=eos)


@pytest.fixture
def open_llm(model: Path, make_engine: Callable[..., ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> Open:
    def open_(**options: Any) -> tuple[LLM, ScriptedEngine]:
        return with_engine(LLM(str(model), **options))

    monkeypatch.setattr(pagewick.engine.engine, "Engine", make_engine)
    return open_


@pytest.fixture(scope="module")
def shared_llm(model: Path, make_engine: Callable[..., ScriptedEngine]) -> tuple[LLM, ScriptedEngine]:
    """One for all examples of a property."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pagewick.engine.engine, "Engine", make_engine)
        return with_engine(LLM(str(model)))


def with_engine(llm: LLM) -> tuple[LLM, ScriptedEngine]:
    engine = llm._engine
    assert isinstance(engine, ScriptedEngine)
    return llm, engine


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_many_prompts_run_in_one_batch_and_keep_their_order(open_llm: Open) -> None:
    llm, engine = open_llm()
    prompts = ["a long one with several words", "short", "you", "and another, also rather long"]
    added_at_first_step: list[int] = []
    engine.on_step = lambda: added_at_first_step.append(len(engine.requests))
    outputs = llm.generate(prompts)
    assert texts(outputs) == [prompt.upper() for prompt in prompts]
    assert [output.prompt for output in outputs] == prompts
    assert added_at_first_step[0] == len(prompts)
    assert all(output.finished and output.num_cached_tokens == 3 for output in outputs)
    assert len({output.request_id for output in outputs}) == len(prompts)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_a_prompt_has_five_forms(open_llm: Open, tokenizer: Tokenizer) -> None:
    llm, _ = open_llm()
    ids = tokenizer.encode("hello", add_special_tokens=True)
    forms: list[Any] = ["hello", ids, [ids], ["hello"], {"prompt": "hello"}, [{"prompt_token_ids": ids}], tuple(ids)]
    for form in forms:
        (output,) = llm.generate(form)
        assert (output.prompt_token_ids, output.outputs[0].text) == (ids, "HELLO"), form
    assert llm.generate([]) == llm.chat([]) == []
    (output,) = llm.generate({"prompt": "any text", "prompt_token_ids": ids, "multi_modal_data": None})
    assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == ("any text", ids, "HELLO")


def test_token_ids_of_numpy_become_plain_ones(open_llm: Open, tokenizer: Tokenizer) -> None:
    llm, _ = open_llm()
    ids = tokenizer.encode("hello", add_special_tokens=True)
    found = list(np.array(ids))
    forms: list[Any] = [found, [found], tuple(found), {"prompt_token_ids": found}, [np.uint16(ids[0]), *ids[1:]]]
    for form in forms:
        (output,) = llm.generate(form)
        assert (output.prompt_token_ids, {*map(type, output.prompt_token_ids)}) == (ids, {int}), form
    for wrong in ([*found, np.float64(1)], [1, np.bool_(True)], [1, True], [ids, [1.0]]):
        with pytest.raises(InvalidRequestError, match="list of token ids"):
            llm.generate(wrong)


@pytest.mark.parametrize("prompt", ["", [[]], {"prompt_token_ids": []}, [["a", 1]], [1, 10**9], [1, "b"]])
def test_an_impossible_prompt_is_refused(open_llm: Open, prompt: Any) -> None:
    llm, engine = open_llm()
    with pytest.raises(InvalidRequestError):
        llm.generate(prompt)
    assert not engine.has_work


def test_chat_is_generate_on_the_rendered_prompt(open_llm: Open) -> None:
    llm, _ = open_llm()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    rendered = llm.apply_chat_template(messages)
    assert rendered == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    (alone,) = llm.chat(messages)
    assert alone.prompt == rendered
    several = llm.chat([messages, [{"role": "user", "content": "you"}]])
    assert several[0].prompt_token_ids == alone.prompt_token_ids == llm.generate(rendered)[0].prompt_token_ids
    assert several[1].prompt == "<|im_start|>user\nyou<|im_end|>\n<|im_start|>assistant\n"


def test_chat_passes_tools_and_template_variables(open_llm: Open) -> None:
    llm, _ = open_llm()
    messages = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    (output,) = llm.chat(messages, tools=tools, chat_template_kwargs={"enable_thinking": False})
    assert output.prompt is not None
    assert "look_up" in output.prompt
    assert output.prompt.endswith("<think>\n\n</think>\n\n")
    (bare,) = llm.chat(messages, add_generation_prompt=False)
    assert bare.prompt == "<|im_start|>user\nhello<|im_end|>\n"
    with pytest.raises(InvalidRequestError, match=r"tools\[0\] must be an object with a function; got 'look_up'"):
        llm.chat(messages, tools=["look_up"])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="must not set tools"):
        llm.chat(messages, chat_template_kwargs={"tools": tools})


def test_a_message_needs_a_role(open_llm: Open) -> None:
    llm, _ = open_llm()
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\] needs a role, such as user$") as caught:
        llm.chat([{"role": "user", "content": "hi"}, {"content": "hi"}])
    assert caught.value.param == "messages[1].role"
    for role in ("critic", 5, ["user"]):
        with pytest.raises(
            InvalidRequestError, match=r"^messages\[0\].role must be one of system, developer, .*; got "
        ) as caught:
            llm.chat([{"role": role, "content": "hi"}])
        assert caught.value.param == "messages[0].role"
    (rendered,) = llm.chat([{"role": "developer", "content": "hi"}])
    assert rendered.prompt == "<|im_start|>system\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_roles_are_those_of_the_server() -> None:
    assert typing.get_args(typing.get_type_hints(ChatMessage)["role"]) == ROLES


def test_text_in_a_message_cannot_open_a_message(open_llm: Open, tokenizer: Tokenizer) -> None:
    llm, _ = open_llm()
    start = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    (output,) = llm.chat([{"role": "user", "content": "<|im_start|>system"}])
    assert output.prompt_token_ids.count(start[0]) == 2


def test_without_a_chat_template_chat_says_so(tmp_path: Path, open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = write_model_directory(tmp_path, byte_level_backend())
    with pytest.raises(InvalidRequestError, match="no chat template"):
        LLM(str(bare)).chat([{"role": "user", "content": "hello"}])


def test_all_choices_are_one_request(open_llm: Open) -> None:
    llm, engine = open_llm(seed=3)
    params = SamplingParams(n=3, seed=11, prompt_logprobs=1, max_tokens=2)
    outputs = llm.generate(["hello", "you"], params)
    assert [[choice.index for choice in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    assert [(request.seed, request.params.n) for request in engine.requests] == [(11, 3)] * 2
    assert [request.request_id for request in engine.requests] == [output.request_id for output in outputs]
    assert all(len(choice.token_ids) == 2 for output in outputs for choice in output.outputs)
    logprobs = outputs[0].prompt_logprobs
    assert logprobs is not None
    assert logprobs[0] is None
    assert [list(position) for position in logprobs[1:] if position] == [
        [token_id] for token_id in outputs[0].prompt_token_ids[1:]
    ]


def test_seeds_are_drawn_from_the_engines_seed(open_llm: Open) -> None:
    def drawn(**options: Any) -> list[int]:
        llm, engine = open_llm(**options)
        llm.generate(["hello", "hello"])
        llm.generate("hello")
        return [request.seed for request in engine.requests]

    assert drawn(seed=7) == drawn(seed=7)
    assert len(set(drawn(seed=7) + drawn(seed=8) + drawn() + drawn())) == 12
    assert all(0 <= seed < 2**63 for seed in drawn())


def test_a_stop_string_ends_the_request_in_the_engine(open_llm: Open) -> None:
    llm, engine = open_llm()
    (output,) = llm.generate("you and you", SamplingParams(stop=("AND",)))
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("YOU ", "stop", "AND")
    assert output.finished
    assert (engine.aborted, engine.aborted_choices) == ([], [(engine.requests[0].request_id, 0)])
    assert engine.requests[0].params.stop == ()
    assert not engine.has_work


def test_best_of_gives_the_likeliest(open_llm: Open) -> None:
    llm, engine = open_llm()
    engine.logprobs = [-2.0, -0.5, -1.0]
    outputs = llm.generate(["hello", "you"], SamplingParams(n=2, best_of=3))
    for output in outputs:
        num_tokens = len(output.outputs[0].token_ids)
        found = [(choice.index, choice.cumulative_logprob, choice.logprobs) for choice in output.outputs]
        assert found == [(0, -0.5 * num_tokens, None), (1, -1.0 * num_tokens, None)]
    assert texts(outputs) == ["HELLO", "YOU"]
    assert [(one.params.n, one.params.best_of, one.params.logprobs) for one in engine.requests] == [(3, None, 0)] * 2
    with pytest.raises(InvalidRequestError, match="cannot be streamed"):
        llm.stream("hello", SamplingParams(best_of=2))


def test_options_and_priorities_reach_the_engine(open_llm: Open) -> None:
    llm, engine = open_llm()
    mine, yours = RequestOptions(session_id="mine", cache_salt="salt"), RequestOptions(priority=2, timeout_s=3)
    messages = [{"role": "user", "content": "hello"}]
    llm.generate(["hello", "you"], options=[mine, yours])
    llm.chat([messages, messages], options=mine)
    list(llm.stream(messages, options=yours))
    llm.generate("you")
    assert [one.options for one in engine.requests] == [mine, yours, mine, mine, yours, RequestOptions()]
    llm.generate(["hello", "you"], priority=[4, -5], options=mine)
    assert [(one.options.priority, one.options.session_id) for one in engine.requests[-2:]] == [
        (4, "mine"),
        (-5, "mine"),
    ]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 priority"):
        llm.generate(["hello", "you"], priority=[1])
    with pytest.raises(InvalidRequestError, match="not both"):
        llm.generate("you", priority=[1], options=yours)
    with pytest.raises(InvalidRequestError, match="timeout must be"):
        llm.generate("you", options=RequestOptions(timeout_s=-1))
    assert not engine.has_work


def test_strings_for_the_sampler_go_as_tokens(open_llm: Open, tokenizer: Tokenizer) -> None:
    llm, engine = open_llm()
    llm.generate("you", SamplingParams(bad_words=("fox",), dry_multiplier=1.0, dry_sequence_breakers=("\n",)))
    (request,) = engine.requests
    expected = [tokenizer.encode(word, add_special_tokens=False) for word in ("fox", " fox")]
    assert (request.bad_word_ids, request.dry_breaker_ids) == (expected, [])
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    assert int.from_bytes(request.dry_breaker_mask, "little") >> newline & 1


def test_sampling_params_are_one_for_all_or_one_for_each(open_llm: Open) -> None:
    llm, engine = open_llm()
    llm.generate(["hello", "you"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [request.params.max_tokens for request in engine.requests] == [1, 2]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["hello", "you"], [SamplingParams()])


def test_sampling_defaults_come_from_the_model(open_llm: Open) -> None:
    llm, engine = open_llm()
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.top_p) == (0.6, 20, 0.95)
    llm.generate("hello")
    list(llm.stream("hello"))
    assert [(request.params.temperature, request.params.top_k) for request in engine.requests] == [(0.6, 20)] * 2
    assert default_sampling_params({}) == SamplingParams()
    assert default_sampling_params({"temperature": None, "top_k": -1}) == SamplingParams()
    with pytest.raises(ModelLoadError, match="generation_config"):
        default_sampling_params({"temperature": "hot"})


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_a_stream_joins_to_the_text(open_llm: Open, tokens_per_step: int) -> None:
    llm, engine = open_llm()
    engine.tokens_per_step = tokens_per_step
    messages = [{"role": "user", "content": "grüße 😀 the fox"}]
    for prompt in ("grüße 😀 the fox", messages):
        pieces = list(llm.stream(prompt))
        assert "".join(pieces) == texts(llm.chat(messages) if prompt is messages else llm.generate(prompt))[0]
        assert all(pieces)
    assert not engine.has_work


def test_closing_a_stream_aborts_it(open_llm: Open) -> None:
    llm, engine = open_llm()
    stream = llm.stream("the quick brown fox")
    assert not engine.has_work
    next(stream)
    assert engine.has_work
    stream.close()
    assert engine.aborted == [engine.requests[0].request_id]
    assert not engine.has_work
    assert texts(llm.generate("you")) == ["YOU"]


def test_open_streams_go_on_while_others_run(open_llm: Open) -> None:
    llm, _ = open_llm()
    first, second = llm.stream("the quick brown fox"), llm.stream("the lazy dog")
    pieces = [next(first), next(second)]
    assert texts(llm.generate(["hello", "you"])) == ["HELLO", "YOU"]
    assert pieces[0] + "".join(first) == "THE QUICK BROWN FOX"
    assert pieces[1] + "".join(second) == "THE LAZY DOG"


def test_threads_take_turns(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, engine = open_llm()
    step, busy = engine.step, threading.Lock()

    def slow_step() -> Any:
        assert busy.acquire(blocking=False), "two threads step the engine at the same time"
        try:
            time.sleep(0.002)
            return step()
        finally:
            busy.release()

    monkeypatch.setattr(engine, "step", slow_step)
    words = [f"word {number}" for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda word: [*texts(llm.generate(word)), "".join(llm.stream(word))], words))
    assert found == [[word.upper()] * 2 for word in words]
    assert not engine.has_work


THOUGHTFUL = "<think>\nhm, 😀\n</think>\n\nHello!"


@pytest.fixture
def thoughtful(open_llm: Open, tokenizer: Tokenizer, eos: int) -> tuple[LLM, ScriptedEngine]:
    llm, engine = open_llm()
    engine.script = lambda request: [*tokenizer.encode(THOUGHTFUL, add_special_tokens=False), eos]
    return llm, engine


ASK = [{"role": "user", "content": "why?"}]


def test_a_chat_tells_thoughts_from_text(thoughtful: tuple[LLM, ScriptedEngine], tokenizer: Tokenizer) -> None:
    llm, _ = thoughtful
    choice = llm.chat(ASK)[0].outputs[0]
    assert (choice.reasoning, choice.text) == ("hm, 😀", "Hello!")
    thought = THOUGHTFUL.removesuffix("Hello!")
    assert choice.num_reasoning_tokens == len(tokenizer.encode(thought, add_special_tokens=False))
    for output in (llm.chat(ASK, split_reasoning=False)[0], llm.generate(llm.apply_chat_template(ASK))[0]):
        whole = output.outputs[0]
        assert (whole.reasoning, whole.text, whole.num_reasoning_tokens) == ("", THOUGHTFUL, 0)
        assert whole.token_ids == choice.token_ids


def test_a_prompt_that_ends_in_a_thought_begins_in_one(
    thoughtful: tuple[LLM, ScriptedEngine], tokenizer: Tokenizer, eos: int
) -> None:
    llm, engine = thoughtful
    engine.script = lambda request: [*tokenizer.encode("hm\n</think>\n\nHello!", add_special_tokens=False), eos]
    begun = [*ASK, {"role": "assistant", "content": "<think>\nlet me see,"}]
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ '<think>' if false }}"
    (output,) = llm.chat(begun, continue_final_message=True, chat_template=template)
    assert output.prompt is not None and output.prompt.endswith("<|im_start|><think>\nlet me see,")
    assert (output.outputs[0].reasoning, output.outputs[0].text) == ("hm", "Hello!")


@pytest.mark.parametrize("tokens_per_step", [1, 2, 100])
def test_a_stream_has_the_text_or_all_that_comes(thoughtful: tuple[LLM, ScriptedEngine], tokens_per_step: int) -> None:
    llm, engine = thoughtful
    engine.tokens_per_step = tokens_per_step
    assert "".join(llm.stream(ASK)) == "Hello!"
    assert "".join(llm.stream("why?")) == THOUGHTFUL
    seen = [(one.outputs[0].reasoning, one.outputs[0].text) for one in llm.stream_outputs(ASK)]
    assert seen[-1] == ("hm, 😀", "Hello!") and seen == sorted(seen)
    assert len(seen) >= 10 // tokens_per_step
    last = [*llm.stream_outputs("why?", split_reasoning=True)][-1]
    assert (last.outputs[0].reasoning, last.finished) == ("hm, 😀", True)
    several = [*llm.stream_outputs(ASK, SamplingParams(n=2))][-1]
    assert [choice.text for choice in several.outputs] == ["Hello!"] * 2
    with pytest.raises(InvalidRequestError, match="cannot be streamed"):
        llm.stream_outputs(ASK, SamplingParams(best_of=2))
    assert not engine.has_work


def test_a_budget_of_thought_reaches_the_template(thoughtful: tuple[LLM, ScriptedEngine]) -> None:
    llm, _ = thoughtful
    template = "{{ thinking_budget if thinking_budget is defined else 'none' }}"
    for budget, variables, expected in ((5, None, "5"), (None, None, "none"), (5, {"thinking_budget": 3}, "3")):
        how: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": variables}
        (output,) = llm.chat(ASK, thinking_budget=budget, **how)
        assert output.prompt == expected
        (*_, last) = llm.stream_outputs(ASK, thinking_budget=budget, **how)
        assert last.prompt == expected


def test_a_budget_of_thought_reaches_the_engine(thoughtful: tuple[LLM, ScriptedEngine], tokenizer: Tokenizer) -> None:
    llm, engine = thoughtful
    llm.chat(ASK, thinking_budget=5)
    list(llm.stream(ASK, thinking_budget=6))
    list(llm.stream_outputs(ASK, thinking_budget=7))
    llm.chat(ASK)
    *bounded, free = [request.constraint for request in engine.requests]
    assert [one["budget"] for one in bounded] == [5, 6, 7] and free is None
    assert [bounded[0][name] for name in ("start_ids", "end_ids")] == [
        tokenizer.encode(tag, add_special_tokens=False) for tag in ("<think>", "</think>")
    ]
    with pytest.raises(InvalidRequestError, match="whole number of tokens"):
        llm.chat(ASK, thinking_budget=-1)
    assert not engine.has_work


def test_a_stream_refuses_several_choices_at_once(open_llm: Open) -> None:
    llm, _ = open_llm()
    with pytest.raises(InvalidRequestError, match="one choice"):
        llm.stream("hello", SamplingParams(n=2))


def test_a_failed_request_is_named_and_the_others_are_aborted(open_llm: Open) -> None:
    llm, engine = open_llm()
    engine.failing["1"] = {"error": "the logits are not numbers"}
    with pytest.raises(EngineError, match="request 1: the logits are not numbers"):
        llm.generate(["the quick", "brown", "fox"])
    assert sorted(engine.aborted) == ["0", "2"]
    assert not engine.has_work
    assert texts(llm.generate("you")) == ["YOU"]


def test_a_request_that_is_late_raises_what_the_engine_names(open_llm: Open) -> None:
    llm, engine = open_llm()
    engine.failing["0"] = {"error": "1 s are over", "error_kind": "DeadlineExceededError"}
    with pytest.raises(DeadlineExceededError, match="request 0: 1 s are over"):
        llm.generate("you", SamplingParams(n=3))
    assert not engine.has_work


def test_a_prompt_that_does_not_fit_is_named_and_nothing_stays_queued(open_llm: Open) -> None:
    llm, engine = open_llm()
    with pytest.raises(ContextLengthError, match="maximum context length is 512 tokens") as caught:
        llm.generate([[5], [5] * 600, [5]])
    assert caught.value.__notes__ == ["(prompt 2 of 3)"]
    assert not engine.has_work


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_takes_effect_between_steps_and_leaves_the_engine_usable(open_llm: Open) -> None:
    llm, engine = open_llm()
    steps = itertools.count()
    finished: list[int] = []

    def interrupt() -> None:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            # Without protection the exception would come here, in the middle of the step.
            for _ in range(1000):
                pass
            finished.append(1)

    engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the quick brown fox", "you"])
    assert finished == [1]
    assert not engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert texts(llm.generate(["hello", "you"])) == ["HELLO", "YOU"]


def test_on_step_sees_the_outputs_grow(open_llm: Open) -> None:
    llm, _ = open_llm()
    seen: list[tuple[int, ...]] = []
    outputs = llm.generate(
        ["the quick", "you"],
        on_step=lambda outputs: seen.append(tuple(len(output.outputs[0].token_ids) for output in outputs)),
    )
    assert seen == sorted(seen)
    assert seen[0] == (1, 1)
    assert seen[-1] == tuple(len(output.outputs[0].token_ids) for output in outputs)


def test_a_progress_bar_goes_to_stderr(open_llm: Open, capfd: pytest.CaptureFixture[str]) -> None:
    llm, _ = open_llm()
    assert texts(llm.generate(["hello", "you"], use_tqdm=True)) == ["HELLO", "YOU"]
    captured = capfd.readouterr()
    assert "100%" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda llm: llm.generate(5), "a prompt must be a text, a list of token ids or a dict with one; got 5"),
        (lambda llm: llm.generate(["hi", None]), "a prompt must be a text, .*; got None"),
        (lambda llm: llm.generate(b"hi"), "a prompt must be a text, .*; got b'hi'"),
        (lambda llm: llm.generate({"promt": "hi"}), "a prompt has no promt; known are prompt and prompt_token_ids"),
        (lambda llm: llm.generate({}), "a dict needs prompt or prompt_token_ids to be a prompt; got {}"),
        (lambda llm: llm.generate({"prompt": 5}), "a dict needs prompt or prompt_token_ids to be a prompt"),
        (lambda llm: llm.generate({"prompt_token_ids": 5}), "a prompt must be a text, .*; got 5"),
        (lambda llm: llm.generate({"prompt": "hi", "cache_salt": "x"}), r"give options=RequestOptions\(cache_salt="),
        (lambda llm: llm.generate({"prompt": "hi", "multi_modal_data": {"image": 1}}), "an image must be a path"),
        (lambda llm: llm.generate("hi", max_tokens=3), r"no argument max_tokens; give it SamplingParams\(max_tokens="),
        (lambda llm: llm.generate("hi", {"temperature": 0}), r"; write SamplingParams\(temperature=0\)"),
        (lambda llm: llm.generate("hi", 3), "must be SamplingParams, or one for each prompt; got 3"),
        (lambda llm: llm.generate(["a", "b"], [None, 3]), "must be SamplingParams, or one for each prompt; got 3"),
        (lambda llm: llm.chat("hi"), r"""messages must be a list such as .*"content": "Hello"}\]; got 'hi'"""),
        (lambda llm: llm.chat({"role": "user"}), "messages must be a list such as"),
        (lambda llm: llm.chat(["hi"]), "messages must be a list such as .*; got 'hi'"),
        (lambda llm: llm.chat([{"role": "user", "content": "hi"}], {"n": 2}), "must be SamplingParams"),
        (lambda llm: llm.stream("hi", {"n": 2}), "must be SamplingParams"),
        (lambda llm: next(llm.stream_outputs(5)), "a prompt must be a text"),
    ],
)
def test_a_wrong_type_is_a_type_error_in_one_line(
    shared_llm: tuple[LLM, ScriptedEngine], call: Callable[[LLM], Any], complaint: str
) -> None:
    with pytest.raises(TypeError, match=complaint) as error:
        call(shared_llm[0])
    assert isinstance(error.value, ArgumentError)
    assert "\n" not in str(error.value)
    assert not shared_llm[1].has_work


def test_vllms_other_arguments_of_a_request_are_refused_with_a_reason(shared_llm: tuple[LLM, ScriptedEngine]) -> None:
    llm, _ = shared_llm
    ask = [{"role": "user", "content": "hi"}]
    assert texts(llm.generate("hi", lora_request=None, priority=3)) == ["HI"]
    with pytest.raises(ArgumentError, match=r"^lora_request must be a LoRARequest, or one for each prompt; got 'an a"):
        llm.generate("hi", lora_request="an adapter")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"^mm_processor_kwargs: a model's own settings decide"):
        llm.chat(ask, mm_processor_kwargs={"a": 1})  # type: ignore[call-arg]
    assert llm.chat(ask, chat_template_content_format="auto", priority=[2])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"LLM.chat has no argument chat_templat; did you mean chat_template\?"):
        llm.chat(ask, chat_templat="")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"LLM.generate has no argument on_stp; did you mean on_step"):
        llm.generate("hi", on_stp=print)


def test_a_model_is_a_name_a_path_or_a_config(model: Path, open_llm: Open) -> None:
    for wrong in (5, ["m"], b"m"):
        with pytest.raises(TypeError, match="model must be a directory, a Hugging Face id or an EngineConfig; got"):
            LLM(wrong)  # type: ignore[arg-type]
    open_llm()
    for right in (model, EngineConfig(model=str(model))):
        assert with_engine(LLM(right))[1].config.model == str(model)
    with pytest.raises(ConfigError, match="a config or options, not both; got max_num_seqs"):
        LLM(EngineConfig(), max_num_seqs=3)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("hi"),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}]),
        lambda llm: list(llm.stream("hi")),
    ],
)
def test_a_closed_llm_says_so(open_llm: Open, call: Callable[[LLM], Any]) -> None:
    llm, _ = open_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match=r"^this LLM is closed; make another one$"):
        call(llm)


def test_a_chat_template_replaces_the_models(open_llm: Open, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("[{{ messages[0].content }}]", encoding="utf-8")
    marked = tmp_path / "marked.jinja"
    marked.write_text("\ufeff[{{ messages[0].content }}]", encoding="utf-8")
    for template in (file, str(file), "[{{ messages[0].content }}]", marked):
        llm, _ = open_llm(chat_template=template)
        assert llm.apply_chat_template([{"role": "user", "content": "hi"}]) == "[hi]"
    with pytest.raises(ConfigError, match=r"chat_template: cannot read 'missing.jinja'"):
        open_llm(chat_template="missing.jinja")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens([f"<extra_{number}>" for number in range(1000)])
    write_model_directory(tmp_path, backend)
    with pytest.raises(ModelLoadError) as refusal:
        LLM(tmp_path)
    assert f"the tokenizer of {tmp_path} does not belong to its model: '<extra_999>' is token" in str(refusal.value)
    assert "and the model's 1000 tokens end at 999" in str(refusal.value)


def test_a_special_token_that_the_model_lacks_is_no_obstacle(
    tmp_path: Path, open_llm: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 has such a token for images, also where the model reads text only."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(f"<image_{number}>", special=True) for number in range(1000)])
    assert with_engine(LLM(write_model_directory(tmp_path, backend)))[0].get_tokenizer().id_of("<image_999>")


def test_options_reach_the_engine_under_any_name(open_llm: Open, model: Path) -> None:
    llm, engine = open_llm(max_seq_len=64, tp=2)
    assert (engine.config.max_model_len, engine.config.tensor_parallel_size) == (64, 2)
    assert engine.config.model == str(model)
    with llm:
        pass
    assert engine.is_closed
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        open_llm(max_modell_len=64)
    with pytest.raises(ConfigError, match="config or options"):
        LLM("x", config=EngineConfig())


@given(
    prompts=st.lists(st.text("abc xyz", min_size=1, max_size=12), min_size=1, max_size=5),
    tokens_per_step=st.integers(1, 4),
    stop=st.sampled_from([(), ("B",), ("XY", " "), ("C A",)]),
    num_taken=st.integers(0, 6),
)
@settings(deadline=None)
def test_outputs_do_not_depend_on_how_they_are_asked_for(
    shared_llm: tuple[LLM, ScriptedEngine],
    prompts: list[str],
    tokens_per_step: int,
    stop: tuple[str, ...],
    num_taken: int,
) -> None:
    llm, engine = shared_llm
    engine.tokens_per_step = tokens_per_step
    params = SamplingParams(stop=stop)
    expected = [min((p.upper().split(s)[0] for s in stop), key=len, default=p.upper()) for p in prompts]
    streams: list[Iterator[str]] = [llm.stream(prompt, params) for prompt in prompts]
    begun = ["".join(itertools.islice(stream, num_taken)) for stream in streams]
    assert texts(llm.generate(prompts, params)) == expected
    assert [start + "".join(stream) for start, stream in zip(begun, streams, strict=True)] == expected
    assert not engine.has_work


@pytest.mark.parametrize("options", [{"revision": "main"}, {"hub": "modelscope"}])
def test_options_about_a_hub_are_refused_for_a_model_on_this_disk(options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name} has no effect: pagewick-demo is built in, not a model on a hub"):
        LLM("pagewick-demo", **options)
    with pytest.raises(ConfigError, match=f"^{name} has no effect: pagewick-demo is built in, not a model on a hub"):
        LLM(config=EngineConfig(**options))
