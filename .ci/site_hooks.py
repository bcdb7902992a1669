"""Hooks of MkDocs: pages of the site that lie outside docs/, and links that work in the repository and on the site.

The documents link to each other and to code by paths in the repository. On the site, a link to a document leads to its
page, and a link to code becomes its text, because the site has no code.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Documents outside docs/: path in the repository -> path on the site.
OUTSIDE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "training/README.md": "project/training.md",
}
INSTEAD = {"README.md": "index.md", "docs/decisions": "decisions/index.md"}

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
# A list right after a line of text is a list on a forge, and is no list to Python-Markdown.
BROKEN_LIST = re.compile(r"<p>[^<]*\n[-*] ")

_logger = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    listed = [
        f"- [{path.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}]({path.name})"
        for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))
    ]
    content = (
        "# Decisions\n\nWhy Pagewick is as it is: context, choice and disadvantages.\n\n" + "\n".join(listed) + "\n"
    )
    files.append(File.generated(config, "decisions/index.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    parts = CODE_BLOCK.split(markdown)
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda match: _link(match, page.file, files), part)
        for part in parts
    )


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    if BROKEN_LIST.search(html):
        _logger.warning("%s has a list without an empty line before it", page.file.src_uri)
    return html


def _link(match: re.Match[str], file: File, files: Files) -> str:
    text, target = match.groups()
    path, hash_mark, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return match[0]
    source = next((name for name, place in OUTSIDE.items() if place == file.src_uri), f"docs/{file.src_uri}")
    in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    place = OUTSIDE.get(in_repository) or INSTEAD.get(in_repository) or in_repository.removeprefix("docs/")
    if files.get_file_from_path(place) is not None:
        return f"{text}({posixpath.relpath(place, posixpath.dirname(file.src_uri) or '.')}{hash_mark}{anchor})"
    # MkDocs warns of a link that leads nowhere.
    return text.strip("![]") if (ROOT / in_repository).exists() else match[0]
