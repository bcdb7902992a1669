"""docs/conformance.md describes the suite as it is."""

from __future__ import annotations

from tests.conformance.points import NOT_YET, POINTS
from tests.conformance.report import DOCUMENT, FAILED, PASSED, render, suite


def test_the_page_is_current() -> None:
    """After a change of a test, `python -m tests.conformance.report` writes the page; a failure makes it outdated."""
    assert DOCUMENT.read_text(encoding="utf-8") == render(dict.fromkeys(suite(), PASSED))


def test_every_point_has_a_test_or_is_named_as_missing() -> None:
    claimed = {int(name.split("_")[2]) for _, name in suite() if name.startswith("test_point_")}
    numbers = [number for points in POINTS.values() for number in points]
    assert numbers == list(range(1, 85))
    assert claimed == set(numbers) - NOT_YET


def test_every_test_says_what_it_checks() -> None:
    for (_, name), doc in suite().items():
        assert doc and "\n" not in doc, name


def test_a_failure_is_shown() -> None:
    results = dict.fromkeys(suite(), PASSED)
    results["test_chat.py", "test_point_39_characters_across_tokens"] = FAILED
    changed = [line for line in render(results).splitlines() if line.endswith(f"| {FAILED} |")]
    assert len(changed) == 1 and changed[0].startswith("| 39 |")
    assert render({}).count(f"| {FAILED} |") == render(dict.fromkeys(suite(), PASSED)).count(f"| {PASSED} |")
