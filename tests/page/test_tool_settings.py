"""Settings of tools: their JSON, the choice among them, and what of both reaches a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.page.driver import answers, ask, ask_and_wait, close_settings, open_settings, set_field, wait_until_finished
from tests.page.stand_in import Answer, StandIn, call

FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]

WRONG = [
    ("[", "Tools must be JSON. Line 1, column 2: a value or ] is expected here."),
    ('[\n {"name": "f",}\n]', 'Tools must be JSON. Line 2, column 15: a name in double quotes is expected here.'),
    ("{'name': 'f'}", "Tools must be JSON. Line 1, column 2: a name in double quotes or } is expected here."),
    ('[{"name" "f"}]', "Tools must be JSON. Line 1, column 10: a colon is expected here."),
    ('[{"name": "f"]', "Tools must be JSON. Line 1, column 14: a comma or } is expected here."),
    (
        '[{"name": "f\n"}]',
        "Tools must be JSON. Line 1, column 11: a string that ends on its line, with \\n for line breaks and "
        "\\\\ for \\, is expected here.",
    ),
    ("[] x", "Tools must be JSON. Line 1, column 4: the end is expected here."),
    ('{"name": "f"}', "Tools must be a list: put [ and ] around it."),
    ("[1]", "Tool 1 must be an object with a name."),
    ('[{"type": "web_search"}]', 'Tool 1 has the type "web_search"; only "function" can be used.'),
    ('[{"type": "function", "function": 1}]', "Tool 1: function must be an object with a name."),
    ('[{"name": "f"}, {"description": "x"}]', "Tool 2 has no name; it must be a string."),
    ('[{"name": "f g"}]', 'Tool 1: the name "f g" must be 1 to 128 letters, digits or any of _ - .'),
    ('[{"name": "f"}, {"name": "f"}]', "Tool 2 has the name of another one, f."),
    (
        '[{"name": "f", "input_schema": {}}]',
        'Tool 1 (f) has a field that is not known, "input_schema"; known: name, description, parameters, strict.',
    ),
    ('[{"name": "f", "description": 1}]', "Tool 1 (f): description must be a string."),
    ('[{"name": "f", "strict": 1}]', "Tool 1 (f): strict must be true or false."),
    ('[{"name": "f", "parameters": []}]', "Tool 1 (f): parameters must be a JSON schema, an object."),
    (
        '[{"name": "f", "parameters": {"type": "string"}}]',
        'Tool 1 (f): parameters must have the type "object", since arguments have names.',
    ),
    (
        '[{"name": "f", "parameters": {"properties": {"a": 1}}}]',
        'Tool 1 (f): the parameter "a" must be a JSON schema, an object.',
    ),
    (
        '[{"name": "f", "parameters": {"properties": {"a": {"type": "int"}}}}]',
        'Tool 1 (f): the parameter "a" has the type "int"; it must be one of array, boolean, integer, null, number, '
        "object, string.",
    ),
    ('[{"name": "f", "parameters": {"required": "a"}}]', "Tool 1 (f): parameters.required must be a list of names."),
    (json.dumps([{"name": f"f{number}"} for number in range(129)]), "Tools must be at most 128; these are 129."),
]  # fmt: skip

# Changes valid JSON at each place, and compares the page's judgement with that of JSON.parse.
JUDGE = """async (texts) => {
  const { parseJson } = await import("/page/json.js");
  const wrong = [];
  for (const text of texts) {
    let isJson = true;
    try { JSON.parse(text); } catch { isJson = false; }
    let message = "";
    try { parseJson(text); } catch (error) { message = error.message; }
    if (isJson !== (message === "") || (message && !/^Line \\d+, column \\d+: .+ is expected here\\.$/.test(message))) {
      wrong.push([text, message]);
    }
  }
  return wrong;
}"""


def tools_field(dialog: Locator) -> Locator:
    return dialog.get_by_label("Tools (JSON)")


def give_tools(page: Page, tools: object = TOOLS, choice: str | None = None) -> None:
    open_settings(page)
    set_field(page, "Tools (JSON)", json.dumps(tools))
    if choice is not None:
        set_field(page, "Tool choice", choice)
    close_settings(page)


def test_wrong_tools_are_explained_at_their_field(page: Page, stand_in: StandIn) -> None:
    dialog = open_settings(page)
    for text, error in WRONG:
        tools_field(dialog).fill(text)
        expect(dialog.locator("#setting-tools-error")).to_have_text(error)
        expect(tools_field(dialog)).to_have_attribute("aria-invalid", "true")
    tools_field(dialog).fill("[")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.get_by_role("button", name="Settings (1 is wrong)")).to_be_visible()
    ask(page, "Hi")
    expect(tools_field(dialog)).to_be_focused()
    expect(tools_field(dialog)).to_have_value("[")
    assert stand_in.bodies == []
    tools_field(dialog).fill("[]")
    close_settings(page)
    page.get_by_role("textbox", name="Message", exact=True).press("Enter")
    expect(answers(page)).to_have_count(1)
    wait_until_finished(page)
    assert "tools" not in stand_in.bodies[0]


@pytest.mark.parametrize(
    "tools", [TOOLS, [FUNCTION], [{"type": "function", **FUNCTION}]], ids=["openai", "bare", "flat"]
)
def test_tools_are_sent_in_the_form_of_openai(page: Page, stand_in: StandIn, tools: list[Any]) -> None:
    give_tools(page, tools)
    ask_and_wait(page, "Hi")
    assert stand_in.bodies[0]["tools"] == TOOLS
    assert "tool_choice" not in stand_in.bodies[0]


def test_the_choice_is_sent_and_follows_the_tools(page: Page, stand_in: StandIn) -> None:
    choices = {
        "auto": "auto",
        "none": "none",
        "required": "required",
        "function:get_weather": {"type": "function", "function": {"name": "get_weather"}},
    }
    for choice in choices:
        give_tools(page, choice=choice)
        ask_and_wait(page, choice)
    assert [body["tool_choice"] for body in stand_in.bodies] == list(choices.values())
    dialog = open_settings(page)
    error = dialog.locator("#setting-tool_choice-error")
    expect(dialog.get_by_label("Tool choice").locator("option")).to_have_text(
        ["server default", "auto", "none", "required", "only get_weather"]
    )
    tools_field(dialog).fill('[{"name": "other"}]')
    expect(error).to_have_text("Tool choice names get_weather, which is not one of the tools.")
    expect(dialog.get_by_label("Tool choice")).to_have_value("function:get_weather")
    tools_field(dialog).fill("")
    expect(error).to_have_text("Tool choice needs tools: add some, or choose auto or none.")
    set_field(page, "Tool choice", "none")
    expect(error).to_have_text("")
    close_settings(page)
    ask_and_wait(page, "Without tools")
    assert not {"tools", "tool_choice"} & set(stand_in.bodies[-1])


def test_a_conversation_has_its_own_tools_or_none(page: Page, stand_in: StandIn) -> None:
    give_tools(page)
    dialog = open_settings(page)
    dialog.get_by_role("radio", name="This conversation").check()
    expect(tools_field(dialog)).to_have_attribute("placeholder", json.dumps(TOOLS))
    # The tools of all conversations can be chosen here, too.
    set_field(page, "Tool choice", "function:get_weather")
    tools_field(dialog).fill("[]")
    expect(dialog.locator("#setting-tool_choice-error")).to_contain_text("Tool choice needs tools")
    set_field(page, "Tool choice", "")
    close_settings(page)
    ask_and_wait(page, "Without tools")
    page.get_by_role("button", name="New chat").click()
    ask_and_wait(page, "With tools")
    assert [body.get("tools") for body in stand_in.bodies] == [None, TOOLS]


def test_the_example_is_right_and_inserted_only_into_an_empty_field(page: Page, stand_in: StandIn) -> None:
    dialog = open_settings(page)
    button = dialog.get_by_role("button", name="Insert an example")
    button.click()
    expect(tools_field(dialog)).to_be_focused()
    expect(button).to_be_hidden()
    close_settings(page)
    page.reload()
    ask_and_wait(page, "Hi")
    names = [tool["function"]["name"] for tool in stand_in.bodies[0]["tools"]]
    assert names == ["get_weather", "get_time", "add"]


def test_a_forced_call_is_forced_once_per_message(page: Page, stand_in: StandIn) -> None:
    give_tools(page, choice="required")
    stand_in.answers = [Answer(call(0, "c1", "get_weather", '{"city": "Rome"}'), finish_reason="tool_calls")]
    ask_and_wait(page, "Weather?")
    page.get_by_label("Result of get_weather").fill("sunny")
    page.get_by_role("button", name="Send the result").click()
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    ask_and_wait(page, "And now?")
    assert [body["tool_choice"] for body in stand_in.bodies] == ["required", "auto", "required"]


def test_json_is_judged_as_the_browser_judges_it(page: Page) -> None:
    valid = '[{"a": [1, -0.5e+3, true, null, "x\\n\\u00e9"], "": {}}, [],\n"y"]'
    pieces = ["", "]", "}", ",", ":", '"', "0", "x", "{", "[", "\\"]
    texts = [
        valid[:at] + piece + valid[at + cut :] for at in range(len(valid) + 1) for piece in pieces for cut in (0, 1)
    ]
    assert page.evaluate(JUDGE, [*texts, "", " ", "01", "nul", "tru e", '"\t"', "\u00a01", "-", "1."]) == []


def test_the_layout_of_json_keeps_numbers_and_strings(page: Page) -> None:
    text = '{"n": 12345678901234567890, "x": 1.0, "s": "a  b, {c}", "e": {}, "l": [1, []]}'
    pretty = page.evaluate("async (text) => (await import('/page/json.js')).prettyJson(text)", text)
    lines = ["{", '  "n": 12345678901234567890,', '  "x": 1.0,', '  "s": "a  b, {c}",', '  "e": {},', '  "l": [']
    assert pretty.split("\n") == [*lines, "    1,", "    []", "  ]", "}"]
    # A model may write many brackets. Their layout grows with their number, not with its square.
    deep = page.evaluate(
        "async (depth) => (await import('/page/json.js')).prettyJson('['.repeat(depth) + ']'.repeat(depth)).length",
        9000,
    )
    assert deep < 9000 * 200
    assert page.evaluate("async () => (await import('/page/json.js')).prettyJson('{\"a\":')") is None
