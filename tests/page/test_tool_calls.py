"""Calls of tools: how they appear, their results, and that all that the page does with messages keeps both."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.page.conftest import NewPage
from tests.page.driver import (
    IS_SENDING,
    again,
    answers,
    ask,
    ask_and_wait,
    close_settings,
    composer,
    conversations,
    edit,
    go_on_in_time_for_a_speed,
    has_no_horizontal_scroll,
    open_settings,
    questions,
    set_field,
    text_of,
    version,
    wait_until_finished,
)
from tests.page.stand_in import Answer, Delta, StandIn, call
from tests.page.test_access import PHONE, violations
from tests.page.test_security import FOUND, NOTHING, PAYLOADS
from tests.page.test_transfer import import_, saved

ROME = '{"city": "Rome"}'
PARIS = '{"city": "Paris"}'
NO_RESULT = "No result was given."


def calling(*deltas: Delta, **fields: Any) -> Answer:
    return Answer(list(deltas), **{"finish_reason": "tool_calls", **fields})


def one_call() -> Answer:
    return calling(*call(0, "c1", "get_weather", '{"city":', ' "Rome"}'))


def two_calls() -> Answer:
    return calling(*call(0, "c1", "get_weather", ROME), *call(1, "c2", "get_weather", PARIS))


def sent_call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def sent_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def calls(page: Page) -> Locator:
    return page.locator(".tool")


def result_field(page: Page, label: str = "Result of get_weather") -> Locator:
    return page.get_by_role("textbox", name=label)


def send_result(page: Page, text: str) -> None:
    result_field(page).fill(text)
    page.get_by_role("button", name="Send the result", exact=True).click()
    wait_until_finished(page)


def folded_result(call: Locator) -> Locator:
    return call.locator(".returned")


def results_version(page: Page) -> Locator:
    return page.locator(".results-foot .branch-count [aria-hidden]")


def test_a_call_grows_folded_and_unfolds(page: Page, stand_in: StandIn) -> None:
    answer = one_call()
    answer.holds_after = 2
    stand_in.answers = [answer]
    ask(page, "Weather?")
    summary = calls(page).locator("summary")
    expect(summary).to_have_text('Call of get_weather{"city":')
    expect(calls(page).locator("figure")).to_have_count(0)
    summary.press("Enter")
    expect(calls(page).locator("code")).to_have_text('{"city":')
    expect(result_field(page)).to_have_count(0)
    expect(answers(page).last.locator(".stats")).to_have_text("2 tokens")
    stand_in.go_on()
    wait_until_finished(page)
    expect(calls(page).locator("code")).to_have_text('{\n  "city": "Rome"\n}')
    expect(calls(page).locator("code .hljs-attr")).to_have_text('"city"')
    expect(calls(page).locator("details")).to_have_attribute("open", "")
    expect(answers(page).last.locator(".note")).to_have_count(0)
    expect(page.get_by_role("status").first).to_have_text("The model calls get_weather and waits for the result.")


def test_a_result_is_sent_and_shown_under_its_call(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [one_call(), Answer(["It is sunny."])]
    ask_and_wait(page, "Weather?")
    expect(result_field(page)).to_be_focused()
    page.keyboard.type('{"sky": "sunny"}')
    page.keyboard.press("Control+Enter")
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    expect(text_of(answers(page).last)).to_have_text("It is sunny.")
    assert stand_in.bodies[1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [sent_call("c1", ROME)]},
        sent_result("c1", '{"sky": "sunny"}'),
    ]
    page.reload()
    expect(result_field(page)).to_have_count(0)
    expect(folded_result(calls(page)).locator("summary")).to_have_text('Result{"sky": "sunny"}')
    folded_result(calls(page)).locator("summary").click()
    expect(folded_result(calls(page)).locator("code")).to_have_text('{\n  "sky": "sunny"\n}')
    ask_and_wait(page, "Thanks")
    assert stand_in.bodies[2]["messages"][1:] == [
        *stand_in.bodies[1]["messages"][1:],
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks"},
    ]


def test_each_call_needs_a_result(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [two_calls()]
    ask_and_wait(page, "Weather?")
    first, second = (result_field(page, f"Result of call {number}, get_weather") for number in (1, 2))
    first.fill("plain text")
    page.get_by_role("button", name="Send the results").click()
    expect(second).to_be_focused()
    expect(second).to_have_attribute("aria-invalid", "true")
    expect(calls(page).last.get_by_role("alert")).to_have_text(
        "Type the result of this call. For a tool that returns nothing, type null."
    )
    assert len(stand_in.bodies) == 1
    second.fill("null")
    expect(second).not_to_have_attribute("aria-invalid", "true")
    second.press("Control+Enter")
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    assert stand_in.bodies[1]["messages"][2:] == [sent_result("c1", "plain text"), sent_result("c2", "null")]
    folded_result(calls(page).first).locator("summary").click()
    expect(folded_result(calls(page).first).locator("figcaption")).to_have_text("Plain text")


def test_a_message_instead_of_results_takes_those_that_were_typed(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [two_calls(), Answer(["Fine."]), two_calls()]
    ask_and_wait(page, "Weather?")
    result_field(page, "Result of call 2, get_weather").fill("rainy")
    page.reload()
    # The page keeps a typed result until the user sends it.
    expect(result_field(page, "Result of call 2, get_weather")).to_have_value("rainy")
    ask_and_wait(page, "Never mind")
    results = [sent_result("c1", NO_RESULT), sent_result("c2", "rainy")]
    assert stand_in.bodies[1]["messages"][2:] == [*results, {"role": "user", "content": "Never mind"}]
    expect(calls(page).first).to_contain_text(NO_RESULT)
    expect(folded_result(calls(page).last).locator("summary")).to_have_text("Resultrainy")
    # Nothing was typed: each call still has a result in the request, and later on the user may give others.
    ask_and_wait(page, "Again?")
    ask_and_wait(page, "Stop it")
    assert [message["content"] for message in stand_in.bodies[3]["messages"][-3:]] == [NO_RESULT, NO_RESULT, "Stop it"]
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('draft'))") == []
    page.get_by_role("button", name="Give results").click()
    for number in (1, 2):
        result_field(page, f"Result of call {number}, get_weather").fill(f"result {number}")
    page.get_by_role("button", name="Send the results").click()
    wait_until_finished(page)
    expect(questions(page).last.locator(".bubble")).to_have_text("Again?")
    expect(results_version(page).last).to_have_text("2/2")
    page.locator(".results-foot").get_by_role("button", name="Previous version").last.click()
    expect(questions(page).last.locator(".bubble")).to_have_text("Stop it")


def test_parts_keep_their_order(page: Page, stand_in: StandIn) -> None:
    deltas: list[Delta] = [
        {"reasoning_content": "First."},
        {"content": "Let me "},
        {"content": "look."},
        *call(0, "c1", "get_weather", ROME),
        {"content": "And"},
        {"reasoning_content": "Second."},
        {"content": " then:"},
        *call(1, "c2", "get_weather", PARIS),
    ]
    stand_in.answers = [calling(*deltas)]
    ask_and_wait(page, "Weather?")
    order = [
        "details Thoughts", "div Let me look.", "tool get_weather", "div And", "details Thoughts", "div then:",
        "tool get_weather",
    ]  # fmt: skip
    seen = """() => [...document.querySelectorAll(".parts > *")].map((one) => one.className === "tool"
      ? `tool ${one.querySelector(".folded-title").textContent}`
      : `${one.localName} ${(one.querySelector("summary") ?? one).textContent.trim()}`)"""
    assert page.evaluate(seen) == order
    page.reload()
    expect(calls(page)).to_have_count(2)
    assert page.evaluate(seen) == order
    ask_and_wait(page, "Go on")
    message = stand_in.bodies[1]["messages"][1]
    assert message["content"] == "Let me look.And then:"
    assert [one["id"] for one in message["tool_calls"]] == ["c1", "c2"]


def test_the_model_reads_its_thoughts_until_the_next_message(page: Page, stand_in: StandIn) -> None:
    answer = one_call()
    answer.thoughts = ["Look it up."]
    stand_in.answers = [answer, Answer(["Sunny."])]
    ask_and_wait(page, "Weather?")
    send_result(page, "sunny")
    expect(text_of(answers(page).last)).to_have_text("Sunny.")
    ask_and_wait(page, "Thanks")
    thoughts = [body["messages"][1].get("reasoning_content") for body in stand_in.bodies[1:]]
    assert thoughts == ["Look it up.", None]


def test_other_results_and_other_answers_are_branches(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [one_call(), Answer(["Sunny."]), Answer(["Bright."]), Answer(["Rainy."]), one_call()]
    ask_and_wait(page, "Weather?")
    send_result(page, "sunny")
    again(answers(page).last)
    expect(text_of(answers(page).last)).to_have_text("Bright.")
    wait_until_finished(page)
    page.get_by_role("button", name="Edit the results").click()
    expect(result_field(page)).to_be_focused()
    expect(result_field(page)).to_have_value("sunny")
    result_field(page).press("Escape")
    expect(page.get_by_role("button", name="Edit the results")).to_be_focused()
    page.get_by_role("button", name="Edit the results").click()
    send_result(page, "rainy")
    expect(text_of(answers(page).last)).to_have_text("Rainy.")
    expect(results_version(page)).to_have_text("2/2")
    assert [body["messages"][2]["content"] for body in stand_in.bodies[1:]] == ["sunny", "sunny", "rainy"]
    previous = page.locator(".results-foot").get_by_role("button", name="Previous version")
    previous.click()
    expect(text_of(answers(page).last)).to_have_text("Bright.")
    expect(folded_result(calls(page))).to_contain_text("sunny")
    expect(version(answers(page).last)).to_have_text("2/2")
    # Another version of the answer with the call begins without a result.
    again(answers(page).first)
    expect(version(answers(page).first)).to_have_text("2/2")
    wait_until_finished(page)
    expect(result_field(page)).to_have_value("")
    edit(page, questions(page).first, "And in Oslo?")
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    assert stand_in.bodies[-1]["messages"] == [{"role": "user", "content": "And in Oslo?"}]


def test_an_edited_answer_keeps_its_calls(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [calling({"content": "I look."}, *call(0, "c1", "get_weather", ROME))]
    ask_and_wait(page, "Weather?")
    answers(page).last.get_by_role("button", name="Edit the answer").click()
    expect(page.get_by_role("button", name="Send the result")).to_be_hidden()
    page.get_by_role("textbox", name="Edit the answer").fill("I look it up.")
    page.keyboard.press("Control+Enter")
    expect(version(answers(page).last)).to_have_text("2/2")
    expect(text_of(answers(page).last)).to_have_text("I look it up.")
    # The model cannot go on behind a call.
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    send_result(page, "sunny")
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    message = stand_in.bodies[1]["messages"][1]
    assert (message["content"], message["tool_calls"]) == ("I look it up.", [sent_call("c1", ROME)])


def test_a_call_that_was_cut_is_kept_and_not_sent(page: Page, stand_in: StandIn) -> None:
    deltas = [*call(0, "c1", "get_weather", ROME), *call(1, "c2", "get_weather", '{"city": "Pa', 'ris"}')]
    stand_in.answers = [calling(*deltas, holds_after=4)]
    ask(page, "Weather?")
    expect(calls(page).last.locator("summary")).to_contain_text('{"city": "Pa')
    page.reload()
    expect(calls(page)).to_have_count(2)
    expect(calls(page).last).to_contain_text("This call is incomplete.")
    expect(answers(page).last.locator(".note")).to_contain_text("Cut: the page was closed or reloaded")
    send_result(page, "sunny")
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    assert stand_in.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [sent_call("c1", ROME)]},
        sent_result("c1", "sunny"),
    ]


def test_the_speed_counts_the_tokens_of_calls(page: Page, stand_in: StandIn) -> None:
    answer = one_call()
    answer.holds_after = 2
    stand_in.answers = [answer]
    ask(page, "Weather?")
    go_on_in_time_for_a_speed(page, stand_in)
    expect(answers(page).last.locator(".stats")).to_contain_text("tokens/s")
    wait_until_finished(page)
    expect(answers(page).last.locator(".stats")).to_contain_text("9 tokens")
    expect(answers(page).last.locator(".stats")).to_contain_text("context 49 / 2,048")


def test_the_focus_stays_with_a_user_who_is_writing(page: Page, stand_in: StandIn) -> None:
    answer = one_call()
    answer.holds_after = 1
    stand_in.answers = [answer]
    ask(page, "Weather?")
    expect(page.get_by_role("button", name=IS_SENDING)).to_be_visible()
    composer(page).fill("By the way")
    stand_in.go_on()
    wait_until_finished(page)
    expect(result_field(page)).to_be_visible()
    expect(composer(page)).to_be_focused()


def test_results_wait_for_right_settings(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [one_call(), Answer(["Sunny."])]
    ask_and_wait(page, "Weather?")
    open_settings(page)
    set_field(page, "Temperature", "9")
    page.keyboard.press("Escape")
    result_field(page).fill("sunny")
    result_field(page).press("Control+Enter")
    field = page.get_by_role("dialog", name="Settings").get_by_label("Temperature")
    expect(field).to_be_focused()
    assert len(stand_in.bodies) == 1
    field.fill("")
    close_settings(page)
    expect(result_field(page)).to_be_focused()
    result_field(page).press("Control+Enter")
    expect(text_of(answers(page).last)).to_have_text("Sunny.")


def test_stopping_within_a_call_keeps_the_rest_of_the_answer(page: Page, stand_in: StandIn) -> None:
    deltas: list[Delta] = [{"content": "I look."}, *call(0, "c1", "get_weather", '{"city": "Ro', 'me"}')]
    stand_in.answers = [calling(*deltas, holds_after=3)]
    ask(page, "Weather?")
    expect(calls(page).locator("summary")).to_contain_text('{"city": "Ro')
    page.keyboard.press("Escape")
    wait_until_finished(page)
    expect(answers(page).last.locator(".note p")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    expect(page.locator(".result textarea")).to_have_count(0)
    ask_and_wait(page, "Go on")
    assert stand_in.bodies[1]["messages"][1] == {"role": "assistant", "content": "I look."}


def test_exports_have_calls_and_results(page: Page, new_page: NewPage, stand_in: StandIn) -> None:
    stand_in.answers = [calling({"content": "I look."}, *call(0, "c1", "get_weather", ROME)), Answer(["Sunny."])]
    ask_and_wait(page, "Weather?")
    send_result(page, "sunny\n```")
    _, markdown = saved(page, "Export as Markdown")
    assert markdown == (
        "# Weather?\n\n## You\n\nWeather?\n\n## org/stand-in\n\nI look.\n\n"
        'Call of get_weather:\n\n```json\n{\n  "city": "Rome"\n}\n```\n\nResult:\n\n````\nsunny\n```\n````\n\n'
        "## org/stand-in\n\nSunny.\n"
    )
    _, text = saved(page, "Export as JSON")
    other = new_page()
    import_(other, text)
    other.get_by_role("button", name="Weather?", exact=True).click()
    expect(text_of(answers(other).first)).to_have_text("I look.")
    expect(folded_result(calls(other))).to_contain_text("sunny")
    expect(result_field(other)).to_have_count(0)
    ask_and_wait(other, "Thanks")
    assert stand_in.bodies[-1]["messages"][1:3] == [
        {"role": "assistant", "content": "I look.", "tool_calls": [sent_call("c1", ROME)]},
        sent_result("c1", "sunny\n```"),
    ]


def test_an_answer_is_copied_with_its_calls(new_page: NewPage, stand_in: StandIn) -> None:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    stand_in.answers = [one_call()]
    ask_and_wait(page, "Weather?")
    answers(page).last.get_by_role("button", name="Copy the answer").click()
    expect(page.get_by_role("status").first).to_have_text("Copied.")
    assert (
        page.evaluate("navigator.clipboard.readText()")
        == 'Call of get_weather:\n\n```json\n{\n  "city": "Rome"\n}\n```'
    )


def test_calls_and_results_are_found(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [one_call()]
    ask_and_wait(page, "Question")
    send_result(page, "a clear sky")
    for wanted in ("GET_WEATHER", "rome", "clear sky"):
        page.get_by_role("searchbox").fill(wanted)
        expect(conversations(page)).to_have_count(1)
        expect(page.locator(".snippet mark")).to_have_text(wanted, ignore_case=True)


def imported(*nodes: dict[str, Any]) -> str:
    chain = [
        {"id": str(place), "parentId": str(place - 1) if place else None, "content": "", **node}
        for place, node in enumerate(nodes)
    ]
    conversation = {"title": "Imported", "selectedRoot": "0", "nodes": chain}
    return json.dumps({"format": "pagewick-conversations", "version": 1, "conversations": [conversation]})


def test_wrong_calls_and_results_are_not_imported(page: Page) -> None:
    question = {"role": "user", "content": "Hi"}
    whole = {"id": "c1", "name": "f", "arguments": "{}"}
    called = {"role": "assistant", "calls": [whole], "finishReason": "tool_calls"}
    for nodes, error in (
        ([question, {**called, "calls": [{"id": "c1"}]}], "message 2 has calls without id, name, arguments."),
        ([question, {**called, "calls": [whole, whole]}], "message 2 has calls with the same id."),
        ([question, called, {"role": "tool", "results": "x"}], "message 3 has results without id, content."),
        (
            [question, called, {"role": "tool", "results": [{"id": "c2", "content": "x"}]}],
            "message 3 has results of calls that are not above it.",
        ),
        ([question, {"role": "tool", "results": []}], "message 2 has results of calls that are not above it."),
    ):
        import_(page, imported(*nodes))
        expect(page.locator("#toast")).to_have_text(f"Nothing was imported. Conversation 1, {error}")
    # An order that does not fit is left out.
    import_(page, imported(question, {**called, "order": [["calls", 2]]}))
    page.get_by_role("button", name="Imported", exact=True).click()
    expect(result_field(page, "Result of f")).to_be_visible()


def test_calls_and_results_are_only_text(page: Page, stand_in: StandIn) -> None:
    payload = " ".join(PAYLOADS)
    stand_in.answers = [calling(*call(0, "c1", payload, json.dumps({payload: payload})))]
    ask_and_wait(page, "Attack")
    page.locator(".result textarea").fill(json.dumps(payload))
    page.get_by_role("button", name="Send the result").click()
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    for summary in calls(page).locator("summary").all():
        summary.click()
    expect(calls(page).locator("code")).to_have_count(2)
    expect(calls(page).locator("code").last).to_contain_text("evil.example")
    assert page.evaluate(FOUND) == NOTHING


def test_calls_on_a_phone_and_for_screen_readers(new_page: NewPage, stand_in: StandIn) -> None:
    for options in ({"viewport": PHONE, "is_mobile": True, "has_touch": True}, {"color_scheme": "dark"}):
        page = new_page(reduced_motion="reduce", **options)
        long = json.dumps({"city": "R" * 300})
        deltas = [*call(0, "c1", "get_weather", long), *call(1, "c2", "f" * 100, '{"a": 1}'), *call(2, "c3", "f", '{"')]
        stand_in.answers = [calling(*deltas), Answer()]
        ask_and_wait(page, "Weather?")
        page.get_by_role("button", name="Send the results").click()
        for summary in calls(page).locator("summary").all():
            summary.click()
        assert has_no_horizontal_scroll(page)
        assert page.locator("#scroller").evaluate("(s) => s.scrollWidth <= s.clientWidth")
        assert violations(page) == []
        for field in page.locator(".result textarea").all():
            field.fill(long)
        page.get_by_role("button", name="Send the results").click()
        expect(answers(page)).to_have_count(2)
        wait_until_finished(page)
        folded_result(calls(page).first).locator("summary").click()
        assert has_no_horizontal_scroll(page)
        assert violations(page) == []
        buttons = answers(page).first.locator(".foot").get_by_role("button").all()
        assert len({box["y"] for one in buttons if (box := one.bounding_box())}) == 1
