"""Responses that are cut by a reload, continued, edited or failed, and their speed."""

from __future__ import annotations

import json

from playwright.sync_api import Page, expect

from tests.page.driver import (
    IS_SENDING,
    again,
    answers,
    ask,
    ask_and_wait,
    continue_button,
    go_on_in_time_for_a_speed,
    text_of,
    until,
    version,
    wait_until_finished,
)
from tests.page.stand_in import USAGE, Answer, StandIn


def begin_and_reload(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Half a", " sentence"], thoughts=["Hm."], holds_after=1)]
    ask(page, "Slow")
    expect(text_of(answers(page).last)).to_have_text("Half a")
    page.reload()
    expect(text_of(answers(page).last)).to_have_text("Half a")
    expect(answers(page).last.locator(".note p")).to_have_text(
        "Cut: the page was closed or reloaded before the answer was complete."
    )


def test_a_reload_says_that_it_cut_the_answer_and_the_model_continues_it(page: Page, stand_in: StandIn) -> None:
    begin_and_reload(page, stand_in)
    until(lambda: stand_in.num_left == 1)
    expect(answers(page).last.locator(".stats")).to_contain_text("2 tokens")
    stand_in.answers = [Answer([" sentence,", " and the rest."])]
    continue_button(page).click()
    expect(text_of(answers(page).last)).to_have_text("Half a sentence, and the rest.")
    wait_until_finished(page)
    expect(answers(page).last.locator(".note")).to_have_count(0)
    body = stand_in.bodies[-1]
    assert body["messages"] == [
        {"role": "user", "content": "Slow"},
        {"role": "assistant", "content": "Half a", "reasoning_content": "Hm."},
    ]
    assert body["continue_final_message"] is True and "add_generation_prompt" not in body
    # The tokens of both parts, and a context that holds the prompt once.
    num_tokens = 2 + USAGE["completion_tokens"]
    expect(answers(page).last.locator(".stats")).to_contain_text(f"{num_tokens} tokens")
    page.reload()
    expect(text_of(answers(page).last)).to_have_text("Half a sentence, and the rest.")
    expect(answers(page).last.locator(".note")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('unfinished'))") == []


def test_an_unfinished_answer_of_an_older_version_is_cut(page: Page) -> None:
    """Older versions of the page stored neither how such a response ended nor its statistics."""
    page.evaluate("""async () => {
      const end = { finishReason: null, isStopped: false, stats: null, error: null };
      const answer = { content: "Old", reasoning: "", model: "", ...end };
      const nodes = [
        { id: "q", parentId: null, selectedChild: "a", role: "user", content: "Hi", createdAt: 1 },
        { id: "a", parentId: "q", selectedChild: null, role: "assistant", createdAt: 2, ...answer },
      ];
      const { promise, resolve } = Promise.withResolvers();
      indexedDB.open("pagewick").onsuccess = ({ target: { result } }) => {
        const store = result.transaction("conversations", "readwrite").objectStore("conversations");
        store.put({ id: "c", title: "Old one", isNamed: false, createdAt: 1, updatedAt: 2, selectedRoot: "q", nodes })
          .onsuccess = () => { result.close(); resolve(); };
      };
      await promise;
    }""")
    page.reload()
    page.get_by_role("button", name="Old one", exact=True).click()
    expect(text_of(answers(page).last)).to_have_text("Old")
    expect(continue_button(page)).to_be_visible()


def test_continue_after_a_length_stop_and_after_stopping(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [
        Answer(["one"], finish_reason="length"),
        Answer([" two", " never"], holds_after=1),
        Answer([" three"]),
    ]
    ask_and_wait(page, "Count")
    expect(answers(page).last.locator(".note p")).to_have_text("The answer ended at the limit of its length.")
    continue_button(page).click()
    expect(text_of(answers(page).last)).to_have_text("one two")
    page.get_by_role("button", name=IS_SENDING).click()
    wait_until_finished(page)
    continue_button(page).click()
    expect(text_of(answers(page).last)).to_have_text("one two three")
    wait_until_finished(page)
    expect(answers(page)).to_have_count(1)
    wait_until_finished(page)
    expect(continue_button(page)).to_have_count(0)
    assert [body["messages"][1:] for body in stand_in.bodies[1:]] == [
        [{"role": "assistant", "content": "one"}],
        [{"role": "assistant", "content": "one two"}],
    ]


def test_only_the_last_answer_can_be_continued(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["one"], finish_reason="length")]
    ask_and_wait(page, "Count")
    ask_and_wait(page, "More")
    expect(answers(page).first.locator(".note")).to_contain_text("limit of its length")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_a_full_context_is_explained_and_not_continued(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["one"], finish_reason="length")]
    stand_in.max_model_len = USAGE["total_tokens"]
    page.reload()
    ask_and_wait(page, "Count")
    expect(answers(page).last.locator(".note")).to_contain_text("the model's context is full")
    expect(continue_button(page)).to_have_count(0)


def test_the_sizes_of_a_model_are_asked_for_again_once_it_is_loaded(page: Page, stand_in: StandIn) -> None:
    """A server of several models does not know them before."""
    stand_in.answers = [Answer(["one"], finish_reason="length"), Answer(["two"], finish_reason="length")]
    stand_in.max_model_len = stand_in.modalities = None
    page.reload()
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    stand_in.max_model_len, stand_in.modalities = USAGE["total_tokens"], ["text"]
    ask_and_wait(page, "Count")
    expect(answers(page).last.locator(".note")).to_contain_text("limit of its length")
    ask_and_wait(page, "More")
    expect(answers(page).last.locator(".note")).to_contain_text("the model's context is full")


def test_a_refused_continuation_keeps_the_text(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["one"], finish_reason="length"), Answer(status=400, error="cannot continue it")]
    ask_and_wait(page, "Count")
    continue_button(page).click()
    expect(answers(page).last.locator(".error")).to_contain_text("cannot continue it")
    expect(text_of(answers(page).last)).to_have_text("one")
    expect(continue_button(page)).to_have_count(0)


def test_an_edited_answer_is_a_version_that_the_model_reads_and_continues(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["The sky is green."], thoughts=["Hm."]), Answer([" Mostly."]), Answer(["Because."])]
    ask_and_wait(page, "Which colour?")
    answers(page).last.hover()
    answers(page).last.get_by_role("button", name="Edit the answer").click()
    box = page.get_by_role("textbox", name="Edit the answer")
    expect(box).to_have_value("The sky is green.")
    box.fill("The sky is blue.")
    box.press("Enter")
    expect(box).to_have_value("The sky is blue.\n")
    box.press("Control+Enter")
    expect(text_of(answers(page).last)).to_have_text("The sky is blue.")
    expect(version(answers(page).last)).to_have_text("2/2")
    expect(answers(page).last.locator(".note p")).to_have_text("Written by you.")
    assert len(stand_in.bodies) == 1
    page.reload()
    continue_button(page).click()
    expect(text_of(answers(page).last)).to_have_text("The sky is blue. Mostly.")
    wait_until_finished(page)
    ask_and_wait(page, "Why?")
    assert stand_in.bodies[-1]["messages"][1] == {"role": "assistant", "content": "The sky is blue. Mostly."}
    answers(page).first.hover()
    answers(page).first.get_by_role("button", name="Previous version").click()
    expect(text_of(answers(page).first)).to_have_text("The sky is green.")


def test_the_speed_is_shown_while_an_answer_is_written_and_after_it_was_stopped(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["a ", "b ", "c ", "d"], holds_after=2, stays_after=3)]
    ask(page, "Hi")
    go_on_in_time_for_a_speed(page, stand_in)
    stats = answers(page).last.locator(".stats")
    expect(stats).to_contain_text("3 tokens")
    expect(stats).to_contain_text("tokens/s")
    expect(answers(page).last).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name=IS_SENDING).click()
    wait_until_finished(page)
    expect(stats).to_contain_text("3 tokens")
    expect(stats).to_contain_text("tokens/s")
    expect(stats).to_contain_text("context 43 / 2,048")


def test_try_again_is_offered_only_where_it_can_help(page: Page, stand_in: StandIn) -> None:
    for status, can_help in ((400, False), (413, False), (500, True)):
        stand_in.answers = [Answer(status=status, error=f"no {status}")]
        ask_and_wait(page, "Hi")
        error = answers(page).last.locator(".error")
        expect(error).to_contain_text(f"no {status}")
        expect(error.get_by_role("button")).to_have_count(int(can_help))
    # After a change of the settings it may be right to ask again. The failed response is replaced.
    again(answers(page).last)
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    expect(answers(page).locator(".branch-count")).to_have_count(0)


def test_without_locks_answers_are_written_and_cut(page: Page, stand_in: StandIn) -> None:
    """Without HTTPS there are no locks, and strict settings forbid them."""
    page.evaluate("navigator.locks.request = () => Promise.reject(new DOMException('denied', 'SecurityError')); null")
    ask_and_wait(page, "Hi")
    page.add_init_script("if (name === 'insecure') Object.defineProperty(navigator, 'locks', { value: undefined })")
    page.evaluate("window.name = 'insecure'")
    page.reload()
    begin_and_reload(page, stand_in)
    continue_button(page).click()
    expect(text_of(answers(page).last)).to_have_text("Half aHello from the stand-in.")
    page.evaluate("window.name = ''")


def test_a_server_that_forbids_the_page_is_not_tried_again(page: Page) -> None:
    error = {"error": {"message": "the host is not allowed"}}
    page.route("**/v1/models", lambda route: route.fulfill(status=403, body=json.dumps(error)))
    page.reload()
    notice = page.get_by_role("alert").filter(has_text="Not allowed")
    expect(notice).to_contain_text("the host is not allowed")
    expect(notice.get_by_role("button")).to_have_count(0)
