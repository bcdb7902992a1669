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
from tests.page.driver import answers, ask, text_of, wait_until_finished

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
