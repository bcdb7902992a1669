"""The page at /docs in a browser: routes, schemas, API keys, accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import NewPage
from tests.page.driver import has_no_horizontal_scroll
from tests.page.test_access import PHONE, violations
from tests.server.conftest import MODEL, Server, ServerSettings

KEY = "a-long-test-key"


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The addresses of a server that anybody may use, and of one with a key."""
    servers = {
        "open": Server(ServerSettings(served_model_name=(MODEL,))),
        "locked": Server(ServerSettings(served_model_name=(MODEL,), api_key=(KEY,))),
    }
    for server in servers.values():
        server.start()
    yield {name: server.url for name, server in servers.items()}
    for server in servers.values():
        server.stop()


@pytest.fixture
def new_docs(new_page: NewPage, urls: dict[str, str]) -> NewPage:
    """Returns a function that opens a server's page in a fresh profile."""

    def make(name: str = "open", **options: Any) -> Page:
        page = new_page(urls[name], **options)
        page.goto(f"{urls[name]}/docs")
        return page

    return make


def route(page: Page, name: str) -> None:
    page.locator("summary").filter(has_text=re.compile(name)).click()


def test_routes_link_to_the_schemas_of_their_bodies(new_docs: NewPage) -> None:
    page = new_docs()
    expect(page.get_by_role("heading", name="Pagewick API 0")).to_be_visible()
    route(page, "^POST/v1/chat/completions")
    page.get_by_role("link", name="ChatCompletionRequest").click()
    schema = page.locator("#schema-ChatCompletionRequest")
    expect(schema).to_have_attribute("open", "")
    rows = schema.get_by_role("row")
    expect(rows.nth(1)).to_contain_text("messageslist of ChatMessagerequired")
    expect(rows.filter(has_text="temperature")).to_contain_text("number, 0 to 2")
    expect(rows.filter(has_text="max_tokens").first).to_contain_text("integer, at least 0upper limit")
    expect(rows.filter(has_text=re.compile("^seed"))).to_contain_text("integermakes")
    expect(page.get_by_text("needs no key")).to_have_count(0)
    page.evaluate("location.hash = '#schema-ErrorResponse'")
    page.reload()
    expect(page.locator("#schema-ErrorResponse")).to_have_attribute("open", "")


def test_a_server_with_keys_is_asked_with_one(new_docs: NewPage) -> None:
    page = new_docs("locked")
    expect(page.get_by_role("status")).to_have_text("The server needs an API key.")
    page.get_by_label("API key").fill("a-wrong-test-key")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("status")).to_have_text("The server does not accept this API key.")
    assert violations(page) == []
    page.get_by_label("API key").fill("a\u2013long\u2013test\u2013key")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("status")).to_have_text("The API key has spaces or other characters that no key has.")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Enter")
    expect(page.locator("summary").filter(has_text="/health/live")).to_contain_text("needs no key")
    expect(page.get_by_role("status")).to_have_text("")
    # The tab remembers the key, and the chat page in it has the same one.
    page.reload()
    expect(page.locator("summary").first).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('pagewick.api-key')") == KEY


@pytest.mark.parametrize("is_phone", [False, True], ids=["dark", "phone"])
def test_axe_finds_nothing_serious(new_docs: NewPage, is_phone: bool) -> None:
    page = new_docs(**({"viewport": PHONE} if is_phone else {"color_scheme": "dark"}))
    route(page, "^POST/v1/completions")
    page.get_by_role("link", name="CompletionRequest", exact=True).click()
    expect(page.locator("#schema-CompletionRequest")).to_have_attribute("open", "")
    assert violations(page) == []
    assert has_no_horizontal_scroll(page)
