"""HTML as nested lists of tags and texts, to compare the output of two Markdown renderers."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

Tree = list[Any]

VOID = frozenset({"br", "hr", "img", "input"})
# White space next to these tags is layout, not text.
BLOCKS = frozenset(
    [
        "blockquote",
        "body",
        "br",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "hr",
        "li",
        "ol",
        "p",
        "pre",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "tr",
        "ul",
    ]
)
KEPT_ATTRIBUTES = frozenset({"checked", "href", "src", "start"})


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root: Tree = ["body"]
        self.open = [self.root]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        kept = [f"{name}={value}" for name, value in sorted(attributes) if name in KEPT_ATTRIBUTES]
        node: Tree = [" ".join([tag, *kept])]
        self.open[-1].append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if len(self.open[-1]) > 1 and isinstance(self.open[-1][-1], str):
            self.open[-1][-1] += data
        else:
            self.open[-1].append(data)


def tree_of(html: str) -> Tree:
    builder = _Builder()
    builder.feed(html)
    builder.close()
    return _normal(builder.root, is_code=False)


def _normal(node: Tree, *, is_code: bool) -> Tree:
    tag = node[0]
    is_code = is_code or tag == "pre"
    children = [_normal(one, is_code=is_code) if isinstance(one, list) else one for one in node[1:]]
    if is_code:
        # A line break at the end of code is invisible.
        texts = [one.rstrip("\n") if isinstance(one, str) else one for one in children]
        return [tag, *(one for one in texts if one != "")]
    out: Tree = [tag]
    for index, child in enumerate(children):
        if isinstance(child, str):
            text = " ".join(child.split(None)) if child.strip() else ""
            leads = child[:1].isspace() and index > 0 and not _is_block(children[index - 1])
            trails = child[-1:].isspace() and index + 1 < len(children) and not _is_block(children[index + 1])
            if text:
                text = " " * leads + text + " " * trails
            elif leads and trails:
                text = " "
            if text:
                out.append(text)
        else:
            out.append(child)
    return out


def _is_block(node: Any) -> bool:
    return isinstance(node, list) and node[0].split(" ")[0] in BLOCKS
