"""Actions of a user on the page, and locators of its parts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from playwright.sync_api import Locator, Page, expect

from tests.page.conftest import TIMEOUT_MS
from tests.page.stand_in import StandIn


def composer(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def ask(page: Page, text: str) -> None:
    composer(page).fill(text)
    composer(page).press("Enter")


def ask_and_wait(page: Page, text: str) -> None:
    """Ask a question and wait for the complete response."""
    count = answers(page).count()
    ask(page, text)
    expect(answers(page)).to_have_count(count + 1)
    wait_until_finished(page)


def wait_until_finished(page: Page) -> None:
    expect(answers(page).last).to_have_attribute("aria-busy", "false")


def answers(page: Page) -> Locator:
    return page.locator("article.answer")


def questions(page: Page) -> Locator:
    return page.locator("article.question")


def text_of(answer: Locator) -> Locator:
    return answer.locator("> .parts > .prose")


def conversations(page: Page) -> Locator:
    return page.locator("#conversation-list .conversation-title")


def delete(page: Page, title: str) -> None:
    """Delete the conversation with this title."""
    page.get_by_role("listitem").filter(has_text=title).hover()
    page.get_by_role("button", name=f"Delete {title}").click()


def version(message: Locator) -> Locator:
    return message.locator(".branch-count [aria-hidden]")


def edit(page: Page, question: Locator, text: str) -> None:
    question.hover()
    question.get_by_role("button", name="Edit the message").click()
    box = question.get_by_role("textbox", name="Edit the message")
    box.fill(text)
    box.press("Enter")


def again(answer: Locator) -> None:
    answer.hover()
    answer.get_by_role("button", name="Answer again").click()


def continue_button(page: Page) -> Locator:
    return answers(page).last.get_by_role("button", name="Continue")


def set_field(page: Page, label: str, value: str) -> None:
    dialog = page.get_by_role("dialog", name="Settings")
    field = dialog.get_by_label(label, exact=True)
    if field.evaluate("(field) => field.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)


def go_on_in_time_for_a_speed(page: Page, stand_in: StandIn) -> None:
    """Let a held response go on after its first pieces were seen, late enough that it is not a single burst.

    Pauses of the stand-in would not do: a browser that is busy reads the pieces of several pauses at once.
    """
    expect(answers(page).last.locator(".stats")).to_contain_text("token")
    page.wait_for_timeout(150)
    stand_in.go_on()


def open_settings(page: Page) -> Locator:
    page.get_by_role("button", name="Settings", exact=True).click()
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog).to_be_visible()
    return dialog


def close_settings(page: Page) -> None:
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def has_no_horizontal_scroll(page: Page) -> bool:
    return bool(
        page.evaluate("document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth")
    )


IS_SENDING = re.compile("Stop the answer")


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition. Playwright's wait_for_function needs eval, which the page's policy forbids."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
