"""StopStrings: finds the stop string that ends a text, and holds back text that may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Reads a text piece by piece.

    is_kept: the stop string stays in the text. found: the string that ended the text; nothing may be fed after it.
    num_surplus: characters of the last piece that come after it.
    """

    def __init__(self, stops: Sequence[str], *, is_kept: bool) -> None:
        self.found: str | None = None
        self.num_surplus = 0
        self._stops = stops
        self._is_kept = is_kept
        self._held = ""

    def feed(self, text: str) -> str:
        """Read more text; returns the text that cannot belong to a stop string."""
        if not self._stops or not text:
            return text
        self._held += text
        places = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if not places:
            return self._take(len(self._held) - partial_match_len(self._held, self._stops))
        end, start, self.found = min(places)
        self.num_surplus = len(self._held) - end
        return self._take(end if self._is_kept else start)

    def flush(self) -> str:
        """End the text; returns what was held back."""
        return self._take(len(self._held))

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken


def partial_match_len(text: str, strings: Sequence[str]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of one of the strings."""
    longest = min(max(map(len, strings)) - 1, len(text))
    for num_chars in range(longest, 0, -1):
        end = text[-num_chars:]
        if any(len(string) > num_chars and string.startswith(end) for string in strings):
            return num_chars
    return 0
