"""Each family's chat template gives the same text and the same tokens as in transformers, or both refuse."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Self

import pytest
import tokenizers
from tokenizers import AddedToken

from pagewick.errors import InvalidRequestError
from pagewick.text import template_environment
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer
from tests.text.template_families import FAMILIES, SYSTEM, TURNS, Family
from tests.tiny_text import byte_level_backend

transformers = pytest.importorskip("transformers", reason="needs transformers, the reference for chat templates")
reference_module = pytest.importorskip("transformers.utils.chat_template_utils")

BY_NAME = {family.name: family for family in FAMILIES}
ASK, ANSWER, AGAIN = TURNS
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & 'Zeit' 天气",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 3]}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}
# In the API, arguments are a JSON string whose spacing may differ from that of json.dumps.
CALL = {
    "id": "abcDEF123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Zürich <&>"}'},
}
CALL_2 = {"id": "000000002", "type": "function", "function": {"name": "now", "arguments": "{}"}}
OBJECT_CALL = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcDEF123", "content": '{"t": -3.5, "wind": "föhn"}'}
RESULT_2 = {"role": "tool", "name": "now", "tool_call_id": "000000002", "content": "12:00"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THOUGHT = "<think>\nShe greets.\n\nSo do I.\n</think>\n\n"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASK],
    "turns": TURNS,
    "system": [SYSTEM, *TURNS],
    "empty system": [{"role": "system", "content": ""}, ASK],
    "empty question": [{"role": "user", "content": ""}],
    "late system": [*TURNS, SYSTEM],
    "two systems": [SYSTEM, {"role": "system", "content": "And kind."}, ASK],
    "ends with an answer": [SYSTEM, *TURNS[:2]],
    "begins with an answer": [ANSWER, ASK],
    "two questions": [ASK, AGAIN],
    "unknown role": [ASK, {"role": "critic", "content": "Hm."}],
    "white space": [
        {"role": "system", "content": "\n Be\tbrief.  "},
        {"role": "user", "content": "  a\r\n\n  b \n"},
        {"role": "assistant", "content": "\n\n c  \n"},
        {"role": "user", "content": "\u00a0d\u3000"},
    ],
    "unicode": [
        {"role": "system", "content": "Sei kürz, 请简短"},
        {"role": "user", "content": "👩‍👩‍👧 e\u0301 \u202eabc\u202c \x00\x1b[0m {{ x }} {% raw %}"},
        {"role": "assistant", "content": "\\n <b>&amp;</b> \"'`"},
        AGAIN,
    ],
    "parts": [
        {"role": "system", "content": parts("Be", "brief.")},
        {"role": "user", "content": parts(" one ", "two\n", "")},
        {"role": "assistant", "content": parts("three")},
        {"role": "user", "content": parts("four", "<five>")},
    ],
    "call": [ASK, CALLED, RESULT],
    "call and answer": [SYSTEM, ASK, CALLED, RESULT, ANSWER, AGAIN],
    "call with text": [ASK, {**CALLED, "content": "I look."}, RESULT, ANSWER],
    "call with empty text": [ASK, {**CALLED, "content": ""}, RESULT],
    "call without content": [ASK, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "call with an object": [ASK, {**CALLED, "tool_calls": [OBJECT_CALL]}, RESULT],
    "two calls": [ASK, {**CALLED, "tool_calls": [CALL, CALL_2]}, RESULT, RESULT_2, ANSWER, AGAIN, CALLED, RESULT],
    "short id": [ASK, {**CALLED, "tool_calls": [{**CALL, "id": "c1"}]}, {**RESULT, "tool_call_id": "c1"}],
    "tools in a message": [{**SYSTEM, "tools": [WEATHER, {"type": "python"}]}, ASK],
    "tools in a message as text": [{**SYSTEM, "tools": '[{"name": "now"}]'}, ASK],
    "metadata": [ASK, {**ANSWER, "metadata": "get_weather"}, {"role": "observation", "content": "föhn"}, ANSWER],
    "thoughts": [ASK, {"role": "assistant", "content": THOUGHT + "Hello."}, AGAIN],
    "last thoughts": [SYSTEM, ASK, {"role": "assistant", "content": THOUGHT + "Hello."}],
    "thoughts apart": [ASK, {**ANSWER, "reasoning_content": "\nShe greets.\n"}, AGAIN],
    "last thoughts apart": [ASK, {**ANSWER, "reasoning_content": "She greets."}],
    "thoughts by another name": [ASK, {**ANSWER, "reasoning": "She greets."}],
    "thoughts and calls": [ASK, {**CALLED, "reasoning_content": "Look."}, RESULT, {**ANSWER, "content": THOUGHT}],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "thinking": {"enable_thinking": True, "thinking": True},
    "no thinking": {"enable_thinking": False, "thinking": False},
    "tools": {"tools": [WEATHER, CLOCK]},
    "tools apart": {"tools": [WEATHER], "tools_in_user_message": False, "date_string": "1 Jan 2000"},
    "built-in tools": {"builtin_tools": ["brave_search", "code_interpreter", "get_weather"]},
    "documents": {"documents": [{"title": "a", "text": "One\n."}, {"title": "b", "text": "Zwölf"}]},
    "controls": {"controls": {"length": "short"}},
}


@functools.cache
def backend_text() -> str:
    """A byte-level vocabulary without added tokens."""
    content = json.loads(byte_level_backend().to_str())
    return json.dumps({**content, "added_tokens": []})


class Pair:
    """A family's template in Pagewick and in transformers, with the same tokenizer."""

    def __init__(self, family: Family) -> None:
        backend = tokenizers.Tokenizer.from_str(backend_text())
        backend.add_special_tokens(family.special)
        backend.add_tokens([AddedToken(word, normalized=False) for word in family.words.split(" ") if word])
        config = {"eos_token": family.eos, **({"bos_token": family.bos} if family.bos else {})}
        self.family = family
        self.tokenizer = Tokenizer(backend, config=config)
        self.template = ChatTemplate({"default": family.source}, self.tokenizer)
        self.reference = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(backend.to_str()), chat_template=family.source, **config
        )

    def expected(self, messages: list[dict[str, Any]], **options: Any) -> str:
        adapted = [self._adapted(message) for message in messages]
        if not self.family.has_none:
            text: str = self.reference.apply_chat_template(adapted, tokenize=False, **options)
            return text
        # Since version 5, apply_chat_template removes fields that are None, and templates that test for them fail.
        options = {**self.reference.special_tokens_map, **options}
        texts, _ = reference_module.render_jinja_template([adapted], chat_template=self.family.source, **options)
        return str(texts[0])

    def ids(self, text: str) -> list[int]:
        token_ids: list[int] = self.reference(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of the API in the form for which the template was written."""
        result = {"content": None, **message} if self.family.has_none else dict(message)
        if isinstance(content := message.get("content"), list) and not self.family.has_parts:
            result["content"] = "\n".join(part["text"] for part in content)
        for key in [] if "tool_calls" not in message else ["tool_calls"]:
            result[key] = [{**call, "function": self._adapted_function(call["function"])} for call in message[key]]
        return result

    def _adapted_function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        if self.family.arguments == "object" and isinstance(arguments, str):
            arguments = json.loads(arguments)
        elif self.family.arguments == "text" and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": arguments}

    def check(self, messages: list[dict[str, Any]], **options: Any) -> None:
        try:
            expected = self.expected(messages, **options)
        except Exception as error:
            with pytest.raises(InvalidRequestError) as raised:
                self.template.render(messages, **options)
            is_of_template = type(error).__name__ == "TemplateError"
            assert not is_of_template or str(error) in str(raised.value)
            return
        rendered = self.template.render(messages, **options)
        assert rendered.text == expected
        assert self.tokenizer.encode_pieces(rendered.pieces) == self.ids(expected)


@functools.cache
def pair(name: str) -> Pair:
    return Pair(BY_NAME[name])


class March(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Self:
        return cls(2026, 3, 9, 23, 59, tzinfo=tz)


@pytest.fixture(autouse=True)
def one_day(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (template_environment, reference_module):
        monkeypatch.setattr(module, "datetime", March)
    yield


each_family = pytest.mark.parametrize("name", BY_NAME)


@each_family
def test_the_format_is_the_familys(name: str) -> None:
    family = BY_NAME[name]
    messages = [SYSTEM, *TURNS] if family.has_system else TURNS
    assert pair(name).template.render(messages).text == family.expected


@each_family
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations(name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    for adds in (True, False):
        pair(name).check(messages, add_generation_prompt=adds)
        if not BY_NAME[name].has_system and messages[0]["role"] == "system":
            pair(name).check(messages[1:], add_generation_prompt=adds)


@each_family
@pytest.mark.parametrize("variables", VARIABLES)
def test_variables(name: str, variables: str) -> None:
    for conversation in ("system", "one turn", "call and answer", "two calls", "thoughts", "last thoughts apart"):
        for adds in (True, False):
            options = {**VARIABLES[variables], "add_generation_prompt": adds}
            pair(name).check(CONVERSATIONS[conversation], **options)


CONTINUED = ["Well", "Well, ", " \n Well, it is\n\n", "", parts("One. ", "Two ")]


@each_family
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_continued_messages(name: str, role: str) -> None:
    # Tags in a user's message are not thoughts; see below.
    contents = [*CONTINUED, THOUGHT + "So", "<think>\nHm"] if role == "assistant" else CONTINUED
    for content in contents:
        messages = [*(TURNS if role == "assistant" else TURNS[:2]), {"role": role, "content": content}]
        pair(name).check(messages, continue_final_message=True, add_generation_prompt=False)


@each_family
def test_words_of_the_template_in_a_message_are_text(name: str) -> None:
    """Every control token occurs in the messages; the prompt has the same control tokens as without them."""
    one = pair(name)
    words = [word for word in one.family.words.split(" ") if word.strip()]
    plain = [SYSTEM, *TURNS] if one.family.has_system else TURNS
    tags = one.template.reasoning_tags
    forged = []
    for message in plain:
        tokens = one.family.special + words
        if message is ANSWER:  # an assistant may have written thoughts, and tokens that are not special
            tokens = [token for token in one.family.special if tags is None or token not in (tags.start, tags.end)]
        forged.append({**message, "content": f"{message['content']}{'x'.join(tokens)}."})
    rendered = one.template.render(forged)
    assert rendered.text == one.expected(forged, add_generation_prompt=True)
    token_ids = one.tokenizer.encode_pieces(rendered.pieces)
    assert one.tokenizer.decode(token_ids, skip_special_tokens=False) == rendered.text
    control_ids = {one.reference.convert_tokens_to_ids(word) for word in [*one.family.special, *words]}
    expected_ids = one.ids(one.expected(plain, add_generation_prompt=True))
    found, expected = ([one_id for one_id in ids if one_id in control_ids] for ids in (token_ids, expected_ids))
    assert found == expected


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.calls])
def test_tools_calls_and_results_are_written(name: str) -> None:
    text = pair(name).template.render(CONVERSATIONS["call and answer"], tools=[WEATHER, CLOCK]).text
    for expected in ("get_weather", "Zürich <&>", "föhn", "Hello.", "And?"):
        assert expected in text


def written_by(name: str, conversation: str, **options: Any) -> str:
    return pair(name).template.render(CONVERSATIONS[conversation], **options).text


def test_thoughts_of_qwen3() -> None:
    assert written_by("Qwen3", "thoughts", enable_thinking=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    begun = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nShe greets.\n</think>\n\nHello.<|im_end|>\n"
    )
    for conversation in ("last thoughts apart", "thoughts by another name"):
        assert written_by("Qwen3", conversation, add_generation_prompt=False) == begun


def test_calls_in_three_forms() -> None:
    """Expected arguments: as the client sent them if the template takes a string, else as it prints an object."""
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Zürich <&>"}}\n</tool_call>' in written_by(
        "Qwen3", "call"
    )
    assert '{"name": "get_weather", "arguments": {"city": "Zürich <&>"}}' in written_by("Qwen2.5", "call")
    assert written_by("DeepSeek-V3", "call") == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        'get_weather\n```json\n{"city":"Zürich <&>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{"t": -3.5, "wind": "föhn"}<｜tool▁output▁end｜>'
        "<｜tool▁outputs▁end｜>"
    )
