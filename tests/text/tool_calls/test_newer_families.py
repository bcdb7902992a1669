"""Hy3, MiMo, Laguna, Jamba and others: their templates, their tokens, and whole responses through the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest
from msgspec.structs import replace

from pagewick.async_llm import AsyncEngine
from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.formats import format_named, format_of
from pagewick.text.tool_calls.offer import ToolOffer
from tests.fake_engine import FakeClient
from tests.server.api_routes import CHAT, events_of
from tests.text.tool_calls.families import TOOLS as TOOLS_OF_FORMS
from tests.text.tool_calls.forms import glm_45, hy_3, mimo
from tests.text.tool_calls.test_formats import BY_FAMILY, read
from tests.text.tool_calls.test_grammars import accepts
from tests.text.tool_calls.test_prompts_with_tools import ASK, BY_NAME, CALLED, TOOLS, encoder, prompt, result

CALL = [("get_weather", {"city": "Rome\n"})]

_Result = TypeVar("_Result")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{%- set HYTK = ':opensource' %} ... '<tool_calls{}>'.format(HYTK) ... '<tool_sep{}>'.format(HYTK)", "hy_v3"),
        ("<tool_calls>\n<tool_call>{function-name}<tool_sep>\n<arg_key>{arg-key-1}</arg_key>\n", "hy_v3_preview"),
        (
            "<function=f>\n<parameter=a>v</parameter> ... between parameter tags is preserved exactly as-is",
            "mimo",
        ),
        ("<tool_call>\n<function=f>\n<parameter=a>\nv\n</parameter> ... <im_patch>", "qwen3_coder"),  # Step 3.7
        ("<available_tools> ... <tool_call>name\n<arg_key>key</arg_key>\n<arg_value>...", "glm45"),  # Laguna
        ("{%- set bom_str = '<|bom|>' %} ... <tool_definitions> ... '<tool_calls>' ...", "hunyuan_a13b"),  # Jamba
        ("<|START_TEXT|> ... <|START_ACTION|>[ ... <|END_ACTION|>", "command_r7b"),  # Command A+
    ],
)
def test_the_format_of_a_template(source: str, name: str) -> None:
    assert format_of([source]).name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("hy_v3", "hy_v3"),
        ("mimo", "mimo"),
        ("poolside_v1", "glm45"),
        ("step3p5", "qwen3_coder"),
        ("jamba", "hunyuan_a13b"),
        ("cohere_command4", "command_r7b"),
        ("deepseekv31", "deepseek_v31"),
        ("gpt-oss", "openai"),
    ],
)
def test_names(alias: str, name: str) -> None:
    assert format_named(alias).name == name


class Writer(FakeClient):
    """Writes a family's control tokens as single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.info = replace(self.info, vocab_size=tokenizer.vocab_size, max_model_len=4096)

    def _token_ids(self, index: int) -> list[int]:
        return [*self.tokenizer.encode_pieces(["", self.texts[index]]), self.tokenizer.eos_token_ids[0]]

    def _delta(self, request: EngineRequest, index: int, position: int) -> RequestDelta:
        delta = super()._delta(request, index, position)
        if delta.token_ids == [self.tokenizer.eos_token_ids[0]]:
            delta.finish_reason, delta.stop_token_id = "stop", delta.token_ids[0]
        elif delta.finish_reason == "stop":  # the end token of another vocabulary
            delta.finish_reason, delta.stop_token_id = None, None
        return delta


class FamilyServer:
    """A server for a model of a family, which finds everything in its template and its tokenizer."""

    def __init__(self, name: str, text: str) -> None:
        self._tokenizer = encoder(name)[1]
        self._template = ChatTemplate({"default": BY_NAME[name].source}, self._tokenizer)
        self.client = Writer(self._tokenizer)
        self.client.texts = [text]

    def _run(self, work: Callable[[httpx.AsyncClient], Awaitable[_Result]]) -> _Result:
        async def main() -> _Result:
            engine = AsyncEngine(self.client, self._tokenizer, self._template)
            app = build_app(engine, ServerSettings(served_model_name=("model",)))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await work(http)

        return asyncio.run(main())

    def message(self, **fields: Any) -> dict[str, Any]:
        """Return the message, which must be the same in a stream."""
        asked = {"messages": [ASK], "tools": TOOLS, **fields}
        whole = self._run(lambda http: http.post(CHAT, json=asked)).json()["choices"][0]["message"]
        events = events_of(self._run(lambda http: http.post(CHAT, json={**asked, "stream": True})))
        deltas = [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == (whole.get(name) or "")
        pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls") or []]
        arguments = [one["function"]["arguments"] for one in whole.get("tool_calls") or []]
        assert "".join(piece.get("arguments") or "" for piece in pieces) == "".join(arguments)
        return whole  # type: ignore[no-any-return]


def parts_of(message: dict[str, Any]) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """Return the thoughts, the text and the calls of a message."""
    calls = [one["function"] for one in message.get("tool_calls") or []]
    found = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return message.get("reasoning_content"), message.get("content"), found


@pytest.mark.parametrize(
    ("family", "response", "fields"),
    [
        ("Hy3", f"I add.</think:opensource>So:{hy_3(CALL)}", {"reasoning_effort": "high"}),
        ("MiMo-V2", f"<think>I add.</think>So:{mimo(CALL)}", {"enable_thinking": True}),
        ("Laguna", f"I add.\n</think>\nSo:\n{glm_45(CALL)}\n", {"enable_thinking": True}),
    ],
)
def test_thoughts_text_and_calls(family: str, response: str, fields: dict[str, Any]) -> None:
    assert parts_of(FamilyServer(family, response).message(**fields)) == ("I add.", "So:", CALL)


@pytest.mark.parametrize(("family", "write"), [("Hy3", hy_3), ("MiMo-V2", mimo), ("Laguna", glm_45)])
def test_without_thoughts(family: str, write: Callable[[Any], str]) -> None:
    """The prompt has closed the thought."""
    assert parts_of(FamilyServer(family, write(CALL)).message()) == (None, None, CALL)
    assert parts_of(FamilyServer(family, "Four.").message()) == (None, "Four.", [])


def test_hy3_reads_the_effort() -> None:
    """Its template knows two efforts, and none, which is its default."""
    begun = "<｜hy_Assistant:opensource｜><think:opensource>"
    assert prompt("Hy3", ASK, chat_template_kwargs={"reasoning_effort": "low"}).endswith(begun)
    assert prompt("Hy3", ASK).endswith(f"{begun}</think:opensource>")


def test_values_of_mimo_keep_their_line_breaks() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\n a\n</parameter>\n</function>\n</tool_call>"
    assert read(BY_FAMILY["mimo"], text).parsed == [("get_weather", {"city": "\n a\n"})]
    assert read(BY_FAMILY["qwen_coder"], text).parsed == [("get_weather", {"city": " a"})]


def test_results_of_hy3_stand_together() -> None:
    text = prompt("Hy3", ASK, CALLED, result("c1", "windy"), tools=TOOLS)
    assert "<tool_responses:opensource>\n<tool_response:opensource>\nwindy\n</tool_response:opensource>\n" in text
    assert hy_3([("get_weather", {"city": "Rome"})]) in text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{%- set dsml = '｜DSML｜' -%}<' + dsml + 'tool_calls>\n<' + dsml + 'invoke ... string=\"true", "deepseek_v4"),
        ("{%- set dsml = '｜DSML｜' -%}<' + dsml + 'function_calls>\n<' + dsml + ' ... string=\"true", "deepseek_v32"),
        ('return <function name="f"><param name="p">v</param></function> ... split(\'<tool_sep>\')', "minicpm5"),
        ("role_sep=\"<|role_sep|>\n\" ... 'role': 'function call'", "gigachat3"),
        ('role_sep="<|role_sep|>\n", function_call="<|function_call|>" ... `function call`', "gigachat31"),
        (
            "`<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>` ... <role>OBSERVATION</role>",
            "glm45",
        ),  # Ling 3.0
    ],
)
def test_the_format_of_a_later_template(source: str, name: str) -> None:
    assert format_of([source]).name == name


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a < b", "<![CDATA[a < b]]>"),
        ("a\nb & c", "<![CDATA[a\nb & c]]>"),
        ('</param><param name="days">', '<![CDATA[</param><param name="days">]]>'),
        ("a]]>b", "<![CDATA[a]]>b]]>"),
        ("a]]>b", "a]]>b"),
        ("a <![CDATA[b]]>", "a <![CDATA[b]]>"),  # a section is the whole value
        ("a < b", "a < b"),
        ("", ""),
        ("", "<![CDATA[]]>"),
        ("]]>", "<![CDATA[]]>]]>"),
    ],
)
def test_texts_of_minicpm_in_sections(value: str, written: str) -> None:
    text = f'<function name="get_weather"><param name="city">{written}</param></function>'
    expected = [("get_weather", {"city": value})], ""
    for cuts in ((), range(1, len(text))):
        found = read(BY_FAMILY["minicpm_5"], text, *cuts)
        assert (found.parsed, found.shown) == expected
    if "<p" not in value:  # where tags are tokens, those in a value are given back later
        found = read(BY_FAMILY["minicpm_5"], text, has_tokens=True)
        assert (found.parsed, found.shown) == expected


def test_a_guided_text_of_minicpm_is_quoted_if_it_begins_like_a_tag() -> None:
    call = '<function name="get_weather"><param name="city">{}</param></function>'
    offer = ToolOffer(TOOLS_OF_FORMS, is_required=True)
    for value in ("Rome", "a < b & c", "<![CDATA[<p> </param> ]]>", "<![CDATA[a]]>b]]>"):
        assert accepts(BY_FAMILY["minicpm_5"], offer, call.format(value)), value
    for value in ("<p>", "<![CDATA[a]]", "<![CDATA[a]]>b"):
        assert not accepts(BY_FAMILY["minicpm_5"], offer, call.format(value)), value
