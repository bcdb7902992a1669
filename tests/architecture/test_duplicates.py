"""No two places share more than a few equal lines: a longer piece has one home."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGE, ROOT, name_of

MAX_EQUAL_LINES = 12
FOLDERS = (PACKAGE, ROOT / "training", ROOT / "benchmarks")
SUFFIXES = (".py", ".cpp", ".h", ".js", ".css")
# Written by structs_from_headers.py, which contains the lines that it begins with.
GENERATED = ("structs.py",)


def sources() -> Iterator[Path]:
    """Yield our own files; the libraries of others are as they are."""
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*")):
            if path.suffix in SUFFIXES and path.name not in GENERATED and "vendor" not in path.parts:
                yield path


def code_of(text: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers, without indentation, empty lines, comments and imports."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in lines if line and not line.startswith(("#", "//", "from ", "import "))]


def equal_pieces(files: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the places at which pieces of more than MAX_EQUAL_LINES lines are equal."""
    places: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, text in files.items():
        lines = code_of(text)
        for first in range(len(lines) - MAX_EQUAL_LINES):
            piece = lines[first : first + MAX_EQUAL_LINES + 1]
            places[tuple(line for _, line in piece)].append(f"{name}:{piece[0][0]}")
    return [tuple(found) for found in places.values() if len(found) > 1]


def test_a_piece_that_is_repeated_is_found() -> None:
    piece = "\n".join(f"x{number} = {number}" for number in range(MAX_EQUAL_LINES + 1))
    indented = piece.replace("\n", "\n\n    ")
    assert equal_pieces({"a": f"import y\n{piece}\n", "b": f"z = 1\n    {indented}"}) == [("a:2", "b:2")]
    assert equal_pieces({"a": piece, "b": piece.partition("\n")[2]}) == []


def test_no_two_places_share_more_than_a_few_equal_lines() -> None:
    files = {name_of(path): path.read_text(encoding="utf-8") for path in sources()}
    assert any(name.endswith(".cpp") for name in files) and any(name.endswith(".js") for name in files)
    assert equal_pieces(files) == []
