"""Tabs that are closed or reloaded while they write an answer: what came stays."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.page.driver import (
    answers,
    ask,
    continue_button,
    text_of,
    until,
    wait_until_finished,
)
from tests.page.stand_in import Answer, StandIn


def kept_in(page: Page) -> list[str]:
    names: list[str] = page.evaluate("Object.keys(localStorage).filter((name) => name.includes('unfinished'))")
    return names


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
    assert not kept_in(page)
    page.reload()
    expect(text_of(answers(page).last)).to_have_text("one two")


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


def write_twice(page: Page, stand_in: StandIn) -> Page:
    """Another tab writes the first answer of a conversation, and this one the second. Returns the other tab."""
    other = page.context.new_page()
    other.goto(stand_in.url)
    stand_in.answers = [Answer(["one", " two", " three"], holds_after=2)]
    ask(other, "One")
    expect(text_of(answers(other).last)).to_have_text("one two")
    page.get_by_role("button", name="One", exact=True).click()
    expect(answers(page)).to_have_count(1)
    stand_in.hold_apart()
    stand_in.answers = [Answer(["four", " five", " six"], holds_after=2)]
    ask(page, "Two")
    expect(text_of(answers(page).last)).to_have_text("four five")
    return other


def test_a_tab_that_writes_takes_what_a_closing_tab_keeps(page: Page, stand_in: StandIn) -> None:
    write_twice(page, stand_in).close()
    until(lambda: not kept_in(page))
    stand_in.go_on()
    wait_until_finished(page)
    for has_reloaded in (False, True):
        if has_reloaded:
            page.reload()
        expect(text_of(answers(page).last)).to_have_text("four five six")
        expect(text_of(answers(page).first)).to_have_text("one two")
        expect(answers(page).first.locator(".note")).to_contain_text("Cut")


def test_two_tabs_that_close_keep_both_answers(page: Page, stand_in: StandIn) -> None:
    third = page.context.new_page()
    other = write_twice(page, stand_in)
    other.close()
    page.goto("about:blank")
    page.goto(stand_in.url)
    page.get_by_role("button", name="One", exact=True).click()
    expect(text_of(answers(page).last)).to_have_text("four five")
    expect(text_of(answers(page).first)).to_have_text("one two")
    expect(page.locator(".note")).to_have_count(2)
    third.close()


def test_nothing_is_kept_without_a_conversation(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["secret", " text"], holds_after=1)]
    page.evaluate("localStorage.setItem('pagewick.unfinished.gone.node', '{')")
    page.add_init_script(
        "if (window.name === 'no database') Object.defineProperty(window, 'indexedDB', { value: undefined })"
    )
    page.evaluate("window.name = 'no database'")
    page.reload()
    ask(page, "One")
    expect(text_of(answers(page).last)).to_have_text("secret")
    page.evaluate("window.name = ''")
    page.reload()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    until(lambda: not kept_in(page))
