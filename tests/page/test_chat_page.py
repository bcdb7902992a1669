"""Chat: streaming, stopping, thoughts, branches, settings, API keys, errors."""

from __future__ import annotations

import time

from playwright.sync_api import Page, expect

from tests.page.conftest import TIMEOUT_MS, NewPage
from tests.page.driver import (
    IS_SENDING,
    again,
    answers,
    ask,
    ask_and_wait,
    composer,
    edit,
    go_on_in_time_for_a_speed,
    questions,
    text_of,
    until,
    version,
    wait_until_finished,
)
from tests.page.stand_in import MODEL, Answer, StandIn


def test_an_answer_comes_piece_by_piece(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["One ", "**two", "** three", " four."], holds_after=3)]
    ask(page, "Count, please")
    expect(text_of(answers(page).last)).to_have_text("One two three")
    expect(page.get_by_role("button", name=IS_SENDING)).to_be_visible()
    stand_in.go_on()
    wait_until_finished(page)
    expect(text_of(answers(page).last)).to_have_text("One two three four.")
    expect(text_of(answers(page).last).locator("strong")).to_have_text("two")
    expect(page.get_by_role("status").first).to_have_text("Answer: One **two** three four.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()


def test_the_request(page: Page, stand_in: StandIn) -> None:
    ask_and_wait(page, "First?")
    ask_and_wait(page, "Second?")
    assert stand_in.bodies[0] == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "First?"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert stand_in.bodies[1]["messages"] == [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "Hello from the stand-in."},
        {"role": "user", "content": "Second?"},
    ]
    assert set(stand_in.keys) == {None}


def test_numbers_under_an_answer(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["a", "b", "c"], holds_after=2), Answer(["all", "at", "once"])]
    ask(page, "Hi")
    go_on_in_time_for_a_speed(page, stand_in)
    wait_until_finished(page)
    stats = answers(page).last.locator(".stats")
    expect(stats).to_contain_text("9 tokens")
    expect(stats).to_contain_text("tokens/s")
    expect(stats).to_contain_text("32 of 40 cached")
    expect(stats).to_contain_text("context 49 / 2,048")
    assert stats.locator("meter").evaluate("(meter) => [meter.value, meter.max]") == [49, 2048]
    ask_and_wait(page, "Quick")
    expect(answers(page).last.locator(".stats")).to_contain_text("9 tokens")
    expect(answers(page).last.locator(".stats")).not_to_contain_text("tokens/s")


def test_stop_ends_the_request_and_keeps_what_came(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Some of it", " and the rest"], holds_after=1)]
    ask(page, "Talk")
    expect(text_of(answers(page).last)).to_have_text("Some of it")
    page.get_by_role("button", name=IS_SENDING).click()
    wait_until_finished(page)
    expect(answers(page).last.locator(".note p")).to_have_text("Stopped.")
    until(lambda: stand_in.num_left == 1)
    ask_and_wait(page, "Go on")
    assert stand_in.bodies[1]["messages"][1] == {"role": "assistant", "content": "Some of it"}


def test_thoughts_are_folded(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Forty", "-two."], thoughts=["Let me ", "*think*."], holds_after=1)]
    ask(page, "Why?")
    thoughts = answers(page).last.locator("details")
    expect(text_of(answers(page).last)).to_have_text("Forty")
    expect(thoughts.locator("summary")).to_have_text("Thoughts")
    expect(thoughts.locator(".prose")).to_be_hidden()
    stand_in.go_on()
    wait_until_finished(page)
    thoughts.locator("summary").click()
    expect(thoughts.locator("em")).to_have_text("think")
    ask_and_wait(page, "And?")
    assert stand_in.bodies[1]["messages"][1] == {"role": "assistant", "content": "Forty-two."}


def test_unfolded_thoughts_grow(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["End."], thoughts=["One. ", "Two."], holds_after=0)]
    ask(page, "Why?")
    thoughts = answers(page).last.locator("details")
    expect(thoughts.locator("summary")).to_have_text("Thinking…")
    thoughts.locator("summary").click()
    expect(thoughts.locator(".prose")).to_have_text("One. Two.")


def test_another_answer_is_a_branch(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["First answer"]), Answer(["Second answer"]), Answer(["Third answer"])]
    ask_and_wait(page, "Say something")
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("2/2")
    again(answers(page).last)
    expect(version(answers(page).last)).to_have_text("3/3")
    expect(text_of(answers(page).last)).to_have_text("Third answer")
    assert [body["messages"] for body in stand_in.bodies] == [[{"role": "user", "content": "Say something"}]] * 3
    previous = answers(page).last.get_by_role("button", name="Previous version")
    previous.click()
    expect(text_of(answers(page).last)).to_have_text("Second answer")
    previous.click()
    expect(version(answers(page).last)).to_have_text("1/3")
    expect(previous).to_be_disabled()
    answers(page).last.get_by_role("button", name="Next version").click()
    expect(text_of(answers(page).last)).to_have_text("Second answer")


def test_an_edited_question_is_a_branch_with_its_own_sequel(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["About cats"]), Answer(["More about cats"]), Answer(["About dogs"])]
    ask_and_wait(page, "Cats?")
    ask_and_wait(page, "More?")
    edit(page, questions(page).first, "Dogs?")
    expect(questions(page)).to_have_count(1)
    wait_until_finished(page)
    expect(text_of(answers(page).last)).to_have_text("About dogs")
    assert stand_in.bodies[2]["messages"] == [{"role": "user", "content": "Dogs?"}]
    questions(page).first.hover()
    expect(version(questions(page).first)).to_have_text("2/2")
    questions(page).first.get_by_role("button", name="Previous version").click()
    expect(text_of(answers(page).last)).to_have_text("More about cats")
    expect(questions(page)).to_have_count(2)


def test_editing_can_be_cancelled(page: Page) -> None:
    ask_and_wait(page, "Keep me")
    questions(page).first.hover()
    questions(page).first.get_by_role("button", name="Edit the message").click()
    page.get_by_role("textbox", name="Edit the message").fill("Something else")
    page.keyboard.press("Escape")
    expect(questions(page).first.locator(".bubble")).to_have_text("Keep me")
    expect(questions(page).first.get_by_role("button", name="Edit the message")).to_be_focused()


def test_the_chosen_model_is_asked(page: Page, stand_in: StandIn) -> None:
    stand_in.models = ["first", "second"]
    page.reload()
    page.get_by_role("combobox", name="Model").select_option("second")
    ask_and_wait(page, "Hi")
    page.reload()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("second")
    assert stand_in.bodies[0]["model"] == "second"


def test_a_key_is_asked_for_and_sent_but_never_written(new_page: NewPage, stand_in: StandIn) -> None:
    stand_in.key = "secret-key"
    page = new_page()
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    box = dialog.get_by_label("API key")
    expect(box).to_be_focused()
    box.fill("wrong")
    box.press("Enter")
    expect(dialog.get_by_text("the API key is missing or wrong")).to_be_visible()
    # No browser sends such a header.
    box.fill("secret\u2013key")
    box.press("Enter")
    expect(dialog.get_by_text("The API key has spaces or other characters that no key has.")).to_be_visible()
    box.fill("secret-key")
    dialog.get_by_role("button", name="Connect").click()
    expect(page.get_by_role("combobox", name="Model")).to_have_value(MODEL)
    ask_and_wait(page, "Hi")
    assert stand_in.keys[0] is None and stand_in.keys[-1] == "Bearer secret-key"
    kept = page.evaluate("""async () => {
      const open = indexedDB.open("pagewick");
      await new Promise((resolve) => { open.onsuccess = resolve; });
      const all = open.result.transaction("conversations").objectStore("conversations").getAll();
      await new Promise((resolve) => { all.onsuccess = resolve; });
      open.result.close();
      return JSON.stringify([{ ...localStorage }, document.cookie, all.result]);
    }""")
    assert "stand-in" in kept and "secret-key" not in kept
    page.reload()
    expect(answers(page)).to_have_count(1)
    ask_and_wait(page, "Still there?")


def test_the_page_asks_again_when_a_key_is_no_longer_valid(page: Page, stand_in: StandIn) -> None:
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    stand_in.key = "new"
    ask(page, "Hi")
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("API key").fill("new")
    dialog.get_by_role("button", name="Connect").click()
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    expect(answers(page)).to_have_count(1)


def test_a_busy_server_is_retried_after_the_time_that_it_named(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(status=429, error="too many wait", headers={"retry-after": "2"})]
    ask_and_wait(page, "Hi")
    error = answers(page).last.locator(".error")
    expect(error).to_contain_text("The server is busy")
    expect(error).to_contain_text("too many wait")
    expect(error.get_by_role("button")).to_be_disabled()
    expect(error.get_by_role("button")).to_have_text("Try again")
    error.get_by_role("button").click()
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")
    expect(answers(page).locator(".branch-count")).to_have_count(0)
    assert [body["messages"] for body in stand_in.bodies] == [[{"role": "user", "content": "Hi"}]] * 2


def test_a_server_that_is_not_ready(page: Page, stand_in: StandIn) -> None:
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 3600))
    stand_in.answers = [Answer(status=503, error="restarting", headers={"retry-after": later})]
    ask_and_wait(page, "Hi")
    expect(answers(page).last.locator(".error")).to_contain_text("The server is not ready")
    expect(answers(page).last.locator(".error").get_by_role("button")).to_contain_text("Try again in 3")


def test_an_error_in_the_middle_keeps_what_came(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Half an", " answer"], error="the engine failed"), Answer(["A whole one"])]
    ask_and_wait(page, "Hi")
    expect(text_of(answers(page).last)).to_have_text("Half an answer")
    expect(answers(page).last.locator(".error")).to_contain_text("the engine failed")
    answers(page).last.get_by_role("button", name="Try again").click()
    expect(text_of(answers(page).last)).to_have_text("A whole one")
    expect(version(answers(page).last)).to_have_text("2/2")


def test_a_broken_connection_is_reported(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Half"], breaks=True)]
    ask_and_wait(page, "Hi")
    expect(answers(page).last.locator(".error")).to_contain_text("ended before the answer was complete")


def test_a_refusal_says_why(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(status=400, error="the prompt has 5000 tokens; the model takes 2048")]
    ask_and_wait(page, "Hi")
    expect(answers(page).last.locator(".error")).to_contain_text("the prompt has 5000 tokens")


def test_an_unreachable_server(page: Page, stand_in: StandIn) -> None:
    expect(page.get_by_role("combobox", name="Model")).to_be_enabled()
    page.route("**/v1/**", lambda route: route.abort())
    ask_and_wait(page, "Hi")
    expect(answers(page).last.locator(".error")).to_contain_text("cannot be reached")
    page.reload()
    notice = page.get_by_role("alert").filter(has_text="No connection")
    expect(notice).to_be_visible()
    page.unroute_all()
    notice.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("combobox", name="Model")).to_have_value(MODEL)
    answers(page).last.get_by_role("button", name="Try again").click()
    expect(text_of(answers(page).last)).to_have_text("Hello from the stand-in.")


def test_the_length_limit_is_reported(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["and so"], finish_reason="length")]
    ask_and_wait(page, "Hi")
    expect(answers(page).last.locator(".note")).to_contain_text("limit of its length")


def test_examples_are_asked_with_a_click(page: Page, stand_in: StandIn) -> None:
    stand_in.models = ["pagewick-demo"]
    page.reload()
    introduction = "pagewick-demo is a 5-million-parameter model that knows only Pagewick. It runs on this server."
    expect(page.locator("#empty-model")).to_have_text(introduction)
    page.get_by_role("button", name="What is PagedAttention?").click()
    wait_until_finished(page)
    assert stand_in.bodies[0]["messages"][0]["content"] == "What is PagedAttention?"


def test_an_answer_goes_on_while_another_conversation_is_read(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Begun", " and done"], holds_after=1)]
    ask(page, "Slow one")
    expect(text_of(answers(page).last)).to_have_text("Begun")
    page.get_by_role("button", name="New chat").click()
    ask_and_wait(page, "Quick one")
    stand_in.go_on()
    page.get_by_role("button", name="Slow one", exact=True).click()
    expect(text_of(answers(page).last)).to_have_text("Begun and done")
    wait_until_finished(page)


def test_code_is_copied(new_page: NewPage, stand_in: StandIn) -> None:
    page = new_page(permissions=["clipboard-read", "clipboard-write"])
    stand_in.answers = [Answer(["```python\nif a < b:\n", "    print('x')\n```\n"])]
    ask_and_wait(page, "Code")
    page.get_by_role("button", name="Copy the code").click()
    expect(page.get_by_role("status").first).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('x')"
    expect(page.locator("figcaption")).to_have_text("Python")


def test_a_long_answer_stays_whole(page: Page, stand_in: StandIn) -> None:
    paragraph = "All *work* and `no play`. " * 8 + "\n\n"
    stand_in.answers = [Answer([paragraph[at : at + 26] for at in range(0, len(paragraph), 26)] * 480)]
    ask(page, "Write a lot")
    expect(answers(page).last).to_have_attribute("aria-busy", "false", timeout=3 * TIMEOUT_MS)
    assert text_of(answers(page).last).locator("p").count() == 480
    assert text_of(answers(page).last).locator("em").count() == 480 * 8


def test_the_page_follows_the_answer_unless_the_reader_scrolls(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["line\n\n"] * 60 + ["the end"], holds_after=60)]
    ask(page, "Write")
    expect(text_of(answers(page).last).locator("p")).to_have_count(60)
    scroller = page.locator("#scroller")
    until(lambda: scroller.evaluate("(s) => s.scrollHeight - s.scrollTop - s.clientHeight < 2"))
    scroller.evaluate("(s) => { s.scrollTop = 0; }")
    to_end = page.get_by_role("button", name="Go to the end")
    expect(to_end).to_be_visible()
    stand_in.go_on()
    wait_until_finished(page)
    assert scroller.evaluate("(s) => s.scrollTop") == 0
    to_end.click()
    expect(to_end).to_be_hidden()
    expect(composer(page)).to_be_visible()
