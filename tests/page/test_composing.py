"""Writing a message: drafts that stay, and text files attached by button, drop and paste."""

from __future__ import annotations

from playwright.sync_api import FilePayload, Page, expect

from tests.page.conftest import NewPage
from tests.page.driver import (
    answers,
    ask_and_wait,
    composer,
    edit,
    has_no_horizontal_scroll,
    questions,
    until,
    wait_until_finished,
)
from tests.page.stand_in import Answer, StandIn

FENCED = "before\n```\ninside\n```\n"


def file(name: str, content: bytes | str) -> FilePayload:
    data = content.encode() if isinstance(content, str) else content
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


def attach(page: Page, *files: FilePayload) -> None:
    page.set_input_files("#attach-file", list(files))


def attached(page: Page) -> list[str]:
    return page.locator("#draft-files .file-name").all_text_contents()


def transfer(page: Page, event: str, target: str, files: dict[str, str], text: str = "") -> None:
    """Dispatch a drop or a paste of files, as the browser does after the user's action."""
    page.evaluate(
        """([event, target, files, text]) => {
      const data = new DataTransfer();
      for (const [name, content] of Object.entries(files)) data.items.add(new File([content], name));
      if (text) data.setData("text/plain", text);
      const options = { bubbles: true, cancelable: true };
      const element = document.querySelector(target);
      const made = event === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: data })
        : new DragEvent(event, { ...options, dataTransfer: data });
      element.dispatchEvent(made);
    }""",
        [event, target, files, text],
    )


def test_drafts_stay_per_conversation(page: Page) -> None:
    ask_and_wait(page, "First")
    composer(page).fill("Draft of the first")
    page.get_by_role("button", name="New chat").click()
    expect(composer(page)).to_have_value("")
    composer(page).fill("Draft of a new one")
    attach(page, file("notes.txt", "remember"))
    expect(page.locator("#draft-files .file-name")).to_have_text("notes.txt")
    page.reload()
    expect(composer(page)).to_have_value("Draft of a new one")
    assert attached(page) == ["notes.txt"]
    page.get_by_role("button", name="First", exact=True).click()
    expect(composer(page)).to_have_value("Draft of the first")
    assert attached(page) == []
    page.reload()
    expect(composer(page)).to_have_value("Draft of the first")
    composer(page).press("Enter")
    wait_until_finished(page)
    page.reload()
    expect(answers(page)).to_have_count(2)
    expect(composer(page)).to_have_value("")


def test_a_deleted_conversation_leaves_no_draft(page: Page) -> None:
    ask_and_wait(page, "First")
    composer(page).fill("secret")
    page.get_by_role("listitem").filter(has_text="First").hover()
    page.get_by_role("button", name="Delete First").click()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    until(lambda: "secret" not in page.evaluate("JSON.stringify({ ...localStorage })"))


def test_attached_files_are_sent_shown_and_kept(page: Page, stand_in: StandIn) -> None:
    attach(page, file("notes.py", "print('ä')"), file("read me.md", FENCED), file("wide.csv", "é,1\n".encode("utf-16")))
    expect(page.get_by_role("status").first).to_have_text("Attached notes.py, read me.md, wide.csv.")
    page.get_by_role("button", name="Remove wide.csv").click()
    assert attached(page) == ["notes.py", "read me.md"]
    ask_and_wait(page, "Look")
    sent = f"notes.py:\n```py\nprint('ä')\n```\n\nread me.md:\n````md\n{FENCED}````\n\nLook"
    assert stand_in.bodies[0]["messages"] == [{"role": "user", "content": sent}]
    assert attached(page) == []
    page.reload()
    shown = questions(page).first
    expect(shown.locator(".file-name")).to_have_text(["notes.py", "read me.md"])
    expect(shown.locator(".bubble")).to_have_text("Look")
    shown.locator("summary").first.click()
    expect(shown.locator("pre").first).to_have_text("print('ä')")
    page.get_by_role("searchbox").fill("me.MD")
    expect(page.locator(".snippet mark")).to_have_text("me.md")
    page.get_by_role("searchbox").fill("")
    edit(page, shown, "Look again")
    expect(questions(page).first.locator(".bubble")).to_have_text("Look again")
    wait_until_finished(page)
    assert stand_in.bodies[1]["messages"][0]["content"] == f"{sent} again"


def test_files_alone_are_a_message(page: Page, stand_in: StandIn) -> None:
    attach(page, file("notes.txt", "remember\n"))
    page.get_by_role("button", name="Send", exact=True).click()
    wait_until_finished(page)
    assert stand_in.bodies[0]["messages"][0]["content"] == "notes.txt:\n```txt\nremember\n```"
    expect(page).to_have_title("notes.txt · Pagewick")
    expect(questions(page).first.locator(".bubble")).to_be_hidden()


def test_files_are_dropped(page: Page) -> None:
    dropping = page.locator("body.dropping")
    for target in ("#thread", "#sidebar"):
        transfer(page, "dragover", target, {"a.txt": "x"})
        expect(dropping).to_have_count(1)
        transfer(page, "drop", target, {"a.txt": "text"})
        expect(dropping).to_have_count(0)
    expect(page.locator("#draft-files .file-name")).to_have_text(["a.txt", "a.txt"])
    # The browser handles everything that is not a file.
    transfer(page, "dragover", "#thread", {}, "only text")
    expect(dropping).to_have_count(0)


def test_files_are_pasted_but_text_stays_text(page: Page) -> None:
    # Unlike a user's action, a dispatched event does not wait for the page's code.
    page.wait_for_load_state("networkidle")
    transfer(page, "paste", "#composer-text", {"a.txt": "text"})
    expect(page.locator("#draft-files .file-name")).to_have_text("a.txt")
    # A word processor gives a picture of the text, too.
    transfer(page, "paste", "#composer-text", {"picture.png": "\0"}, "the text")
    assert page.locator("#composer-error").text_content() == ""
    assert attached(page) == ["a.txt"]


REFUSED = [
    ([file("photo.png", b"\x89PNG\r\n\0\0")], "photo.png is not a text file (UTF-8 or UTF-16)."),
    ([file("latin.txt", b"caf\xe9")], "latin.txt is not a text file"),
    ([file("empty.txt", " \n")], "empty.txt is empty."),
    ([file("big.log", b"x" * 600 * 1024)], "big.log has 600 KiB; a file may have up to 512 KiB."),
    ([file(f"{n}.log", b"x" * 512 * 1024) for n in range(3)], "a message may have 1 MiB; these have 1.5 MiB."),
    ([file("good.txt", "x"), file("bad.bin", b"\0")], "bad.bin is not a text file"),
]


def test_what_cannot_be_attached_is_said(page: Page) -> None:
    composer(page).fill("My text")
    error = page.locator("#composer-error")
    for files, complaint in REFUSED:
        attach(page, *files)
        expect(error).to_contain_text(complaint)
        expect(error).to_contain_text("Nothing was attached. ")
        assert attached(page) == []
    expect(composer(page)).to_have_value("My text")
    attach(page, file("good.txt", "x"))
    expect(error).to_be_empty()
    assert attached(page) == ["good.txt"]


def test_a_tab_that_is_closed_overwrites_no_newer_draft(page: Page) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    expect(composer(other)).to_be_focused()
    composer(page).fill("Newer")
    until(lambda: "Newer" in page.evaluate("JSON.stringify({ ...localStorage })"))
    other.reload()
    expect(composer(other)).to_have_value("Newer")
    composer(page).fill("Newest")
    until(lambda: "Newest" in page.evaluate("JSON.stringify({ ...localStorage })"))
    other.goto("about:blank")
    assert "Newest" in page.evaluate("JSON.stringify({ ...localStorage })")
    other.close()


def test_names_of_files_are_no_markup(page: Page, stand_in: StandIn) -> None:
    name = "<img src=x onerror=pwned=1>.txt"
    attach(page, file(name, "<script>pwned=1</script>"))
    stand_in.answers = [Answer(["ok"])]
    page.get_by_role("button", name="Send", exact=True).click()
    wait_until_finished(page)
    expect(questions(page).first.locator(".file-name")).to_have_text(name)
    questions(page).first.locator("summary").click()
    expect(questions(page).first.locator("pre")).to_have_text("<script>pwned=1</script>")
    assert page.evaluate("window.pwned ?? null") is None


def test_long_names_fit_a_phone(new_page: NewPage) -> None:
    page = new_page(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    attach(page, *(file(f"{'long-name-' * 8}{n}.txt", "x" * 2000) for n in range(6)))
    expect(page.locator("#draft-files .file-name")).to_have_count(6)
    assert has_no_horizontal_scroll(page)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_in_viewport()
    page.get_by_role("button", name="Send", exact=True).click()
    wait_until_finished(page)
    assert has_no_horizontal_scroll(page)
