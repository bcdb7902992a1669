"""No text of a model, a user, a file or a server is interpreted as markup or code."""

from __future__ import annotations

import json

from playwright.sync_api import Page, expect

from tests.page.conftest import Watch
from tests.page.driver import answers, ask_and_wait, conversations, questions, text_of, until
from tests.page.stand_in import Answer, StandIn

# Interpreted as markup, each one would set window.pwned, open a dialog, leave the page or load something.
PAYLOADS = [
    "<script>pwned=1</script>",
    "<script src=//evil.example/x.js></script>",
    "<img src=x onerror=pwned=1>",
    '<img src="https://evil.example/pixel.png">',
    "<svg onload=pwned=1>",
    "<svg><script>pwned=1</script></svg>",
    "<svg><animate onbegin=pwned=1 attributeName=x dur=1s>",
    "<iframe src=javascript:parent.pwned=1></iframe>",
    '<iframe srcdoc="<script>parent.pwned=1</script>"></iframe>',
    "<object data=javascript:pwned=1>",
    "<embed src=javascript:pwned=1>",
    "<body onload=pwned=1>",
    "<details open ontoggle=pwned=1>x</details>",
    "<video><source onerror=pwned=1></video>",
    "<input autofocus onfocus=pwned=1>",
    "<form action=javascript:pwned=1><button>x</button></form>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<base href=https://evil.example/>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<style>@import 'https://evil.example/x.css'; body{display:none}</style>",
    "<math><mtext><table><mglyph><style><img src=x onerror=pwned=1>",
    "<template><img src=x onerror=pwned=1></template>",
    "</p></article></main><script>pwned=1</script>",
    "<!--><img src=x onerror=pwned=1>-->",
    "<![CDATA[<img src=x onerror=pwned=1>]]>",
    "[a](javascript:pwned=1)",
    "[a](JaVaScRiPt:pwned=1)",
    "[a](java\nscript:pwned=1)",
    "[a](&#106;avascript:pwned=1)",
    "[a](javascript&colon;pwned=1)",
    "[a](\x01javascript:pwned=1)",
    "[a](<javascript:pwned=1>)",
    "[a]( javascript:pwned=1 )",
    "[a](vbscript:pwned=1)",
    "[a](data:text/html,<script>opener.pwned=1</script>)",
    "[a](data:text/html;base64,PHNjcmlwdD5vcGVuZXIucHduZWQ9MTwvc2NyaXB0Pg==)",
    "[a](blob:https://evil.example/x)",
    "[a](file:///etc/passwd)",
    "[a](//evil.example/x)",
    '[a](https://e.org/"onmouseover="pwned=1)',
    "[a](https://e.org/ \"onmouseover='pwned=1'\")",
    "<javascript:pwned=1>",
    "<https://e.org/\"onclick=pwned=1>",
    "![a](javascript:pwned=1)",
    "![a](https://evil.example/pixel.png)",
    "![a](data:image/svg+xml,<svg onload=pwned=1>)",
    "![a](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9InB3bmVkPTEiPg==)",
    "![a](data:text/html;base64,PHNjcmlwdD5wd25lZD0xPC9zY3JpcHQ+)",
    '![" onerror="pwned=1](x)',
    "```\"><img src=x onerror=pwned=1>\nx\n```",
    "```html\n<img src=x onerror=pwned=1>\n```",
    "`<img src=x onerror=pwned=1>`",
    "```__proto__\nx\n```",
    "| <img src=x onerror=pwned=1> | b |\n|---|---|\n| <script>pwned=1</script> | c |",
    "- [x] <img src=x onerror=pwned=1>",
    "> <script>pwned=1</script>",
    "# <svg onload=pwned=1>",
    "&lt;script&gt;pwned=1&lt;/script&gt;",
    "\\(<img src=x onerror=pwned=1>\\) $$<script>pwned=1</script>$$",
    "${pwned=1} {{constructor.constructor('pwned=1')()}} #{pwned=1}",
    "\u202e\u0000<script>pwned=1</script>",
]  # fmt: skip

# Finds elements that only interpreted markup can create, and forbidden link targets.
FOUND = """() => {
  const made = document.querySelectorAll(
    "#thread :is(script, iframe, object, embed, svg:not(.icon), style, link, meta, base, form, video, template), "
    + "#thread math:not(.formula > math), "
    + "#thread :is([onload], [onerror], [onclick], [onfocus], [ontoggle], [onmouseover], [style], [srcdoc]), "
    + "#sidebar :is(script, iframe, [onerror]), option :is(*), "
    + "#thread .formula > math :is(:not(math, mi, mn, mo, mrow, mstyle, mpadded, mtext, mspace), [href], [src])");
  const targets = [...document.querySelectorAll("#thread [href], #thread [src]")].map((one) => one.href ?? one.src);
  return {
    made: [...made].map((one) => one.outerHTML),
    targets: targets.filter((target) => !/^(https?:|mailto:|data:image.(png|jpeg|gif|webp|avif);base64,)/.test(target)),
    unsafe: document.querySelectorAll("#thread a:not([rel~=noopener][target=_blank])").length,
    pwned: window.pwned ?? null,
  };
}"""
NOTHING = {"made": [], "targets": [], "unsafe": 0, "pwned": None}


def click_all_links(page: Page) -> None:
    """Click every link like a user, but prevent the navigation."""
    page.evaluate("""() => {
      for (const link of document.querySelectorAll("#thread a")) {
        link.addEventListener("click", (event) => event.preventDefault());
        const options = { bubbles: true, cancelable: true };
        for (const kind of ["mouseover", "focus", "click"]) link.dispatchEvent(new MouseEvent(kind, options));
      }
    }""")


def test_there_are_many_payloads() -> None:
    assert len(set(PAYLOADS)) == len(PAYLOADS) >= 30


def test_in_answers_and_thoughts(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["\n\n".join(PAYLOADS)], thoughts=["\n\n".join(PAYLOADS)])]
    ask_and_wait(page, "Attack")
    answers(page).last.locator("summary").first.click()
    expect(answers(page).last.locator("details .prose")).to_contain_text("evil.example")
    click_all_links(page)
    assert page.evaluate(FOUND) == NOTHING
    assert page.url.startswith(stand_in.url)


def test_cut_at_every_letter(page: Page) -> None:
    """A text that is harmless when complete could be harmful while it grows."""
    found = page.evaluate(
        """async (payloads) => {
      const { MarkdownView } = await import("/page/markdown.js");
      const box = document.createElement("div");
      document.getElementById("thread").append(box);
      document.getElementById("thread").hidden = false;
      for (const payload of payloads) {
        const view = new MarkdownView(document.createElement("div"));
        box.replaceChildren(view.element);
        for (let end = 0; end <= payload.length; end += 1) view.update(payload.slice(0, end), false);
        view.update(payload, true);
        if (box.querySelector("script, iframe, [onerror], [onload], [href^=javascript]")) return payload;
      }
      box.remove();
      return window.pwned ?? null;
    }""",
        PAYLOADS,
    )
    assert found is None


def test_in_questions_and_titles(page: Page, stand_in: StandIn) -> None:
    payload = " ".join(PAYLOADS)
    ask_and_wait(page, payload)
    expect(questions(page).locator(".bubble")).to_contain_text("<script>pwned=1</script>")
    assert page.evaluate(FOUND) == NOTHING
    assert page.locator("#conversation-list").inner_html().count("<img") == 0
    page.get_by_role("searchbox").fill("<svg onload")
    expect(page.locator(".snippet mark")).to_have_text("<svg onload")
    page.reload()
    expect(questions(page)).to_have_count(1)
    assert page.evaluate(FOUND) == NOTHING


def test_in_names_of_models(page: Page, stand_in: StandIn) -> None:
    payload = "</option><script>pwned=1</script><img src=x onerror=pwned=1>"
    stand_in.models = [payload, "javascript:pwned=1"]
    page.reload()
    expect(page.get_by_role("combobox", name="Model")).to_have_value(payload)
    expect(page.locator("#empty-model")).to_contain_text(payload)
    ask_and_wait(page, "Hi")
    expect(answers(page).last.get_by_role("heading", name=f"Answer of {payload}")).to_have_count(1)
    assert page.evaluate(FOUND) == NOTHING


def test_in_errors(page: Page, stand_in: StandIn) -> None:
    payload = " ".join(PAYLOADS)
    stand_in.answers = [Answer(status=400, error=payload), Answer(["x"], error=payload)]
    for text in ("One", "Two"):
        ask_and_wait(page, text)
        expect(answers(page).last.locator(".error")).to_contain_text("<script>pwned=1</script>")
    assert page.evaluate(FOUND) == NOTHING


def test_in_imported_files(page: Page) -> None:
    payload = "\n\n".join(PAYLOADS)
    nodes = [
        {"id": "__proto__", "parentId": None, "role": "user", "content": payload, "selectedChild": "constructor"},
        {
            "id": "constructor",
            "parentId": "__proto__",
            "role": "assistant",
            "content": payload,
            "reasoning": payload,
            "model": payload,
            "finishReason": payload,
            "error": {"message": payload, "status": payload, "retryAt": payload},
            "stats": {"promptTokens": payload, "completionTokens": payload, "__proto__": {"pwned": 1}},
            "__proto__": {"pwned": 1},
        },
    ]
    conversation = {"id": payload, "title": payload, "isNamed": True, "updatedAt": payload, "selectedRoot": "__proto__"}
    file = {"format": "pagewick-conversations", "version": 1, "conversations": [{**conversation, "nodes": nodes}]}
    text = json.dumps(file)
    page.set_input_files("#import-file", {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()})
    expect(conversations(page)).to_have_count(1)
    conversations(page).click()
    expect(text_of(answers(page).last)).to_contain_text("evil.example")
    answers(page).last.locator("summary").first.click()
    click_all_links(page)
    assert page.evaluate(FOUND) == NOTHING
    assert page.evaluate("({}).pwned === undefined")
    page.reload()
    assert page.evaluate(FOUND) == NOTHING


def test_in_the_address(page: Page, stand_in: StandIn) -> None:
    page.goto(f"{stand_in.url}/?q=<script>pwned=1</script>#<img src=x onerror=pwned=1>")
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    ask_and_wait(page, "Hi")
    assert page.evaluate(FOUND) == NOTHING


def test_the_policy_stops_injected_markup(page: Page, shared_page: tuple[Page, Watch]) -> None:
    """Markup that got into the page would have no effect, and the tests would detect the attempt."""
    page.evaluate("document.getElementById('thread').innerHTML = '<img src=x onerror=pwned=1>'")
    until(lambda: page.evaluate("window.violations.length"))
    assert page.evaluate("window.violations") == ["script-src-attr inline"]
    assert len(shared_page[1].take(page.context)) == 2  # the console reports it, too
    page.evaluate("window.violations = []")
    assert page.evaluate("window.pwned ?? null") is None


def test_links_are_what_they_say(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["[a](https://e.org/x) [b](mailto:m@e.org) [c](ftp://e.org/x) [d](javascript:pwned=1)"])]
    ask_and_wait(page, "Links")
    links = text_of(answers(page).last).locator("a")
    assert links.evaluate_all("(links) => links.map((a) => [a.textContent, a.href, a.rel, a.target])") == [
        ["a", "https://e.org/x", "noopener noreferrer nofollow", "_blank"],
        ["b", "mailto:m@e.org", "noopener noreferrer nofollow", "_blank"],
    ]
    expect(text_of(answers(page).last)).to_contain_text("c (ftp://e.org/x) d (javascript:pwned=1)")
