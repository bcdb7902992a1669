"""Accessibility: axe's rules, keyboard use, narrow screens, reduced motion."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, expect

from tests.page.conftest import AXE, NewPage
from tests.page.driver import (
    IS_SENDING,
    answers,
    ask,
    ask_and_wait,
    close_settings,
    composer,
    conversations,
    go_on_in_time_for_a_speed,
    has_no_horizontal_scroll,
    open_settings,
    questions,
    text_of,
    version,
    wait_until_finished,
)
from tests.page.stand_in import Answer, StandIn

PHONE = {"width": 360, "height": 740}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)

EVERYTHING = (
    """# Heading

A paragraph with **bold**, `code`, a [link](https://e.org/a) and ~~nothing~~.

1. one
   - nested
2. two

- [x] done
- [ ] to do

| Name | Value |
|:-----|------:|
| a long name in a cell | 1 |

```python
def f(x: int) -> str:  # a comment
    return "text" if x > 1_000 else None
```

```html
<a href="x">&amp;</a>
```

```diff
+ added
- removed
```

> A quote.

H~2~O, m<sup>2</sup> and a footnote[^1].

[^1]: Its text.

A_very_long_word_"""
    + "x" * 300
)


def violations(page: Page) -> list[str]:
    """Return axe's serious and critical findings with their elements."""
    assert AXE.exists(), "axe-core is not there: `make test` installs it with npm"
    if page.evaluate("typeof axe === 'undefined'"):
        page.evaluate(AXE.read_text(encoding="utf-8") + "; undefined")
    # axe must not run in the middle of a transition.
    page.evaluate("""() => {
      const finite = document.getAnimations().filter((one) => one.effect.getTiming().iterations === 1);
      return Promise.all(finite.map((one) => one.finished)).then(() => null);
    }""")
    found: list[dict[str, Any]] = page.evaluate(
        "axe.run({ resultTypes: ['violations'] }).then((result) => result.violations)"
    )
    return [
        f"{one['id']} ({one['impact']}): {node['target']} {node['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def attach_both(page: Page, name: str) -> None:
    text: FilePayload = {"name": f"{name}.txt", "mimeType": "text/plain", "buffer": b"text"}
    page.set_input_files("#attach-file", [text, {"name": f"{name}.png", "mimeType": "image/png", "buffer": PIXEL}])
    expect(page.locator("#draft-files .file-name")).to_have_text(f"{name}.txt")
    expect(page.locator("#draft-files img")).to_have_attribute("alt", f"{name}.png")


def fill(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [
        Answer([EVERYTHING], thoughts=["Some *thoughts*."]),
        Answer(["Half"], error="the engine failed"),
        Answer(["x"], finish_reason="length"),
    ]
    for text in ("Show everything", "Fail", "Stop early"):
        ask_and_wait(page, text)
    answers(page).first.locator("summary").click()
    attach_both(page, "notes")
    ask_and_wait(page, "With files")
    questions(page).last.locator("summary").click()
    attach_both(page, "draft")
    page.evaluate("document.querySelectorAll('.actions, .foot').forEach((one) => { one.style.opacity = 1; })")


@pytest.mark.parametrize(
    ("scheme", "is_phone"), [("light", False), ("dark", False), ("light", True)], ids=["light", "dark", "phone"]
)
def test_axe_finds_nothing_serious(new_page: NewPage, stand_in: StandIn, scheme: str, is_phone: bool) -> None:
    options = {"viewport": PHONE, "is_mobile": True, "has_touch": True} if is_phone else {}
    stand_in.modalities = ["text", "image"]
    page = new_page(color_scheme=scheme, reduced_motion="reduce", **options)
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    assert violations(page) == []
    fill(page, stand_in)
    assert violations(page) == []
    open_settings(page)
    page.get_by_label("Temperature").fill("hot")
    assert violations(page) == []
    page.get_by_label("Temperature").fill("")
    close_settings(page)
    page.get_by_role("button", name="Link and export").click()
    expect(page.get_by_role("button", name="Copy the link")).to_be_focused()
    assert violations(page) == []
    page.keyboard.press("Escape")
    if is_phone:
        page.get_by_role("button", name="Conversations", exact=True).click()
    else:
        page.get_by_role("button", name="Edit the message").first.click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    stand_in.key = "k"
    page.reload()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert violations(page) == []
    stand_in.key = None


def test_axe_finds_an_injected_fault(page: Page) -> None:
    page.evaluate("document.getElementById('new-chat').replaceChildren()")
    assert any("button-name" in one for one in violations(page))


def test_keys_write_send_and_stop(page: Page, stand_in: StandIn) -> None:
    expect(composer(page)).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    stand_in.answers = [Answer(["a", "b"], holds_after=1)]
    page.keyboard.press("Enter")
    expect(text_of(answers(page).last)).to_have_text("a")
    assert stand_in.bodies[0]["messages"][0]["content"] == "two\nlines"
    expect(composer(page)).to_have_value("")
    page.keyboard.type("next")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=IS_SENDING)).to_be_visible()
    expect(composer(page)).to_have_value("next")
    page.keyboard.press("Escape")
    wait_until_finished(page)
    expect(answers(page).last.locator(".note p")).to_have_text("Stopped.")
    page.keyboard.press("Enter")
    expect(questions(page)).to_have_count(2)


def test_an_unfinished_composition_is_not_sent(page: Page, stand_in: StandIn) -> None:
    composer(page).fill("にほん")
    composer(page).dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    ask_and_wait(page, "日本")
    assert [body["messages"] for body in stand_in.bodies] == [[{"role": "user", "content": "日本"}]]


def test_the_arrow_edits_the_last_question(page: Page, stand_in: StandIn) -> None:
    ask_and_wait(page, "First")
    ask_and_wait(page, "Second")
    composer(page).fill("draft")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("textbox", name="Edit the message")).to_have_count(0)
    composer(page).fill("")
    page.keyboard.press("ArrowUp")
    box = page.get_by_role("textbox", name="Edit the message")
    expect(box).to_have_value("Second")
    expect(box).to_be_focused()
    page.keyboard.type(" thought")
    page.keyboard.press("Enter")
    expect(composer(page)).to_be_focused()
    wait_until_finished(page)
    assert stand_in.bodies[-1]["messages"][-1]["content"] == "Second thought"


def test_shortcuts(page: Page) -> None:
    ask_and_wait(page, "Hi")
    page.keyboard.press("Control+Shift+O")
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    expect(composer(page)).to_be_focused()
    search = page.get_by_role("searchbox", name="Search conversations")
    page.keyboard.press("Control+K")
    expect(search).to_be_focused()
    page.keyboard.press("Control+B")
    expect(search).to_be_hidden()
    page.reload()
    expect(composer(page)).to_be_focused()
    expect(search).to_be_hidden()
    page.keyboard.press("Control+K")
    expect(search).to_be_focused()
    # The list is read from the browser's storage after the reload.
    expect(conversations(page)).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(questions(page)).to_have_count(1)


def test_everything_is_reached_with_the_tab_key(page: Page) -> None:
    ask_and_wait(page, "Hi")
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(28):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("""() => {
          const one = document.activeElement;
          return one.getAttribute("aria-label") || one.labels?.[0]?.textContent || one.textContent.trim();
        }""")
        )
    expected = [
        "Skip to the message box", "New chat", "Search conversations", "Hi", "Rename Hi", "Delete Hi", "Import",
        "Export all", "Conversations", "Model", "Theme: as the system", "Settings", "Copy the message",
        "Edit the message", "Copy the answer", "Edit the answer", "Answer again", "Message", "Link and export",
        "Attach text files",
    ]  # fmt: skip
    assert [one for one in expected if one not in reached] == []


def test_dialogs_hold_and_return_the_focus(page: Page) -> None:
    opener = page.get_by_role("button", name="Settings", exact=True)
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog).to_be_visible()
    assert dialog.evaluate("(dialog) => dialog.contains(document.activeElement)")
    page.keyboard.press("Control+Shift+O")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(opener).to_be_focused()


def test_a_phone_needs_no_sideways_scrolling(new_page: NewPage, stand_in: StandIn) -> None:
    stand_in.modalities = ["text", "image"]
    page = new_page(viewport=PHONE, is_mobile=True, has_touch=True)
    assert has_no_horizontal_scroll(page)
    fill(page, stand_in)
    assert has_no_horizontal_scroll(page)
    thread = page.locator("#scroller").evaluate("(s) => s.scrollWidth <= s.clientWidth")
    assert thread
    open_settings(page)
    assert has_no_horizontal_scroll(page)
    close_settings(page)
    expect(composer(page)).to_be_in_viewport()


def test_on_a_phone_the_buttons_of_an_answer_have_one_line(new_page: NewPage, stand_in: StandIn) -> None:
    page = new_page(viewport=PHONE, is_mobile=True, has_touch=True)
    stand_in.answers = [Answer(), Answer(["a", "b", "c"], holds_after=2)]
    ask_and_wait(page, "Hi")
    answers(page).last.get_by_role("button", name="Answer again").click()
    expect(text_of(answers(page).last)).to_have_text("ab")
    go_on_in_time_for_a_speed(page, stand_in)
    expect(version(answers(page).last)).to_have_text("2/2")
    wait_until_finished(page)
    foot = answers(page).last.locator(".foot")
    speed = foot.get_by_text("tokens/s")
    expect(speed).to_be_in_viewport(ratio=1)
    buttons = foot.get_by_role("button")
    expect(buttons).to_have_count(6)
    boxes = [box for one in buttons.all() if (box := one.bounding_box())]
    assert len({box["y"] for box in boxes}) == 1 and all(box["width"] >= 32 for box in boxes)
    assert foot.evaluate("(foot) => foot.clientHeight") <= 40
    foot.get_by_role("button", name="Edit the answer").click()
    expect(page.get_by_role("button", name="Save as a version")).to_be_in_viewport(ratio=1)
    page.keyboard.press("Escape")
    details = foot.get_by_text("32 of 40 cached")
    expect(details).to_be_hidden()
    foot.get_by_role("button", name="More numbers").click()
    expect(details).to_be_in_viewport(ratio=1)
    expect(foot.get_by_role("button", name="More numbers")).to_have_attribute("aria-expanded", "true")
    assert has_no_horizontal_scroll(page)


def test_on_a_wide_screen_all_numbers_are_shown(page: Page) -> None:
    ask_and_wait(page, "Hi")
    expect(answers(page).last.get_by_text("32 of 40 cached")).to_be_visible()
    expect(answers(page).last.get_by_role("button", name="More numbers")).to_be_hidden()


def test_on_a_phone_the_list_is_a_drawer(new_page: NewPage) -> None:
    page = new_page(viewport=PHONE, is_mobile=True, has_touch=True)
    ask_and_wait(page, "Hi")
    expect(conversations(page)).to_be_hidden()
    opener = page.get_by_role("button", name="Conversations", exact=True)
    opener.click()
    expect(page.get_by_role("searchbox")).to_be_focused()
    # The page behind the drawer cannot be reached.
    assert composer(page).evaluate("(box) => { box.focus(); return document.activeElement !== box; }")
    page.keyboard.press("Escape")
    expect(conversations(page)).to_be_hidden()
    expect(opener).to_be_focused()
    opener.click()
    page.get_by_role("button", name="New chat").click()
    expect(conversations(page)).to_be_hidden()
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    opener.click()
    page.locator("#backdrop").click(position={"x": 350, "y": 400})
    expect(conversations(page)).to_be_hidden()


def test_the_theme_is_chosen_and_stays(page: Page) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="dark")
    dark = background()
    page.get_by_role("button", name="Theme: as the system").click()
    light = background()
    assert light != dark
    page.reload()
    assert background() == light
    page.get_by_role("button", name="Theme: light").click()
    page.emulate_media(color_scheme="light")
    assert background() == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert background() == light


def test_reduced_motion(new_page: NewPage, stand_in: StandIn) -> None:
    page = new_page(reduced_motion="reduce")
    stand_in.answers = [Answer(["a"], thoughts=["b"], holds_after=0)]
    ask(page, "Hi")
    expect(answers(page).last.locator("summary")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0


def test_landmarks_and_outline(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["# Part\n\ntext"])]
    ask_and_wait(page, "Outline")
    for role in ("main", "navigation", "banner"):
        expect(page.get_by_role(role)).to_have_count(1)  # type: ignore[arg-type]
    headings = page.locator("h1, main :is(h2, h3)").evaluate_all(
        "(all) => all.filter((one) => one.checkVisibility()).map((h) => `${h.tagName} ${h.textContent}`)"
    )
    assert headings == ["H1 Outline", "H2 You", "H2 Answer of org/stand-in", "H3 Part"]
