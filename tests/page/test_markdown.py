"""Markdown on the page, compared with expected HTML, with markdown-it-py, and while the text grows."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import Browser, Page, expect

from tests.page.driver import ask_and_wait
from tests.page.rendered import tree_of
from tests.page.stand_in import Answer, StandIn

# Returns the HTML of a text, without the elements that the page adds around code, tables and formulas.
LOAD = """async () => {
  const { renderMarkdown, MarkdownView } = await import("/page/markdown.js");
  const plain = (node) => {
    const box = document.createElement("div");
    box.append(node.cloneNode(true));
    for (const one of box.querySelectorAll("figure.code")) one.replaceWith(one.querySelector("pre"));
    for (const one of box.querySelectorAll("pre code")) one.textContent = one.textContent;
    for (const one of box.querySelectorAll("div.table, .formula:has(math)")) one.replaceWith(one.firstChild);
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
    "formulas": (
        r"\(a_1\) and $$x$$ cost $5",
        "<p><math><msub><mi>a</mi><mn>1</mn></msub></math> and <math><mi>x</mi></math> cost $5</p>",
    ),
    "formula in bold": (
        r"**a \(x*y\)**",
        "<p><strong>a <math><mrow><mi>x</mi><mo>∗</mo><mi>y</mi></mrow></math></strong></p>",
    ),
    "formulas between lines": (
        "so:\n\\[\na\n- b\n\\]\nand\n\n- c\n  $$d$$",
        "<p>so:</p><math><mrow><mi>a</mi><mo>−</mo><mi>b</mi></mrow></math><p>and</p>"
        "<ul><li>c<math><mi>d</mi></math></li></ul>",
    ),
    "subscripts and superscripts": (
        "H~2~O, CO<sub>2</sub>, m^2^ and 10^-3^, E=mc<sup>*2*</sup>, (a)~i~",
        "<p>H<sub>2</sub>O, CO<sub>2</sub>, m<sup>2</sup> and 10<sup>-3</sup>, "
        "E=mc<sup><em>2</em></sup>, (a)<sub>i</sub></p>",
    ),
    "neither subscripts nor superscripts": (
        "~5 and ~6, 5~10~20, 周一~周五,周六~周日, 2^3^2, a ^b^, x^2 + y^2, <sub>open",
        "<p>~5 and ~6, 5~10~20, 周一~周五,周六~周日, 2^3^2, a ^b^, x^2 + y^2, &lt;sub&gt;open</p>",
    ),
    "footnotes": (
        "One[^b], two[^a] and one[^b].\n\n[^a]: *A*\n[^b]: B\n  goes on\n\n  and on\n\nEnd[^none]. [^1](https://e.org/)",
        "<p>One<span><sup><button>1</button></sup></span>, two<span><sup><button>2</button></sup></span> and "
        "one<span><sup><button>1</button></sup></span>.</p>"
        '<p>End<span>[^none]</span>. <a href="https://e.org/">^1</a></p>'
        "<section><ol><li><p>B goes on</p><p>and on</p><button>↩</button></li>"
        "<li><p><em>A</em></p><button>↩</button></li></ol></section>",
    ),
    "footnotes without references": (
        "- a\n\n[^x]: one\n[^x]: two",
        "<ul><li>a</li></ul><section><ol><li><p>one</p></li><li><p>two</p></li></ol></section>",
    ),
    "no footnotes": (
        "`[^1]` and [^1] or x[^a-z]\n> [^1]: quoted",
        "<p><code>[^1]</code> and <span>[^1]</span> or x<span>[^a-z]</span></p>"
        "<blockquote><p><span>[^1]</span>: quoted</p></blockquote>",
    ),
    "malformed TeX": (
        r"\(\frac{a\) and $$\b_d *x* y$$",
        r"<p><span>\(\frac{a\)</span> and <span>$$\b_d *x* y$$</span></p>",
    ),
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
    "  - n", "   1. q", "    code", "```", "```py", "~~~", "> q", ">", "> ```", "\n---", "***",
    "", "", "", "\n| a | b |\n|---|--:|\n| 1 | 2 |\n", "x | y", "\tt", "*a _b* c_", "**x*y**",
    "`c`", "``a`b``", "a  ", "a\\", "[l](https://e.org/a)", "<https://e.org/x>", "&amp; &copy;", r"\* \_", "~~s~~",
    "1.", "   b", "     c", "10. ten", "_x_y_", "a*b*c", "***both***", "- [l](https://e.org/q) **b**",
    "- > q", "- ```\n  x\n  ```", "-     icode", "[a [b](<https://e.org/c>) d](x)", "*[x*](https://e.org/y)",
    "**a *b **c** d* e**", "[`]`](https://e.org/z)",
]  # fmt: skip


def documents(seed: int, count: int) -> list[str]:
    """Return random texts made of LINES. The last line is plain."""
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


# marked differs from CommonMark (and so from markdown-it-py) in these cases. LINES cannot produce them.
DIFFERENT = {
    "code in an item that is not closed goes on in lines without its indentation": (
        "- a\n  ```\n  b\nc",
        "<ul><li>a<pre><code>b\nc</code></pre></li></ul>",
    ),
    "a line after a deeply indented one leaves the item": ("- a\n      b\nc", "<ul><li>a b</li></ul><p>c</p>"),
    "a numbered line in a heading of several lines begins a list": (
        "a\n3) b\n---",
        '<p>a</p><ol start="3"><li>b</li></ol><hr>',
    ),
    "a tab in indented code is removed as a whole": ("  ```\n\ta\n  ```", "<pre><code>a</code></pre>"),
    "a quoted line after an item of the quote leaves the item": (
        "> - a\nb\n> c",
        "<blockquote><ul><li>a b</li></ul><p>c</p></blockquote>",
    ),
}


def test_where_marked_differs(markdown: Page) -> None:
    reference = MarkdownIt("commonmark", {"html": False})
    for name, (text, html) in DIFFERENT.items():
        assert rendered(markdown, text) == tree_of(html), name
        assert tree_of(reference.render(text)) != tree_of(html), name


FORMULAS = {
    r"$x$, $-y$ and ($z$).": ["x", "−y", "z"],
    "$3x + 2$ or $10$": ["3x+2", "10"],
    r"$2\text{ apples}$": ["2\u00a0apples"],
    r"$a\$b$": ["a$b"],
    r"\(a\) and \[b\] and $$c$$": ["a", "b", "c"],
    "| a |\n|---|\n| $b$ |": ["b"],
    "# $a$\n> $b$": ["a", "b"],
    "$$\na\n$$": ["a"],
    "*a $b*c$ d*": ["b∗c"],
}
NO_FORMULAS = [
    "$5 and $10",
    "$5-$10, $5/$6, ($5) or ($6)",
    "$5 to 10$ a month, 5$ and 6$",
    "US$5 and A$6$",
    "$HOME:$PATH and $a and $b",
    "`$a$` and ``\\(b\\)``",
    r"\$a\$ and a\\(b)",
    "$ a $ and $$ $$",
    "$a\nb$",
    "\\(a\n\nb\\)",
    "```\n$$a$$\n```",
    "[$](https://e.org/$a$)",
]
SHOWN_FORMULAS = "(text) => [...renderMarkdown(text).querySelectorAll('math')].map((math) => math.textContent)"


def test_formulas(markdown: Page) -> None:
    markdown.evaluate(
        "import('/page/markdown.js').then((module) => { window.renderMarkdown = module.renderMarkdown; })"
    )
    assert {text: markdown.evaluate(SHOWN_FORMULAS, text) for text in FORMULAS} == FORMULAS
    assert [text for text in NO_FORMULAS if markdown.evaluate(SHOWN_FORMULAS, text)] == []


def test_formulas_have_no_inline_styles(markdown: Page) -> None:
    """The page replaces Temml's inline styles by classes and attributes."""
    source = (
        r"$\color{red}{x} \boxed{y} \underbrace{z}_2 \begin{cases}1&2\\3&4\end{cases}$ "
        r"$\begin{array}{|c|}\hline 1\end{array}$ $\label{a}\href{https://e.org}{b}$"
    )
    html = markdown.evaluate("(text) => rendered(text)", source)
    assert 'mathcolor="rgb(255, 0, 0)"' in html and "line-top line-right" in html
    assert not {"style=", "href=", "id="} & set(re.findall(r"[a-z]+=", html))


def test_a_growing_text_ends_like_the_complete_one(markdown: Page) -> None:
    texts = [text for text, _ in CASES.values()] + [*FORMULAS, *NO_FORMULAS] + documents(seed=2, count=250)
    for text in texts:
        whole = markdown.evaluate("(text) => rendered(text)", text)
        letter_by_letter = list(range(len(text)))
        assert markdown.evaluate("([text, cuts]) => grown(text, cuts)", [text, letter_by_letter]) == whole, text


def test_footnotes_lead_to_their_texts_and_back(page: Page, stand_in: StandIn) -> None:
    stand_in.answers = [Answer(["Fact[^1].\n\n" + "long\n\n" * 60, "[^1]: Sour", "ce"], pause_s=0.05)]
    ask_and_wait(page, "Cite")
    reference = page.get_by_role("button", name="Footnote 1")
    reference.click()
    note = page.get_by_role("region", name="Footnotes").get_by_role("listitem")
    expect(note).to_be_focused()
    expect(note).to_be_in_viewport()
    expect(note.locator("p")).to_have_text("Source")
    note.get_by_role("button", name="Back to the text").click()
    expect(reference).to_be_focused()
    expect(reference).to_be_in_viewport()


def test_a_list_that_grows_keeps_its_finished_items(markdown: Page) -> None:
    kept = markdown.evaluate("""async () => {
      const { MarkdownView } = await import("/page/markdown.js");
      const view = new MarkdownView(document.createElement("div"));
      const text = Array.from({ length: 40 }, (_, number) => `- item ${number}\n  - *inner*\n`).join("");
      const firstSeen = [];
      for (let end = 1; end <= text.length; end += 5) {
        view.update(text.slice(0, end), false);
        const finished = [...view.element.firstChild.children].slice(0, -2);
        finished.forEach((node, index) => { firstSeen[index] ??= node; });
      }
      return firstSeen.filter((node, index) => view.element.firstChild.children[index] === node).length;
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
      const { CodeBlock } = await import("/page/code.js");
      const grown = new CodeBlock("python");
      const nodes = [];
      for (let end = 0; end <= code.length; end += 3) {
        grown.update(code.slice(0, end), false);
        if (end % 300 === 0) nodes.push(grown.element.querySelector("code").firstChild);
      }
      const whole = new CodeBlock("python");
      whole.update(code, true);
      const isKept = new Set(nodes.slice(1)).size === 1;
      grown.update(code, true);
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
    "dollars": "$a " * 30_000,
    "closed formulas": r"\(" * 20_000 + r"\)",
    "open formulas": "\n$$a" * 10_000,
    "deep formula": "$$" + "{" * 3_000 + "$$",
    "huge formula": r"$$\rule{9999em}{9999em}$$",
    "entities": "&#" * 30_000,
    "tags": "<a" * 30_000,
    "urls": "https://" * 10_000,
    "addresses": "<a@" * 20_000,
    "spaces": "a" + " " * 80_000 + "b",
    "lazy lines": "> a\n" + "b\n" * 20_000,
    "references": "[^a" * 20_000,
    "footnotes": "[^a]" * 5_000 + "\n[^a]: x" * 2_000,
    "open footnotes": "\n[^a" * 20_000,
    "scripts": "a^b~c" * 15_000,
    "script tags": "<sub>a<sup>" * 8_000,
    "deep lists": "\n".join("  " * depth + "- x" for depth in range(300)),
}


@pytest.mark.timeout(60)
def test_no_text_takes_long(markdown: Page) -> None:
    for name, text in HOSTILE_SIZES.items():
        length = markdown.evaluate("(text) => rendered(text).length", text)
        assert length > 0, name


# The classes are those of highlight.js. Its spans nest.
HIGHLIGHTED = {
    "python": (
        "def f():  # c\n  return 'x'",
        {"keyword": ["def", "return"], "title function_": ["f"], "comment": ["# c"], "string": ["'x'"]},
    ),
    "js": (
        "const a = `t ${1}`; // c",
        {"keyword": ["const"], "string": ["`t ${1}`"], "subst": ["${1}"], "number": ["1"], "comment": ["// c"]},
    ),
    "ts": ("interface A { b: string }", {"keyword": ["interface"], "built_in": ["string"]}),
    "json": ('{"a": [1, true, "b"]}', {"attr": ['"a"'], "number": ["1"], "literal": ["true"], "string": ['"b"']}),
    "bash": ("echo $X --quiet # c", {"built_in": ["echo"], "variable": ["$X"], "comment": ["# c"]}),
    "html": (
        '<a href="x">y</a><!-- c -->',
        {"name": ["a", "a"], "attr": ["href"], "string": ['"x"'], "comment": ["<!-- c -->"]},
    ),
    "css": (".a { color: #fff; }", {"selector-class": [".a"], "attribute": ["color"], "number": ["#fff"]}),
    "c": (
        "#include <x>\nint main() { return 0; }",
        {
            "meta": ["#include <x>"],
            "keyword": ["include", "return"],
            "type": ["int"],
            "title function_": ["main"],
            "number": ["0"],
        },
    ),
    "c++": ("auto x = nullptr; /* c", {"keyword": ["auto"], "literal": ["nullptr"], "comment": ["/* c"]}),
    "rust": ('let x: &\'a str = "y";', {"keyword": ["let"], "type": ["str"], "symbol": ["'a"], "string": ['"y"']}),
    "go": (
        "func f() error { return nil }",
        {"keyword": ["func", "return"], "title": ["f"], "type": ["error"], "literal": ["nil"]},
    ),
    "java": (
        "@Override public String f() {}",
        {"meta": ["@Override"], "keyword": ["public"], "type": ["String"], "title function_": ["f"]},
    ),
    "sql": ("SELECT a FROM b WHERE c = 'd'", {"keyword": ["SELECT", "FROM", "WHERE"], "string": ["'d'"]}),
    "yaml": (
        "a: true # c\nb:\n  - 1",
        {"attr": ["a:", "b:"], "literal": ["true"], "comment": ["# c"], "number": ["1"]},
    ),
    "toml": ("[x]\na = 'b' # c", {"section": ["[x]"], "attr": ["a"], "string": ["'b'"], "comment": ["# c"]}),
    "dotenv": ("A=1", {"attr": ["A"], "number": ["1"]}),
    "constructor": ("if x", {}),
}


@pytest.mark.parametrize("language", HIGHLIGHTED)
def test_highlighting(markdown: Page, language: str) -> None:
    code, expected = HIGHLIGHTED[language]
    text, found = markdown.evaluate(
        """async ([language, code]) => {
      const { CodeBlock } = await import("/page/code.js");
      const block = new CodeBlock(language);
      block.update(code, true);
      const shown = block.element.querySelector("code");
      const spans = [...shown.querySelectorAll("span")];
      return [shown.textContent, spans.map((one) => [one.className.replace(/^hljs-/, ""), one.textContent])];
    }""",
        [language, code],
    )
    assert text == code
    by_class: dict[str, list[str]] = {}
    for name, word in found:
        by_class.setdefault(name, []).append(word)
    assert {name: words for name, words in by_class.items() if name in expected} == expected
    assert bool(by_class) == bool(expected)
