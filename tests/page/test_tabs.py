"""Several tabs with the same conversations."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.page.driver import (
    answers,
    ask,
    ask_and_wait,
    continue_button,
    conversations,
    delete,
    questions,
    text_of,
    until,
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


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_closing_tab_keeps_is_read_when_it_can_be_seen(page: Page, stand_in: StandIn, is_told: bool) -> None:
    """Each tab of some browsers has its own copy of localStorage, which may come after the lock of the closed tab."""
    stand_in.answers = [Answer(["one", " two", " three"], holds_after=2)]
    other = page.context.new_page()
    other.goto(page.url)
    ask(other, "Count")
    expect(text_of(answers(other).last)).to_have_text("one two")
    page.get_by_role("button", name="Count", exact=True).click()
    page.evaluate("""() => {
      const { getItem } = Storage.prototype;
      const isHidden = (name) => name.startsWith("pagewick.unfinished.");
      Storage.prototype.getItem = function (name) { return isHidden(name) ? null : getItem.call(this, name); };
      window.showKept = () => {
        Storage.prototype.getItem = getItem;
        const [key] = Object.keys(localStorage).filter(isHidden);
        dispatchEvent(new StorageEvent("storage", { key, newValue: localStorage.getItem(key) }));
      };
    }""")
    other.close()
    expect(page.locator(".note")).to_contain_text("Cut")
    expect(answers(page).last).not_to_contain_text("two")
    if is_told:
        page.evaluate("showKept()")
    else:
        page.reload()
    expect(text_of(answers(page).last)).to_have_text("one two")
    expect(page.locator(".note")).to_contain_text("Cut")
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('unfinished'))") == []
    page.reload()
    expect(text_of(answers(page).last)).to_have_text("one two")


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


def test_an_answer_is_cut_when_the_tab_that_writes_it_is_closed(page: Page, stand_in: StandIn) -> None:
    other = page.context.new_page()
    other.goto(stand_in.url)
    stand_in.answers = [Answer(["Half", " done"], holds_after=1)]
    ask(other, "Slow")
    expect(text_of(answers(other).last)).to_have_text("Half")
    page.get_by_role("button", name="Slow", exact=True).click()
    expect(page.locator(".note")).to_have_count(0)
    other.close()
    expect(text_of(answers(page).last)).to_have_text("Half")
    expect(continue_button(page)).to_be_visible()
