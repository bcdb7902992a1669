"""Settings: of all conversations and of one, and what happens to wrong ones."""

from __future__ import annotations

import json

from playwright.sync_api import Locator, Page, expect

from tests.page.driver import (
    answers,
    ask,
    ask_and_wait,
    close_settings,
    composer,
    edit,
    open_settings,
    questions,
    set_field,
    wait_until_finished,
)
from tests.page.stand_in import MODEL, StandIn

SENT_ALWAYS = {"model", "messages", "stream", "stream_options"}


def choose(dialog: Locator, scope: str) -> None:
    dialog.get_by_role("radio", name=scope).check()


def test_settings_reach_the_request_and_stay(page: Page, stand_in: StandIn) -> None:
    open_settings(page)
    fields = {
        "System prompt": "Be brief.",
        "Temperature": "0.25",
        "Top p": "0.9",
        "Top k": "40",
        "Min p": "0.05",
        "Repetition penalty": "1.1",
        "Max tokens": "77",
        "Seed": "0",
        "Thinking": "off",
        "Stop strings": "END\n\\n\\n",
    }
    for label, value in fields.items():
        set_field(page, label, value)
    close_settings(page)
    page.reload()
    ask_and_wait(page, "Hi")
    assert stand_in.bodies[0] == {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.25,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 77,
        "seed": 0,
        "stop": ["END", "\n\n"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    open_settings(page)
    page.get_by_role("button", name="Reset").click()
    close_settings(page)
    ask_and_wait(page, "Again")
    assert set(stand_in.bodies[1]) == SENT_ALWAYS
    assert stand_in.bodies[1]["messages"][0]["role"] == "user"


def test_a_wrong_setting_is_shown_at_its_field(page: Page) -> None:
    dialog = open_settings(page)
    for label, value, error in (
        ("Temperature", "warm", "Temperature must be a number."),
        ("Top p", "1.5", "Top p must be 0.01 to 1."),
        ("Top k", "0.5", "Top k must be a whole number."),
        ("Max tokens", "0", "Max tokens must be 1 or more."),
        ("Repetition penalty", "11", "Repetition penalty must be 0.01 to 10."),
        ("Stop strings", "x\n" * 17, "Stop strings must be at most 16; these are 17."),
    ):
        set_field(page, label, value)
        expect(dialog.get_by_text(error)).to_be_visible()
        expect(dialog.get_by_label(label)).to_have_attribute("aria-invalid", "true")
    # The dialog stays open, at the first wrong field.
    dialog.get_by_role("button", name="Done").click()
    expect(dialog.get_by_label("Temperature")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings (6 are wrong)")).to_be_visible()


def test_a_wrong_setting_stays_and_nothing_is_sent_until_it_is_right(page: Page, stand_in: StandIn) -> None:
    open_settings(page)
    set_field(page, "Temperature", "5")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.get_by_role("button", name="Settings (1 is wrong)")).to_be_visible()
    ask(page, "Hi")
    dialog = page.get_by_role("dialog", name="Settings")
    field = dialog.get_by_label("Temperature")
    expect(field).to_be_focused()
    expect(field).to_have_value("5")
    expect(dialog.get_by_text("Temperature must be 0 to 2.")).to_be_visible()
    assert stand_in.bodies == []
    field.fill("1.5")
    close_settings(page)
    expect(composer(page)).to_have_value("Hi")
    composer(page).press("Enter")
    expect(answers(page)).to_have_count(1)
    wait_until_finished(page)
    assert stand_in.bodies[0]["temperature"] == 1.5


def test_a_wrong_setting_that_is_stored_is_shown(page: Page) -> None:
    """Older versions of the page stored numbers, and ignored wrong ones."""
    page.evaluate(
        """localStorage.setItem("pagewick.settings", JSON.stringify({ temperature: 3, top_k: 7, other: 1 }))"""
    )
    page.reload()
    page.get_by_role("button", name="Settings (1 is wrong)").click()
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog.get_by_text("Temperature must be 0 to 2.")).to_be_visible()
    expect(dialog.get_by_label("Top k")).to_have_value("7")


def test_an_edited_question_waits_for_right_settings(page: Page, stand_in: StandIn) -> None:
    ask_and_wait(page, "Hi")
    open_settings(page)
    set_field(page, "Seed", "-1")
    page.keyboard.press("Escape")
    edit(page, questions(page).first, "Hello")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("textbox", name="Edit the message")).to_have_value("Hello")
    assert len(stand_in.bodies) == 1


def test_a_conversation_has_its_own_settings(page: Page, stand_in: StandIn) -> None:
    dialog = open_settings(page)
    set_field(page, "System prompt", "Be brief.")
    set_field(page, "Temperature", "0.5")
    choose(dialog, "This conversation")
    expect(dialog.get_by_label("Temperature")).to_have_value("")
    expect(dialog.get_by_label("Temperature")).to_have_attribute("placeholder", "0.5")
    set_field(page, "System prompt", "Be long.")
    set_field(page, "Top k", "3")
    close_settings(page)
    ask_and_wait(page, "With its own")
    own = page.get_by_role("button", name="Settings (this conversation has its own)")
    expect(own).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(own).to_have_count(0)
    ask_and_wait(page, "Without")
    page.reload()
    page.get_by_role("button", name="With its own", exact=True).click()
    ask_and_wait(page, "More")
    sent = [(body["messages"][0]["content"], body["temperature"], body.get("top_k")) for body in stand_in.bodies]
    assert sent == [("Be long.", 0.5, 3), ("Be brief.", 0.5, None), ("Be long.", 0.5, 3)]
    own.click()
    expect(dialog.get_by_role("radio", name="This conversation")).to_be_checked()
    dialog.get_by_role("button", name="Reset").click()
    close_settings(page)
    ask_and_wait(page, "As all")
    assert stand_in.bodies[-1]["messages"][0]["content"] == "Be brief."


def test_a_new_chat_forgets_settings_that_were_never_used(page: Page, stand_in: StandIn) -> None:
    dialog = open_settings(page)
    choose(dialog, "This conversation")
    set_field(page, "Temperature", "1")
    close_settings(page)
    page.get_by_role("button", name="New chat").click()
    ask_and_wait(page, "Hi")
    assert set(stand_in.bodies[0]) == SENT_ALWAYS
    stored = page.evaluate("JSON.stringify({ ...localStorage })")
    assert "temperature" not in json.loads(stored).get("pagewick.settings", "")


def test_a_wrong_setting_of_a_conversation_does_not_stop_others(page: Page, stand_in: StandIn) -> None:
    ask_and_wait(page, "First")
    dialog = open_settings(page)
    choose(dialog, "This conversation")
    set_field(page, "Top p", "2")
    page.keyboard.press("Escape")
    ask(page, "More")
    expect(dialog.get_by_role("radio", name="This conversation")).to_be_checked()
    expect(dialog.get_by_label("Top p")).to_be_focused()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New chat").click()
    ask_and_wait(page, "Other")
    assert len(stand_in.bodies) == 2
