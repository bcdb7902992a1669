"""Export of one conversation, its link, and the import of many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.page.conftest import NewPage
from tests.page.driver import (
    again,
    answers,
    ask_and_wait,
    close_settings,
    conversations,
    open_settings,
    questions,
    set_field,
    text_of,
    until,
    version,
)
from tests.page.stand_in import Answer, StandIn

NUM_MANY = 1500


def choose(page: Page, item: str) -> None:
    page.get_by_role("button", name="Link and export").click()
    page.get_by_role("group", name="Link and export").get_by_role("button", name=item).click()


def saved(page: Page, item: str) -> tuple[str, str]:
    """Return the name and the text of the file that a menu item saves."""
    with page.expect_download() as download:
        choose(page, item)
    return download.value.suggested_filename, Path(download.value.path()).read_text(encoding="utf-8")


def import_(page: Page, text: str) -> None:
    page.set_input_files("#import-file", {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()})


def many(count: int) -> str:
    """Return an export file."""
    conversations = []
    for number in range(count):
        question = {"id": "q", "parentId": None, "selectedChild": "a", "role": "user", "content": f"Question {number}"}
        fields = {"reasoning": "", "model": "m", "finishReason": "stop", "stats": None, "error": None}
        answer = {
            "id": "a",
            "parentId": "q",
            "selectedChild": None,
            "role": "assistant",
            "content": "x " * 500,
            **fields,
        }
        one = {"title": f"Number {number}", "createdAt": number, "updatedAt": number, "selectedRoot": "q"}
        conversations.append({**one, "nodes": [question, answer]})
    return json.dumps({"format": "pagewick-conversations", "version": 1, "conversations": conversations})


def test_one_conversation_is_exported_as_markdown(page: Page, stand_in: StandIn) -> None:
    dialog = open_settings(page)
    dialog.get_by_role("radio", name="This conversation").check()
    set_field(page, "System prompt", "Be kind.")
    close_settings(page)
    stand_in.answers = [Answer(["No."]), Answer(["**Yes.**"], thoughts=["Hm.\n"]), Answer(["Half"], error="it broke")]
    page.set_input_files("#attach-file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1"})
    ask_and_wait(page, "Is it *so*, Zoë?")
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("2/2")
    expect(text_of(answers(page).last)).to_have_text("Yes.")
    ask_and_wait(page, "Sure?")
    name, text = saved(page, "Export as Markdown")
    assert name == "pagewick-is-it-so-zoë.md"
    assert text == (
        "# Is it *so*, Zoë?\n\n## System prompt\n\nBe kind.\n\n"
        "## You\n\na.py:\n```py\nx = 1\n```\n\nIs it *so*, Zoë?\n\n"
        "## org/stand-in\n\n<details><summary>Thoughts</summary>\n\nHm.\n\n</details>\n\n**Yes.**\n\n"
        "## You\n\nSure?\n\n## org/stand-in\n\nHalf\n\n*it broke*\n"
    )


def test_one_conversation_is_exported_with_all_of_its_parts(page: Page, new_page: NewPage, stand_in: StandIn) -> None:
    ask_and_wait(page, "Another one")
    page.get_by_role("button", name="New chat").click()
    dialog = open_settings(page)
    dialog.get_by_role("radio", name="This conversation").check()
    set_field(page, "System prompt", "Be kind.")
    close_settings(page)
    page.set_input_files("#attach-file", {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = 1"})
    stand_in.answers = [Answer(["One", " two"], finish_reason="length")]
    ask_and_wait(page, "This one")
    name, text = saved(page, "Export as JSON")
    assert name == "pagewick-this-one.json"
    assert [one["title"] for one in json.loads(text)["conversations"]] == ["This one"]
    other = new_page()
    import_(other, text)
    other.get_by_role("button", name="This one", exact=True).click()
    expect(questions(other).first.locator(".file-name")).to_have_text("a.py")
    expect(other.get_by_role("button", name="Settings (this conversation has its own)")).to_be_visible()
    answers(other).last.get_by_role("button", name="Continue").click()
    expect(text_of(answers(other).last)).to_have_text("One twoHello from the stand-in.")
    assert stand_in.bodies[-1]["messages"][0] == {"role": "system", "content": "Be kind."}


def test_an_unfinished_answer_is_imported_as_cut(page: Page) -> None:
    file = json.loads(many(1))
    file["conversations"][0]["nodes"][1]["finishReason"] = None
    import_(page, json.dumps(file))
    page.get_by_role("button", name="Number 0", exact=True).click()
    expect(answers(page).last.locator(".note")).to_contain_text("Cut")


def test_wrong_files_and_settings_are_not_imported(page: Page) -> None:
    for field, value in (("files", {}), ("files", [{"name": "x"}]), ("files", [None])):
        file = json.loads(many(1))
        file["conversations"][0]["nodes"][0][field] = value
        import_(page, json.dumps(file))
        expect(page.locator("#toast")).to_contain_text("message 1 has files without a name, a text or an image")
    file["conversations"][0]["nodes"][0]["files"] = []
    file["conversations"][0]["settings"] = {"temperature": 9, "__proto__": {"x": 1}, "other": "x"}
    import_(page, json.dumps(file))
    page.get_by_role("button", name="Number 0", exact=True).click()
    page.get_by_role("button", name="Settings (1 is wrong)").click()
    expect(page.get_by_role("dialog", name="Settings").get_by_label("Temperature")).to_have_value("9")


def test_many_conversations_are_imported_with_progress(page: Page) -> None:
    """The list is drawn once, and the conversations are written in large parts: one by one, this would take minutes."""
    page.evaluate("""() => {
      const seen = window.seen = { progress: [], lists: 0, transactions: 0 };
      const { transaction } = IDBDatabase.prototype;
      IDBDatabase.prototype.transaction = function (...given) {
        seen.transactions += 1;
        return transaction.apply(this, given);
      };
      const list = document.getElementById("conversation-list");
      new MutationObserver(() => { seen.lists += 1; }).observe(list, { childList: true });
      new MutationObserver(() => {
        const bar = document.querySelector("#toast progress");
        if (bar) seen.progress.push(bar.nextSibling.textContent);
      }).observe(document.getElementById("toast"), { childList: true, subtree: true, characterData: true });
    }""")
    import_(page, many(NUM_MANY))
    expect(page.locator("#toast")).to_have_text("Imported 1,500 conversations.")
    seen: dict[str, Any] = page.evaluate("seen")
    assert "100 of 1,500" in seen["progress"] and "1,500 of 1,500" in seen["progress"]
    assert seen["lists"] <= 2 and seen["transactions"] <= 20
    expect(conversations(page)).to_have_count(100)
    expect(conversations(page).first).to_have_text("Number 1499")
    page.get_by_role("button", name="Show more (1,400)").click()
    expect(conversations(page)).to_have_count(200)
    expect(page.get_by_role("button", name="Number 1399", exact=True)).to_be_focused()
    page.get_by_role("searchbox").fill("Question 77")
    expect(conversations(page)).to_have_count(11)
    page.reload()
    expect(conversations(page)).to_have_count(100)


def test_another_tab_shows_what_was_imported(page: Page) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    import_(page, many(3))
    expect(conversations(other)).to_have_text(["Number 2", "Number 1", "Number 0"])
    other.close()


def test_the_link_leads_to_the_conversation(new_page: NewPage) -> None:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    expect(page.get_by_role("button", name="Link and export")).to_be_hidden()
    ask_and_wait(page, "Linked")
    choose(page, "Copy the link")
    expect(page.locator("#toast")).to_contain_text("in this browser only")
    link = page.evaluate("navigator.clipboard.readText()")
    page.get_by_role("button", name="New chat").click()
    other = page.context.new_page()
    other.goto(link)
    expect(questions(other).locator(".bubble")).to_have_text("Linked")
    # Only the fragment changes, so the tab stays.
    page.evaluate("(link) => { location.href = link; }", link)
    expect(questions(page).locator(".bubble")).to_have_text("Linked")


def test_a_link_to_a_conversation_that_is_not_here_says_so(page: Page, stand_in: StandIn) -> None:
    ask_and_wait(page, "Here")
    page.goto(f"{stand_in.url}/#0123456789abcdef01234567")
    expect(page.locator("#toast")).to_contain_text("This browser has no such conversation.")
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    until(lambda: page.evaluate("location.hash") == "")


def test_the_menu_is_used_with_keys(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["a", "b"], holds_after=1)]
    page.get_by_role("textbox", name="Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    expect(text_of(answers(page).last)).to_have_text("a")
    opener = page.get_by_role("button", name="Link and export")
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copy the link")).to_be_focused()
    expect(opener).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Copy the link")).to_be_hidden()
    expect(opener).to_be_focused()
    # Escape has closed the menu and not stopped the answer.
    expect(answers(page).last).to_have_attribute("aria-busy", "true")
