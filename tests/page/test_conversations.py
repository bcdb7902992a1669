"""Stored conversations: list, search, renaming, deletion, export and import, several tabs."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.page.conftest import NewPage
from tests.page.driver import (
    again,
    answers,
    ask,
    ask_and_wait,
    conversations,
    delete,
    edit,
    questions,
    text_of,
    version,
    wait_until_finished,
)
from tests.page.stand_in import Answer, StandIn


def new_chat(page: Page) -> None:
    page.get_by_role("button", name="New chat").click()


def export(page: Page) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    return Path(download.value.path()).read_text(encoding="utf-8")


def import_(page: Page, text: str) -> None:
    page.set_input_files("#import-file", {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()})


def test_a_reload_keeps_everything(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["One"], thoughts=["Hm."]), Answer(["Two"]), Answer(["Three"])]
    ask_and_wait(page, "A question\nof two lines")
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("2/2")
    answers(page).last.get_by_role("button", name="Previous version").click()
    page.reload()
    expect(text_of(answers(page).last)).to_have_text("One")
    expect(version(answers(page).last)).to_have_text("1/2")
    expect(answers(page).last.locator("summary")).to_have_text("Thoughts")
    expect(questions(page).locator(".bubble")).to_have_text("A question of two lines")
    expect(answers(page).last.locator(".stats")).to_contain_text("9 tokens")
    expect(conversations(page)).to_have_text(["A question"])
    ask_and_wait(page, "Go on")
    assert stand_in.bodies[-1]["messages"][1]["content"] == "One"


def test_a_reload_right_after_a_change_keeps_it(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["One"]), Answer(["Two"])]
    ask_and_wait(page, "A question")
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("2/2")
    wait_until_finished(page)
    for name, expected in [("Previous version", "1/2"), ("Next version", "2/2")] * 10:
        button = answers(page).last.get_by_role("button", name=name)
        with page.expect_navigation():
            button.evaluate("(button) => { button.click(); location.reload(); }")
        expect(version(answers(page).last)).to_have_text(expected)


def test_a_reload_keeps_the_received_part_of_a_response(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["word "] * 230, pause_s=0.01, holds_after=229)]
    ask(page, "Slow")
    expect(text_of(answers(page).last)).to_contain_text("word " * 220, timeout=30_000)
    page.reload()
    expect(text_of(answers(page).last)).to_contain_text("word word")
    expect(answers(page).last.get_by_role("button", name="Answer again")).to_be_enabled()


def test_the_latest_conversation_is_first(page: Page) -> None:
    for title in ("Alpha", "Beta", "Gamma"):
        new_chat(page)
        ask_and_wait(page, title)
    expect(conversations(page)).to_have_text(["Gamma", "Beta", "Alpha"])
    expect(page.locator("#conversation-list h2")).to_have_text(["Today"])
    page.get_by_role("button", name="Alpha", exact=True).click()
    ask_and_wait(page, "More")
    expect(conversations(page)).to_have_text(["Alpha", "Gamma", "Beta"])


def test_the_back_button_goes_to_the_former_conversation(page: Page) -> None:
    ask_and_wait(page, "Alpha")
    new_chat(page)
    ask_and_wait(page, "Beta")
    page.go_back()
    page.go_back()
    expect(questions(page).locator(".bubble")).to_have_text("Alpha")
    page.go_forward()
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()


def test_search_finds_titles_and_texts(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["The needle is <b>here</b>, in a text that goes on."]), Answer(["Nothing"])]
    ask_and_wait(page, "Haystack")
    new_chat(page)
    ask_and_wait(page, "Needlework")
    search = page.get_by_role("searchbox", name="Search conversations")
    search.fill("NEEDLE")
    expect(conversations(page)).to_have_text(["Needlework", "Haystack"])
    expect(page.locator(".snippet")).to_have_text("The needle is <b>here</b>, in a text that goes on.")
    expect(page.locator(".snippet mark")).to_have_text("needle")
    search.fill("haystack")
    expect(conversations(page)).to_have_text(["Haystack"])
    search.press("Enter")
    expect(questions(page).locator(".bubble")).to_have_text("Haystack")
    search.fill("nowhere")
    expect(page.get_by_text("Nothing found.")).to_be_visible()
    search.press("Escape")
    expect(conversations(page)).to_have_count(2)


def test_renaming(page: Page) -> None:
    ask_and_wait(page, "Old name")
    item = page.get_by_role("listitem").filter(has_text="Old name")
    item.hover()
    item.get_by_role("button", name="Rename").click()
    box = page.get_by_role("textbox", name="Title")
    expect(box).to_have_value("Old name")
    box.fill("Never")
    box.press("Escape")
    expect(conversations(page)).to_have_text(["Old name"])
    item.hover()
    item.get_by_role("button", name="Rename").click()
    box.fill("New name")
    box.press("Enter")
    expect(page).to_have_title("New name · Pagewick")
    page.reload()
    expect(conversations(page)).to_have_text(["New name"])
    edit(page, questions(page).first, "Another first question")
    expect(conversations(page)).to_have_text(["New name"])


def test_deletion_can_be_undone_and_is_final_otherwise(page: Page) -> None:
    ask_and_wait(page, "Precious")
    delete(page, "Precious")
    expect(conversations(page)).to_have_count(0)
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    delete(page, "Precious")
    page.reload()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()


def test_deleting_ends_the_answer(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["a", "b"], holds_after=1)]
    ask(page, "Unwanted")
    expect(text_of(answers(page).last)).to_have_text("a")
    delete(page, "Unwanted")
    ask_and_wait(page, "Wanted")
    assert stand_in.num_left == 1
    page.reload()
    expect(conversations(page)).to_have_text(["Wanted"])


def test_export_and_import_give_the_same_conversations(page: Page, new_page: NewPage, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Eins"], thoughts=["Hm"]), Answer(["Zwei"]), Answer(["x"], error="broke")]
    ask_and_wait(page, "Zähl 😀")
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("2/2")
    new_chat(page)
    ask_and_wait(page, "Fail")
    exported = export(page)
    other = new_page()
    import_(other, exported)
    expect(conversations(other)).to_have_text(["Fail", "Zähl 😀"])
    other.get_by_role("button", name="Zähl 😀", exact=True).click()
    expect(text_of(answers(other).last)).to_have_text("Zwei")
    expect(version(answers(other).last)).to_have_text("2/2")
    assert shape(export(other)) == shape(exported)
    import_(other, exported)
    expect(conversations(other)).to_have_count(4)


def shape(text: str) -> object:
    """Return an export in which positions replace ids."""
    conversations = json.loads(text)["conversations"]
    for conversation in conversations:
        ids = {node["id"]: number for number, node in enumerate(conversation["nodes"])} | {None: None}
        conversation["id"] = None
        conversation["selectedRoot"] = ids[conversation["selectedRoot"]]
        for node in conversation["nodes"]:
            for name in ("id", "parentId", "selectedChild"):
                node[name] = ids[node[name]]
    return conversations


NODE = {"id": "a", "parentId": None, "role": "user", "content": "x"}


def file_of(*nodes: object, **fields: object) -> str:
    conversation = {"title": "t", "nodes": list(nodes)}
    return json.dumps({"format": "pagewick-conversations", "version": 1, "conversations": [conversation], **fields})


NO_EXPORTS = [
    ("not JSON", "is not JSON"),
    ("null", "holds no conversations"),
    ("[]", "holds no conversations"),
    ('{"format": "other", "conversations": []}', "holds no conversations"),
    (file_of(version=2), "has version 2"),
    (file_of(conversations=[None]), "Conversation 1 has no list of messages"),
    (file_of(conversations=[{"nodes": {}}]), "Conversation 1 has no list of messages"),
    (file_of(None), "Conversation 1, message 1 has an unknown role"),
    (file_of({**NODE, "role": "system"}), "has an unknown role"),
    (file_of({**NODE, "content": ["x"]}), "has no text"),
    (file_of(NODE, {**NODE, "id": "b", "parentId": "c"}), "message 2 follows a message that is not there"),
    (file_of({**NODE, "parentId": "a"}), "message 1 follows a message that is not there"),
]


def test_a_file_that_is_no_export_changes_nothing(page: Page) -> None:
    for text, complaint in NO_EXPORTS:
        import_(page, text)
        expect(page.locator("#toast")).to_contain_text("Nothing was imported.")
        expect(page.locator("#toast")).to_contain_text(complaint)
    expect(conversations(page)).to_have_count(0)


def test_without_a_database_the_page_warns_and_works(page: Page) -> None:
    page.add_init_script(
        "if (window.name === 'no database') Object.defineProperty(window, 'indexedDB', { value: undefined })"
    )
    page.evaluate("window.name = 'no database'")
    page.reload()
    expect(page.locator("#keeping")).to_have_text("This browser stores nothing: conversations end with this tab.")
    ask_and_wait(page, "Hi")
    new_chat(page)
    page.get_by_role("button", name="Hi", exact=True).click()
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    page.evaluate("window.name = ''")
