"""Markdown as the page shows it: by hand, beside markdown-it-py, and while it is being written."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import Browser, Page

from tests.page.rendered import tree_of
from tests.page.stand_in import StandIn

# The rendering of a text, without what the page adds around code and tables, as HTML.
LOAD = """async () => {
  const { renderMarkdown, MarkdownView } = await import("/page/markdown.js");
  const plain = (node) => {
    const box = document.createElement("div");
    box.append(node.cloneNode(true));
    for (const one of box.querySelectorAll("figure.code")) one.replaceWith(one.querySelector("pre"));
    for (const one of box.querySelectorAll("pre code")) one.textContent = one.textContent;
    for (const one of box.querySelectorAll("div.table")) one.replaceWith(one.firstChild);
    for (const one of box.querySelectorAll("[class^=level-]")) {
      const heading = document.createElement(`h${one.className.slice(6)}`);
      heading.append(...one.childNodes);
      one.replaceWith(heading);
    }
    return box.innerHTML;
  };
  window.rendered = (text) => plain(renderMarkdown(text));
  window.grown = (text, cuts) => {
    const view = new MarkdownView(document.createElement("div"));
    for (const cut of cuts) view.update(text.slice(0, cut), false);
    view.update(text, true);
    const box = document.createDocumentFragment();
    box.append(...view.element.childNodes);
    return plain(box);
  };
}"""

CASES = {
    "plain": ("Hello", "<p>Hello</p>"),
    "headings": ("# One\n###### Six ##\n", "<h1>One</h1><h6>Six</h6>"),
    "underlined headings": ("One\n===\n\nTwo\n---", "<h1>One</h1><h2>Two</h2>"),
    "no heading": ("#hashtag", "<p>#hashtag</p>"),
    "emphasis": (
        "*a* _b_ **c** __d__ ***e***",
        "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> <em><strong>e</strong></em></p>",
    ),
    "words with underscores": ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
    "strike": ("~~gone~~ but ~5 and ~6", "<p><del>gone</del> but ~5 and ~6</p>"),
    "code span": ("`a < b` and ``c ` d``", "<p><code>a &lt; b</code> and <code>c ` d</code></p>"),
    "unclosed code span": ("`never", "<p>`never</p>"),
    "link": ('[a *b*](https://e.org/x "title")', '<p><a href="https://e.org/x">a <em>b</em></a></p>'),
    "link with parentheses": ("[a](https://e.org/x_(y_(z)))", '<p><a href="https://e.org/x_(y_(z))">a</a></p>'),
    "mail": (
        "[write](mailto:a@e.org) <b@e.org>",
        '<p><a href="mailto:a@e.org">write</a> <a href="mailto:b@e.org">b@e.org</a></p>',
    ),
    "relative link": ("[a](docs/x.md)", "<p><span>a (docs/x.md)</span></p>"),
    "autolinks": (
        "<https://e.org/a> https://e.org/b_c_d, (www.e.org/x).",
        '<p><a href="https://e.org/a">https://e.org/a</a> '
        '<a href="https://e.org/b_c_d">https://e.org/b_c_d</a>, (<a href="http://www.e.org/x">www.e.org/x</a>).</p>',
    ),
    "url as its own text": (
        "[https://e.org/a](https://e.org/a)",
        '<p><a href="https://e.org/a">https://e.org/a</a></p>',
    ),
    "picture elsewhere": ("![alt](https://e.org/x.png)", '<p><a href="https://e.org/x.png">alt</a></p>'),
    "picture in the text": (
        "![dot](data:image/png;base64,iVBORw0KGgo=)",
        '<p><img src="data:image/png;base64,iVBORw0KGgo="></p>',
    ),
    "entities": ("&lt;b&gt; &amp;copy; &copy; &#65; &#x42; &nope;", "<p>&lt;b&gt; &amp;copy; © A B &amp;nope;</p>"),
    "html is text": ("<b>x</b> <script>y</script>", "<p>&lt;b&gt;x&lt;/b&gt; &lt;script&gt;y&lt;/script&gt;</p>"),
    "line breaks": ("a  \nb\\\nc\nd<br>e", "<p>a<br>b<br>c d<br>e</p>"),
    "escapes": (r"\*a\* \# \\", "<p>*a* # \\</p>"),
    "formulas": (r"\(a_1 * b_2\) and $$x_i$$ cost $5", "<p><code>a_1 * b_2</code> and <code>x_i</code> cost $5</p>"),
    "nested lists": ("- a\n  1. b\n  2. c\n- d", "<ul><li>a<ol><li>b</li><li>c</li></ol></li><li>d</li></ul>"),
    "loose list": ("1. a\n\n   b\n2. c", "<ol><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>"),
    "list from seven": ("7. a\n8. b", '<ol start="7"><li>a</li><li>b</li></ol>'),
    "a year begins no list": ("It was in\n1984. Really.", "<p>It was in 1984. Really.</p>"),
    "tasks": ("- [x] a\n- [ ] b", '<ul><li><input checked=""> a</li><li><input> b</li></ul>'),
    "code in a list": (
        "- a\n\n  ```sh\n  x\n    y\n  ```\n- b",
        "<ul><li><p>a</p><pre><code>x\n  y</code></pre></li><li><p>b</p></li></ul>",
    ),
    "fence": ("```python\nif a:\n\tb\n```\nc", "<pre><code>if a:\n\tb</code></pre><p>c</p>"),
    "fence in a fence": ("````\n```\n````", "<pre><code>```</code></pre>"),
    "unclosed fence": ("```\na\n\nb", "<pre><code>a\n\nb</code></pre>"),
    "quote": ("> a\nb\n>\n> - c", "<blockquote><p>a b</p><ul><li>c</li></ul></blockquote>"),
    "rule": ("a\n\n* * *\nb", "<p>a</p><hr><p>b</p>"),
    "table": (
        "| a | b \\| c |\n|:-:|---|\n| `1` | **2** |\n| 3 |",
        "<table><thead><tr><th>a</th><th>b | c</th></tr></thead>"
        "<tbody><tr><td><code>1</code></td><td><strong>2</strong></td></tr><tr><td>3</td><td></td></tr></tbody></table>",
    ),
    "line break in a table": (
        "a | b\n-|-\nc<br>d | e",
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>c<br>d</td><td>e</td></tr></tbody></table>",
    ),
    "no table": ("a | b\nc | d", "<p>a | b c | d</p>"),
}

LINES = [
    "# h", "## x #", "a", "b c", "text *em* and **strong**", "1. one", "2. two", "3) x", "- a", "- b", "* c", "+ d",
    "  - n", "   1. q", "    code", "      deep", "```", "```py", "~~~", "> q", ">", "> - l", "> ```", "---", "***",
    "===", "", "", "", "| a | b |", "|---|--:|", "| 1 | 2 |", "x | y", "--|--", "\tt", "*a _b* c_", "**x*y**",
    "`c`", "``a`b``", "a  ", "a\\", "[l](https://e.org/a)", "<https://e.org/x>", "&amp; &copy;", r"\* \_", "~~s~~",
    "-", "1.", "   b", "     c", "10. ten", "_x_y_", "a*b*c", "***both***", "- [l](https://e.org/q) **b**",
    "  > q2", "- > q", "- ```", "  ```", "-     icode", "[a [b](<https://e.org/c>) d](x)", "*[x*](https://e.org/y)",
    "**a *b **c** d* e**", "[`]`](https://e.org/z)",
]  # fmt: skip


def documents(seed: int, count: int) -> list[str]:
    """Texts of the lines above, in any order; the last line is plain."""
    rng = random.Random(seed)
    return ["\n".join([*rng.choices(LINES, k=rng.randint(1, 9)), "end"]) for _ in range(count)]


@pytest.fixture(scope="module")
def markdown(browser: Browser, running_stand_in: StandIn) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(running_stand_in.url)
    page.evaluate(LOAD)
    yield page
    page.close()


def rendered(page: Page, text: str) -> object:
    return tree_of(page.evaluate("(text) => rendered(text)", text))


def test_cases(markdown: Page) -> None:
    found = {name: rendered(markdown, text) for name, (text, _) in CASES.items()}
    assert found == {name: tree_of(html) for name, (_, html) in CASES.items()}


def test_renders_as_markdown_it_does(markdown: Page) -> None:
    reference = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    texts = documents(seed=1, count=800)
    for text, found in zip(texts, markdown.evaluate("(texts) => texts.map(rendered)", texts), strict=True):
        expected = reference.render(text).replace("<s>", "<del>").replace("</s>", "</del>")
        assert tree_of(found) == tree_of(expected), text


def test_it_does_not_matter_how_a_text_comes(markdown: Page) -> None:
    texts = [text for text, _ in CASES.values()] + documents(seed=2, count=250)
    for text in texts:
        whole = markdown.evaluate("(text) => rendered(text)", text)
        letter_by_letter = list(range(len(text)))
        assert markdown.evaluate("([text, cuts]) => grown(text, cuts)", [text, letter_by_letter]) == whole, text


def test_a_list_that_grows_keeps_its_finished_items(markdown: Page) -> None:
    kept = markdown.evaluate("""async () => {
      const { MarkdownView } = await import("/page/markdown.js");
      const view = new MarkdownView(document.createElement("div"));
      const text = Array.from({ length: 40 }, (_, number) => `- item ${number}\n  - *inner*\n`).join("");
      const firstSeen = [];
      for (let end = 1; end <= text.length; end += 5) {
        view.update(text.slice(0, end), false);
        const finished = [...view.element.firstChild.childNodes].slice(0, -2);
        finished.forEach((node, index) => { firstSeen[index] ??= node; });
      }
      return firstSeen.filter((node, index) => view.element.firstChild.childNodes[index] === node).length;
    }""")
    assert kept == 38


def test_only_the_last_block_is_rendered_again(markdown: Page) -> None:
    kept = markdown.evaluate("""async () => {
      const { MarkdownView } = await import("/page/markdown.js");
      const view = new MarkdownView(document.createElement("div"));
      const text = Array.from({ length: 50 }, (_, number) => `Paragraph ${number} of *many*.`).join("\\n\\n");
      const firstSeen = [];
      for (let end = 1; end <= text.length; end += 7) {
        view.update(text.slice(0, end), false);
        const settled = [...view.element.children].slice(0, -2);
        settled.forEach((node, index) => { firstSeen[index] ??= node; });
      }
      return firstSeen.filter((node, index) => view.element.children[index] === node).length;
    }""")
    assert kept == 48


def test_code_that_grows_keeps_its_finished_lines(markdown: Page) -> None:
    code = 'def f(x):\n    """Text\n    over lines."""\n    return x  # done\n' * 40
    kept, same = markdown.evaluate(
        """async (code) => {
      const { CodeText } = await import("/page/highlight.js");
      const grown = new CodeText(document.createElement("code"), "python");
      const nodes = [];
      for (let end = 0; end <= code.length; end += 3) {
        grown.update(code.slice(0, end));
        if (end % 300 === 0) nodes.push(grown.element.firstChild);
      }
      const whole = new CodeText(document.createElement("code"), "python");
      whole.update(code);
      const isKept = new Set(nodes.slice(1)).size === 1;
      grown.update(code);
      return [isKept, grown.element.innerHTML === whole.element.innerHTML];
    }""",
        code,
    )
    assert kept and same


HOSTILE_SIZES = {
    "brackets": "[" * 50_000,
    "images": "![" * 30_000,
    "open links": "[a](" * 20_000,
    "pointed links": "[a](<b" * 16_000,
    "emphasis": "*a **a " * 10_000,
    "underscores": "_" * 50_000 + "a",
    "stars and text": "**x*y_z~~" * 8_000,
    "ticks": "".join("`" * n + "a" for n in range(1, 400)),
    "quotes": ">" * 50_000,
    "lists": "- " * 30_000,
    "numbers": "1. " * 20_000,
    "hashes": "# " * 30_000,
    "bars": "|" * 50_000 + "\n" + "|-" * 25_000,
    "formulas": r"\(" * 30_000,
    "entities": "&#" * 30_000,
    "tags": "<a" * 30_000,
    "urls": "https://" * 10_000,
    "addresses": "<a@" * 20_000,
    "spaces": "a" + " " * 80_000 + "b",
    "lazy lines": "> a\n" + "b\n" * 20_000,
    "deep lists": "\n".join("  " * depth + "- x" for depth in range(300)),
}


@pytest.mark.timeout(60)
def test_no_text_takes_long(markdown: Page) -> None:
    for name, text in HOSTILE_SIZES.items():
        length = markdown.evaluate("(text) => rendered(text).length", text)
        assert length > 0, name


HIGHLIGHTED = {
    "python": (
        "def f():  # c\n  return 'x'",
        {"keyword": ["def", "return"], "function": ["f"], "comment": ["# c"], "string": ["'x'"]},
    ),
    "js": ("const a = `t ${1}`; // c", {"keyword": ["const"], "string": ["`t ${1}`"], "comment": ["// c"]}),
    "ts": ("interface A { b: string }", {"keyword": ["interface", "string"]}),
    "json": ('{"a": [1, true, "b"]}', {"attribute": ['"a"'], "number": ["1"], "constant": ["true"], "string": ['"b"']}),
    "bash": (
        "pip install $X --quiet # c",
        {"constant": ["pip"], "variable": ["$X"], "attribute": ["--quiet"], "comment": ["# c"]},
    ),
    "html": (
        '<a href="x">y</a><!-- c -->',
        {"keyword": ["<a", ">", "</a", ">"], "attribute": ["href"], "string": ['"x"'], "comment": ["<!-- c -->"]},
    ),
    "css": (".a { color: #fff; }", {"type": [".a"], "attribute": ["color"], "number": ["#fff"]}),
    "c": (
        "#include <x>\nint main() { return 0; }",
        {"meta": ["#include"], "keyword": ["int", "return"], "function": ["main"], "number": ["0"]},
    ),
    "c++": ("auto x = nullptr; /* c", {"keyword": ["auto"], "constant": ["nullptr"], "comment": ["/* c"]}),
    "rust": ('let x: &\'a str = "y";', {"keyword": ["let", "str"], "variable": ["'a"], "string": ['"y"']}),
    "go": (
        "func f() error { return nil }",
        {"keyword": ["func", "error", "return"], "function": ["f"], "constant": ["nil"]},
    ),
    "java": (
        "@Override public String f() {}",
        {"meta": ["@Override"], "keyword": ["public"], "type": ["String"], "function": ["f"]},
    ),
    "sql": ("SELECT a FROM b WHERE c = 'd'", {"keyword": ["SELECT", "FROM", "WHERE"], "string": ["'d'"]}),
    "yaml": (
        "a: true # c\nb:\n  - 1",
        {"attribute": ["a", "b"], "constant": ["true"], "comment": ["# c"], "number": ["1"]},
    ),
    "toml": ("[x]\na = 'b' # c", {"keyword": ["[x]"], "attribute": ["a"], "string": ["'b'"], "comment": ["# c"]}),
    "constructor": ("if x", {}),
}


@pytest.mark.parametrize("language", HIGHLIGHTED)
def test_highlighting(markdown: Page, language: str) -> None:
    code, expected = HIGHLIGHTED[language]
    text, found = markdown.evaluate(
        """async ([language, code]) => {
      const { CodeText } = await import("/page/highlight.js");
      const text = new CodeText(document.createElement("code"), language);
      text.update(code);
      const spans = [...text.element.querySelectorAll("span")];
      return [text.element.textContent, spans.map((one) => [one.className.slice(6), one.textContent])];
    }""",
        [language, code],
    )
    assert text == code
    by_class: dict[str, list[str]] = {}
    for name, word in found:
        by_class.setdefault(name, []).append(word)
    assert by_class == expected
