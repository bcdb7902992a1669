"""Images in messages: attached by button, paste and drop, scaled down, sent, shown, stored, exported and imported."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, expect

from tests.page.conftest import NewPage
from tests.page.driver import (
    answers,
    ask_and_wait,
    composer,
    edit,
    has_no_horizontal_scroll,
    questions,
    wait_until_finished,
)
from tests.page.stand_in import Answer, StandIn
from tests.page.test_transfer import import_, saved

ERROR = "#composer-error"


def png(width: int, height: int, *, alpha: int | None = None, noise: bool = False) -> bytes:
    """Return an image of one colour, or of as many as possible."""
    colour = bytes([200, 40, 90]) + (b"" if alpha is None else bytes([alpha]))
    size = len(colour) * width
    source = random.Random(1)
    rows = [b"\0" + (source.randbytes(size) if noise else colour * width) for _ in range(height)]
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if alpha is None else 6, 0, 0, 0)
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in pieces
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def image(name: str, data: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": data}


def attach(page: Page, *files: FilePayload) -> None:
    page.set_input_files("#attach-file", list(files))


def drafts(page: Page) -> Any:
    return page.locator("#draft-files img")


def size_of(page: Page, url: str) -> tuple[int, int]:
    """Return width and height of the image with this address."""
    size = page.evaluate(
        "async (url) => { const one = new Image(); one.src = url; await one.decode();"
        " return [one.naturalWidth, one.naturalHeight]; }",
        url,
    )
    return size[0], size[1]


@pytest.fixture
def seeing(page: Page, stand_in: StandIn) -> Page:
    """The page with a model that reads images."""
    stand_in.modalities = ["text", "image"]
    page.reload()
    expect(page.get_by_role("button", name="Attach images or text files")).to_be_visible()
    return page


def test_images_are_shown_sent_and_stored(seeing: Page, stand_in: StandIn) -> None:
    page = seeing
    notes: FilePayload = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"remember"}
    attach(page, image("red.png", png(5, 3)), notes, image("wide.png", png(4100, 20)))
    expect(page.get_by_role("status").first).to_have_text("Attached red.png, notes.txt, wide.png.")
    expect(drafts(page)).to_have_count(2)
    page.get_by_role("button", name="Remove red.png").press("Enter")
    expect(drafts(page)).to_have_count(1)
    expect(composer(page)).to_be_focused()
    ask_and_wait(page, "See?")
    (message,) = stand_in.bodies[0]["messages"]
    picture, text = message["content"]
    assert (picture["type"], text) == (
        "image_url",
        {"type": "text", "text": "notes.txt:\n```txt\nremember\n```\n\nSee?"},
    )
    url = picture["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and size_of(page, url) == (2048, 10)
    expect(drafts(page)).to_have_count(0)
    page.reload()
    shown = questions(page).first.get_by_role("img", name="wide.png")
    expect(shown).to_be_visible()
    assert shown.get_attribute("src") == url
    page.get_by_role("searchbox").fill("wide.P")
    expect(page.locator(".snippet mark")).to_have_text("wide.p")
    page.get_by_role("searchbox").fill("")
    edit(page, questions(page).first, "Really?")
    expect(questions(page).first.locator(".bubble")).to_have_text("Really?")
    wait_until_finished(page)
    assert stand_in.bodies[1]["messages"][0]["content"][0] == picture


def test_an_image_alone_is_a_message(seeing: Page, stand_in: StandIn) -> None:
    attach(seeing, image("red.png", png(5, 3)))
    seeing.get_by_role("button", name="Send", exact=True).click()
    wait_until_finished(seeing)
    (part,) = stand_in.bodies[0]["messages"][0]["content"]
    assert part["type"] == "image_url"
    expect(seeing).to_have_title("red.png · Pagewick")
    expect(questions(seeing).first.locator(".bubble")).to_be_hidden()


def test_images_are_pasted_and_dropped(seeing: Page) -> None:
    seeing.wait_for_load_state("networkidle")
    seeing.evaluate(
        """(data) => {
      const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
      const transfer = (name) => {
        const made = new DataTransfer();
        made.items.add(new File([bytes], name, { type: "image/png" }));
        return made;
      };
      const options = { bubbles: true, cancelable: true };
      const box = document.querySelector("#composer-text");
      box.dispatchEvent(new ClipboardEvent("paste", { ...options, clipboardData: transfer("pasted.png") }));
      const drop = new DragEvent("drop", { ...options, dataTransfer: transfer("dropped.png") });
      document.querySelector("#thread").dispatchEvent(drop);
    }""",
        base64.b64encode(png(4, 4)).decode(),
    )
    for name in ("pasted.png", "dropped.png"):
        expect(seeing.locator("#draft-files").get_by_role("img", name=name)).to_be_visible()


def test_large_images_become_smaller_files(seeing: Page, stand_in: StandIn) -> None:
    """An image without loss that stays large becomes a JPEG, with white where it was transparent."""
    attach(seeing, image("noise.png", png(1000, 1300, noise=True)), image("clear.png", png(3, 3, alpha=0)))
    expect(drafts(seeing)).to_have_count(2)
    ask_and_wait(seeing, "See?")
    urls = [part["image_url"]["url"] for part in stand_in.bodies[0]["messages"][0]["content"][:2]]
    assert [url.partition(";")[0] for url in urls] == ["data:image/jpeg", "data:image/png"]
    assert size_of(seeing, urls[0]) == (1000, 1300)


REFUSED = [
    ([image("broken.png", b"\x89PNG\r\n\x1a\nno")], "broken.png could not be read as an image."),
    ([image(f"{n}.png", png(1, 1)) for n in range(17)], "A message may have 16 images; these are 17."),
    ([image("some.svg", b"\0<svg/>", "image/svg+xml")], "some.svg is not a text file"),
]


def test_what_is_no_image_is_said(seeing: Page) -> None:
    for files, complaint in REFUSED:
        attach(seeing, *files)
        expect(seeing.locator(ERROR)).to_contain_text(f"Nothing was attached. {complaint}")
        expect(drafts(seeing)).to_have_count(0)


def test_a_model_of_texts_takes_no_images(page: Page, stand_in: StandIn) -> None:
    expect(page.get_by_role("button", name="Attach text files")).to_be_visible()
    page.wait_for_load_state("networkidle")
    attach(page, image("red.png", png(5, 3)))
    expect(page.locator(ERROR)).to_contain_text("red.png is an image, and the model reads text only.")


def test_a_model_of_texts_gets_the_names_of_earlier_images(seeing: Page, stand_in: StandIn) -> None:
    attach(seeing, image("red.png", png(5, 3)))
    ask_and_wait(seeing, "See?")
    stand_in.modalities = ["text"]
    seeing.reload()
    expect(seeing.get_by_role("button", name="Attach text files")).to_be_visible()
    ask_and_wait(seeing, "And now?")
    assert stand_in.bodies[-1]["messages"][0]["content"] == "[Image: red.png]\n\nSee?"


def test_drafts_keep_images_while_the_page_is_open(seeing: Page) -> None:
    ask_and_wait(seeing, "First")
    attach(seeing, image("red.png", png(5, 3)))
    composer(seeing).fill("A draft")
    seeing.get_by_role("button", name="New chat").click()
    expect(drafts(seeing)).to_have_count(0)
    seeing.get_by_role("button", name="First", exact=True).click()
    expect(drafts(seeing)).to_have_count(1)
    expect(composer(seeing)).to_have_value("A draft")
    assert "base64" not in seeing.evaluate("JSON.stringify({ ...localStorage })")


def test_images_are_exported_and_imported(seeing: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Red."])]
    attach(seeing, image("a [red] one.png", png(5, 3)))
    ask_and_wait(seeing, "See?")
    url = stand_in.bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
    _, text = saved(seeing, "Export as Markdown")
    assert f"![a \\[red\\] one.png]({url})\n\nSee?" in text
    _, exported = saved(seeing, "Export as JSON")
    (file,) = json.loads(exported)["conversations"][0]["nodes"][0]["files"]
    assert file == {"name": "a [red] one.png", "image": url}
    seeing.get_by_role("button", name="New chat").click()
    import_(seeing, exported.replace('"title": "See?"', '"title": "Again"'))
    seeing.get_by_role("button", name="Again", exact=True).click()
    expect(questions(seeing).first.get_by_role("img")).to_have_attribute("src", url)


@pytest.mark.parametrize(
    "url",
    [
        "https://e.org/x.png",
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "javascript:pwned=1",
        5,
        "",
    ],
)
def test_no_other_addresses_are_imported(seeing: Page, url: Any) -> None:
    node = {"id": "q", "parentId": None, "role": "user", "content": "x", "files": [{"name": "a", "image": url}]}
    conversation = {"title": "t", "nodes": [node]}
    import_(seeing, json.dumps({"format": "pagewick-conversations", "version": 1, "conversations": [conversation]}))
    expect(seeing.locator("#toast")).to_contain_text("has files without a name, a text or an image")


def test_images_fit_a_phone(new_page: NewPage, stand_in: StandIn) -> None:
    stand_in.modalities = ["text", "image"]
    page = new_page(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    expect(page.get_by_role("button", name="Attach images or text files")).to_be_visible()
    attach(page, *(image(f"{'long-name-' * 8}{n}.png", png(1500, 300)) for n in range(6)))
    expect(drafts(page)).to_have_count(6)
    assert has_no_horizontal_scroll(page)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answers(page)).to_have_count(1)
    wait_until_finished(page)
    assert has_no_horizontal_scroll(page)
