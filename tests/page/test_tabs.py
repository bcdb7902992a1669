"""Several tabs with the same conversations."""

from __future__ import annotations

import json

from playwright.sync_api import FilePayload, Page, expect

from tests.page.driver import (
    answers,
    ask,
    ask_and_wait,
    close_settings,
    continue_button,
    conversations,
    delete,
    open_settings,
    questions,
    set_field,
    text_of,
    until,
    version,
    wait_until_finished,
)
from tests.page.stand_in import Answer, StandIn


def test_two_tabs_show_the_same_conversations(page: Page) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    ask_and_wait(page, "Shared")
    other.get_by_role("button", name="Shared", exact=True).click()
    ask_and_wait(other, "From the other tab")
    expect(questions(page)).to_have_count(2)
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    delete(other, "Shared")
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    other.close()


def test_a_tab_that_opens_misses_nothing(page: Page) -> None:
    other = page.context.new_page()
    other.add_init_script("""
      const { getAll } = IDBObjectStore.prototype;
      IDBObjectStore.prototype.getAll = function () {
        const held = {};
        const request = getAll.call(this);
        request.onsuccess = () => {
          window.passOn = () => { held.result = request.result; held.onsuccess(); };
        };
        return held;
      };
    """)
    other.goto(page.url)
    until(lambda: other.evaluate("'passOn' in window"))
    ask_and_wait(page, "Hi")
    other.evaluate("passOn()")
    other.get_by_role("button", name="Hi", exact=True).click()
    expect(text_of(answers(other).last)).to_have_text("Hello from the stand-in.")
    other.close()


def test_two_tabs_that_write_at_once_keep_both_answers(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["First", " whole"], holds_after=1), Answer(["Second", " whole"], holds_after=1)]
    ask(page, "One")
    expect(text_of(answers(page).last)).to_have_text("First")
    other = page.context.new_page()
    other.goto(page.url)
    expect(answers(other)).to_have_count(1)
    ask(other, "Two")
    expect(text_of(answers(other).last)).to_have_text("Second")
    stand_in.go_on()
    wait_until_finished(page)
    wait_until_finished(other)
    for has_reloaded in (False, True):
        for tab in (page, other):
            if has_reloaded:
                tab.reload()
            expect(answers(tab)).to_have_count(2)
            expect(text_of(answers(tab).first)).to_have_text("First whole")
            expect(text_of(answers(tab).last)).to_have_text("Second whole")
            expect(tab.locator(".note")).to_have_count(0)
    other.close()


def test_a_tab_does_not_put_back_an_answer_that_another_tab_continues(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["one"], finish_reason="length"), Answer([" two", " three"], holds_after=1)]
    ask_and_wait(page, "Count")
    expect(page.locator(".note")).to_contain_text("limit of its length")
    other = page.context.new_page()
    other.goto(page.url)
    answers(other).last.get_by_role("button", name="Continue").click()
    expect(text_of(answers(other).last)).to_have_text("one two")
    expect(page.locator(".note")).to_have_count(0)
    other.reload()
    for tab in (page, other):
        expect(text_of(answers(tab).last)).to_have_text("one two")
        expect(tab.locator(".note")).to_contain_text("Cut")
    other.close()


def test_a_tab_keeps_its_conversations_when_the_browser_closes_the_database(page: Page) -> None:
    ask_and_wait(page, "First")
    other = page.context.new_page()
    other.goto(page.url)
    expect(conversations(other)).to_have_text(["First"])
    session = other.context.new_cdp_session(other)
    session.send("Storage.clearDataForOrigin", {"origin": page.url.partition("#")[0], "storageTypes": "indexeddb"})
    session.detach()
    other.evaluate("() => new BroadcastChannel('pagewick').postMessage('all')")
    for tab in (page, other):
        expect(tab.locator("#keeping")).to_have_text("This browser stores nothing: conversations end with this tab.")
        expect(conversations(tab)).to_have_text(["First"])
    other.evaluate("() => new BroadcastChannel('pagewick').postMessage('of another tab')")
    other.close()
    ask_and_wait(page, "Second")
    expect(conversations(page)).to_have_text(["First"])


def test_an_answer_that_another_tab_is_writing_is_not_cut(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Half", " done"], holds_after=1)]
    ask(page, "Slow")
    expect(text_of(answers(page).last)).to_have_text("Half")
    other = page.context.new_page()
    other.goto(page.url)
    expect(answers(other)).to_have_count(1)
    expect(other.get_by_role("combobox", name="Model")).to_be_enabled()
    expect(other.locator(".note")).to_have_count(0)
    stand_in.go_on()
    wait_until_finished(page)
    expect(text_of(answers(other).last)).to_have_text("Half done")
    expect(other.locator(".note")).to_have_count(0)
    other.close()


def test_an_answer_is_not_cut_while_its_tab_waits_for_the_lock(page: Page, stand_in: StandIn) -> None:
    """The browser may grant the lock to a tab that a message has reached before the tab that has sent it."""
    other = page.context.new_page()
    other.goto(stand_in.url)
    other.evaluate("""() => {
      const { request } = LockManager.prototype;
      LockManager.prototype.request = async function (...given) {
        await new Promise((resolve) => setTimeout(resolve, 500));
        return request.apply(this, given);
      };
    }""")
    stand_in.answers = [Answer(["Half", " done"], holds_after=1)]
    ask(other, "Slow")
    page.get_by_role("button", name="Slow", exact=True).click()
    expect(text_of(answers(other).last)).to_have_text("Half")
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    expect(page.locator(".note")).to_have_count(0)
    stand_in.go_on()
    expect(text_of(answers(page).last)).to_have_text("Half done")
    other.close()


def test_renaming_keeps_what_another_tab_writes_meanwhile(page: Page) -> None:
    ask_and_wait(page, "First")
    other = page.context.new_page()
    other.goto(page.url)
    page.get_by_role("listitem").filter(has_text="First").hover()
    page.get_by_role("button", name="Rename First").click()
    ask_and_wait(other, "Second")
    expect(answers(page)).to_have_count(2)
    other.close()
    page.get_by_role("textbox", name="Title").fill("Renamed")
    page.keyboard.press("Enter")
    expect(conversations(page)).to_have_text(["Renamed"])
    for has_reloaded in (False, True):
        if has_reloaded:
            page.reload()
        expect(answers(page)).to_have_count(2)


def test_an_editor_stays_while_another_tab_writes(page: Page) -> None:
    ask_and_wait(page, "First")
    other = page.context.new_page()
    other.goto(page.url)
    question, answer = questions(page).first, answers(page).first
    for message, name in ((question, "Edit the message"), (answer, "Edit the answer")):
        message.hover()
        message.get_by_role("button", name=name).click()
        message.get_by_role("textbox", name=name).fill("Typed")
    ask_and_wait(other, "Second")
    expect(answers(page)).to_have_count(2)
    other.close()
    answer.get_by_role("button", name="Save as a version").click()
    expect(version(answer)).to_have_text("2/2")
    question.get_by_role("button", name="Send").click()
    wait_until_finished(page)
    expect(version(question)).to_have_text("2/2")
    expect(questions(page).locator(".bubble")).to_have_text(["Typed"])


def test_settings_stay_after_an_import_in_another_tab(page: Page, stand_in: StandIn) -> None:
    ask_and_wait(page, "First")
    other = page.context.new_page()
    other.goto(stand_in.url)
    one = {"title": "Imported", "nodes": [{"id": "a", "parentId": None, "role": "user", "content": "q"}]}
    text = json.dumps({"format": "pagewick-conversations", "version": 1, "conversations": [one]})
    file = FilePayload(name="c.json", mimeType="application/json", buffer=text.encode())
    other.set_input_files("#import-file", file)
    expect(conversations(page)).to_have_count(2)
    other.close()
    open_settings(page)
    page.get_by_label("This conversation").check()
    set_field(page, "System prompt", "Be brief.")
    close_settings(page)
    page.get_by_role("button", name="Imported", exact=True).click()
    page.get_by_role("button", name="First", exact=True).click()
    ask_and_wait(page, "Second")
    assert stand_in.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_deleting_ends_the_answer_of_another_tab(page: Page, stand_in: StandIn) -> None:
    other = page.context.new_page()
    other.goto(stand_in.url)
    stand_in.answers = [Answer(["Half", " done"], holds_after=1)]
    ask(other, "Slow")
    expect(text_of(answers(other).last)).to_have_text("Half")
    delete(page, "Slow")
    until(lambda: stand_in.num_left == 1)
    for tab in (page, other):
        expect(tab.get_by_text("No conversations yet.")).to_be_visible()
        tab.reload()
        expect(tab.get_by_text("No conversations yet.")).to_be_visible()
    other.close()


def test_an_answer_that_is_begun_again_is_not_cut(page: Page, stand_in: StandIn) -> None:
    """Another tab waits for the lock during the first request, and reads the answer when the second one has begun."""
    stand_in.answers = [Answer(["Half", " done"], holds_after=1), Answer([" more", " done"], holds_after=1)]
    other = page.context.new_page()
    other.goto(stand_in.url)
    other.evaluate("""() => {
      const { request } = LockManager.prototype;
      LockManager.prototype.request = function (name, task) {
        LockManager.prototype.request = request;
        return request.call(this, name, async () => {
          await new Promise((resolve) => { window.goOn = resolve; });
          return task();
        });
      };
    }""")
    ask(page, "Slow")
    expect(text_of(answers(page).last)).to_have_text("Half")
    other.get_by_role("button", name="Slow", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    until(lambda: other.evaluate("'goOn' in window"))
    continue_button(page).click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    other.evaluate("goOn()")
    expect(text_of(answers(page).last)).to_have_text("Half more")
    expect(other.locator(".note")).to_have_count(0)
    stand_in.go_on()
    expect(text_of(answers(other).last)).to_have_text("Half more done")
    other.close()
