"""Takes the screenshots in docs/chat-page.md of a conversation with the built-in model.

`python -m tests.page.screenshots` has the same requirements as the tests of the page. Install the font Inter before:
the screenshots use it, while the page itself falls back to the system's font.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.page.conftest import ARGUMENTS, chromium_path
from tests.page.driver import (
    answers,
    ask_and_wait,
    close_settings,
    open_settings,
    questions,
    set_field,
    wait_until_finished,
)

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 150_000
DESKTOP = {"width": 1180, "height": 760}
TALL = {"width": 1180, "height": 900}
PHONE = {"width": 390, "height": 780}
OLDER = ["Which models does Pagewick support?", "What is speculative decoding?", "How do I run the tests?"]
SHOWN = ["What is PagedAttention?", "What does continuous batching mean?", "How do I change the port?"]


@contextmanager
def running_server() -> Iterator[str]:
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = (re.search(r"ready on (http://\S+)", line) for line in process.stdout)
        yield next(match[1] for match in found if match)
        process.send_signal(signal.SIGINT)


def open_page(browser: Browser, url: str, **options: object) -> Page:
    page = browser.new_page(**options)  # type: ignore[arg-type]
    page.goto(url)
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    return page


def converse(page: Page, conversations: list[list[str]]) -> None:
    for number, texts in enumerate(conversations):
        if number:
            page.keyboard.press("Control+Shift+O")
            expect(questions(page)).to_have_count(0)
        for text in texts:
            ask_and_wait(page, text)


def use_tools(page: Page) -> None:
    """Show a call with its result, and one that waits for it."""
    open_settings(page).get_by_role("radio", name="This conversation").check()
    page.get_by_role("button", name="Insert an example").click()
    set_field(page, "Tool choice", "function:get_weather")
    set_field(page, "Temperature", "0")
    close_settings(page)
    ask_and_wait(page, "what is the weather in Rome?")
    page.get_by_label("Result of get_weather").fill('{"condition": "rainy", "temperature": 18}')
    page.get_by_role("button", name="Send the result").click()
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    page.locator(".call summary").click()
    ask_and_wait(page, "is it raining in London?")


def take(page: Page, name: str) -> None:
    page.mouse.move(0, 0)
    # Notes about a copied or finished response and transitions are over by then.
    page.wait_for_timeout(400)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    assert size <= MAX_BYTES, f"{path.name} has {size} bytes"
    print(f"{path.name}: {size // 1000} kB")


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with running_server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=ARGUMENTS)
        page = open_page(browser, url, viewport=DESKTOP)
        converse(page, [*([text] for text in OLDER), SHOWN])
        take(page, "chat-page")
        page.emulate_media(color_scheme="dark")
        take(page, "chat-page-dark")
        page.emulate_media(color_scheme="light")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Temperature").fill("0.7")
        page.get_by_label("System prompt").fill("Answer in one sentence.")
        take(page, "chat-page-settings")
        page.get_by_role("button", name="Reset").click()
        close_settings(page)
        page.keyboard.press("Control+Shift+O")
        page.set_viewport_size(TALL)
        use_tools(page)
        take(page, "chat-page-tools")
        phone = open_page(browser, url, viewport=PHONE, is_mobile=True, has_touch=True, device_scale_factor=1.5)
        take(phone, "chat-page-start")
        converse(phone, [SHOWN])
        take(phone, "chat-page-phone")
        browser.close()


if __name__ == "__main__":
    main()
