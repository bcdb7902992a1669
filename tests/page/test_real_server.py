"""The page served by `pagewick serve` with the built-in model."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.page.conftest import TIMEOUT_MS, NewPage
from tests.page.driver import (
    again,
    answers,
    ask,
    close_settings,
    open_settings,
    set_field,
    text_of,
    version,
    wait_until_finished,
)

READY = re.compile(r"ready on (http://\S+)")


@pytest.fixture
def server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewick", "serve", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        yield next(match[1] for line in stdout if (match := READY.search(line)))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_the_built_in_model_answers(new_page: NewPage, server: str) -> None:
    page = new_page(server)
    expect(page.get_by_role("combobox", name="Model")).to_have_value("pagewick-demo")
    expect(page.get_by_role("button", name="What is PagedAttention?")).to_be_visible()
    expect(page.locator("#empty-model")).to_contain_text("knows only Pagewick")
    ask(page, "Which port does the server listen on by default?")
    expect(answers(page).last).to_have_attribute("aria-busy", "false", timeout=3 * TIMEOUT_MS)
    expect(text_of(answers(page).last)).to_contain_text("8000")
    stats = answers(page).last.locator(".stats")
    expect(stats).to_have_text(re.compile(r"^\d+ tokens.*\d+ of \d+ cached.*context \d+ / "))
    ask(page, "What is the prefix cache?")
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    # The second request repeats the first one, which is in the server's prefix cache.
    cached = re.search(r"(\d+) of \d+ cached", answers(page).last.locator(".stats").inner_text())
    assert cached is not None and int(cached[1]) > 0
    # The model goes on where the limit ended its answer.
    open_settings(page)
    set_field(page, "Max tokens", "6")
    set_field(page, "Temperature", "0")
    close_settings(page)
    ask(page, "What is PagedAttention?")
    expect(answers(page)).to_have_count(3)
    wait_until_finished(page)
    part = text_of(answers(page).last).inner_text()
    answers(page).last.get_by_role("button", name="Continue").click()
    expect(answers(page).last.locator(".stats")).to_contain_text("12 tokens")
    wait_until_finished(page)
    whole = text_of(answers(page).last).inner_text()
    assert whole.startswith(part) and len(whole) > len(part) > 0
    open_settings(page)
    set_field(page, "Max tokens", "12")
    close_settings(page)
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("2/2")
    wait_until_finished(page)
    assert text_of(answers(page).last).inner_text() == whole


def test_the_built_in_model_calls_a_tool(new_page: NewPage, server: str) -> None:
    page = new_page(server)
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    dialog = open_settings(page)
    dialog.get_by_role("button", name="Insert an example").click()
    set_field(page, "Tool choice", "function:get_weather")
    set_field(page, "Temperature", "0")
    close_settings(page)
    ask(page, "what is the weather in Rome?")
    expect(answers(page).last).to_have_attribute("aria-busy", "false", timeout=3 * TIMEOUT_MS)
    summary = page.locator(".call summary")
    expect(summary).to_have_text(re.compile(r'^Call of get_weather\{"city": ".*"\}$'))
    expect(answers(page).last.locator(".stats")).to_have_text(re.compile(r"^\d+ tokens.*context \d+ / "))
    result = page.get_by_role("textbox", name="Result of get_weather")
    expect(result).to_be_focused()
    result.fill('{"condition": "sunny", "temperature": 21}')
    result.press("Control+Enter")
    expect(answers(page)).to_have_count(2)
    wait_until_finished(page)
    expect(page.locator(".error")).to_have_count(0)
    # The second call gets a message instead of a result, which the server accepts.
    ask(page, "what is the weather in Oslo?")
    expect(answers(page)).to_have_count(3)
    wait_until_finished(page)
    expect(result).to_be_visible()
    ask(page, "thanks")
    expect(answers(page)).to_have_count(4)
    wait_until_finished(page)
    expect(page.locator(".error")).to_have_count(0)
