"""Fixtures: one headless Chromium, a fresh profile per test, and a watch for faults such as policy violations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright

from tests.page.stand_in import StandIn

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# This deadline only catches hangs.
TIMEOUT_MS = 15_000
expect.set_options(timeout=TIMEOUT_MS)
AXE = Path(__file__).parents[2] / ".venv" / "page-tests" / "node_modules" / "axe-core" / "axe.min.js"
NO_BROWSER = "PAGEWICK_NO_BROWSER"

VIEWPORT = ViewportSize(width=1100, height=760)

WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""

NewPage = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(NO_BROWSER) == "1":
        skip = pytest.mark.skip(reason=f"{NO_BROWSER}=1: no browser here")
        for item in items:
            if item.path.parent == Path(__file__).parent and {"browser", "page", "new_page"} & set(item.fixturenames):  # type: ignore[attr-defined]
                item.add_marker(skip)


def chromium_path() -> str:
    found = os.environ.get("PAGEWICK_CHROMIUM") or shutil.which("chromium")
    assert found, f"there is no chromium: `make test` installs it as root; {NO_BROWSER}=1 leaves these tests out"
    return found


# Not for the whole session: while it is open, no other test in this thread can start an event loop.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def running_stand_in() -> Iterator[StandIn]:
    server = StandIn()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def stand_in(running_stand_in: StandIn) -> Iterator[StandIn]:
    running_stand_in.go_on()
    running_stand_in.reset()
    yield running_stand_in
    running_stand_in.go_on()


class Watch:
    """Collects faults in a browser context: policy violations, foreign requests, errors and dialogs."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.origin = origin
        self.faults: list[str] = []
        context.add_init_script(WATCH)
        context.on("page", self._follow)
        context.on("request", self._check_request)
        context.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        context.on("weberror", lambda error: self.faults.append(f"error: {error.error}"))

    def _follow(self, page: Page) -> None:
        page.on("console", lambda message: self._check_console(message.type, message.text))

    def _check_console(self, kind: str, text: str) -> None:
        # The browser itself logs refused requests.
        if kind == "error" and not text.startswith("Failed to load resource"):
            self.faults.append(f"console: {text}")

    def _check_request(self, request) -> None:  # type: ignore[no-untyped-def]
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.faults.append(f"request: {request.url}")

    def take(self, context: BrowserContext) -> list[str]:
        """Return the faults since the last call."""
        for page in context.pages:
            self.faults += page.evaluate("window.violations ?? []")
        faults, self.faults = self.faults, []
        return faults

    def check(self, context: BrowserContext) -> None:
        assert self.take(context) == []


def open_context(browser: Browser, origin: str, **options: Any) -> tuple[BrowserContext, Watch]:
    context = browser.new_context(**{"viewport": VIEWPORT, **options})
    context.set_default_timeout(TIMEOUT_MS)
    return context, Watch(context, origin)


@pytest.fixture
def new_page(browser: Browser, stand_in: StandIn) -> Iterator[NewPage]:
    """Returns a function that opens the page in a fresh profile. Checks for faults at the end."""
    opened: list[tuple[BrowserContext, Watch]] = []

    def make(url: str = "", **options: Any) -> Page:
        context, watch = open_context(browser, url or stand_in.url, **options)
        opened.append((context, watch))
        page = context.new_page()
        page.goto(url or stand_in.url)
        return page

    yield make
    stand_in.go_on()
    for context, watch in opened:
        watch.check(context)
        context.close()


@pytest.fixture(scope="package")
def shared_page(browser: Browser, running_stand_in: StandIn) -> Iterator[tuple[Page, Watch]]:
    context, watch = open_context(browser, running_stand_in.url, reduced_motion="reduce")
    yield context.new_page(), watch
    context.close()


@pytest.fixture
def page(shared_page: tuple[Page, Watch], stand_in: StandIn) -> Iterator[Page]:
    """One tab for many tests, since a new one takes most of a second. Its storage is cleared after each test."""
    page, watch = shared_page
    page.set_viewport_size(VIEWPORT)
    page.goto(stand_in.url)
    yield page
    stand_in.go_on()
    faults = watch.take(page.context)
    for other in page.context.pages:
        # A test that failed has left it. It would follow the next ones without the database that is cleared below.
        if other != page:
            other.close()
    page.unroute_all()
    # Leave the page first, because it saves something then. The tab has a copy of localStorage that follows the
    # browser's too late for the next test.
    page.goto(f"{stand_in.url}/v1/models")
    page.evaluate("sessionStorage.clear(); localStorage.clear()")
    session = page.context.new_cdp_session(page)
    session.send("Storage.clearDataForOrigin", {"origin": stand_in.url, "storageTypes": "all"})
    session.detach()
    assert faults == []
