"""Loosened questions: other small words, other order, other names for the same thing.

People ask in more ways than anyone can write down. What stays is the handful of words that carry the meaning, so a
share of the corpus keeps these and scrambles the rest; the same is done to questions that must be declined.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache

from pagewick.demo.corpus.wording import read_toml, word_list

_MAX_FACTS_OF_A_CONTENT_WORD = 9


def _words(text: str) -> list[str]:
    return re.findall(r"[\w./+'=-]+", text.lower())


@cache
def _common_words() -> frozenset[str]:
    """Words in the questions of so many facts that they tell nothing, and those of the frames."""
    content = read_toml("questions.toml")
    counts: Counter[str] = Counter()
    for block in content["questions"].values():
        counts.update(set(_words(re.sub(r"^!.*$", "", block, flags=re.MULTILINE))))
    common = {word for word, count in counts.items() if count > _MAX_FACTS_OF_A_CONTENT_WORD}
    frames = [frame for frames in content["frames"].values() for frame in frames]
    return frozenset(common.union(word_list("fillers"), *map(_words, frames)))


@cache
def _swaps() -> dict[str, list[str]]:
    swaps: dict[str, list[str]] = {}
    for group in read_toml("words.toml")["swap"]["groups"]:
        for word in group.split("|"):
            swaps.setdefault(word, [other for other in group.split("|") if other != word])
    return swaps


def swap_words(text: str, rng: random.Random, share: float = 0.2) -> str:
    """Replace some words by others of like meaning."""
    swaps = _swaps()
    return " ".join(
        rng.choice(swaps[word]) if word in swaps and rng.random() < share else word for word in text.split(" ")
    )


def _chunk(rng: random.Random) -> list[str]:
    fillers = word_list("fillers")
    start = rng.randrange(len(fillers))
    return fillers[start : start + rng.choice([1, 1, 2, 3, 4])]


def _carries_meaning(word: str) -> bool:
    return not set(_words(word)) <= _common_words()


def loosen(text: str, rng: random.Random) -> str:
    """Keep most of the words that carry meaning, drop or replace many of the others, perhaps change the order.

    A text with too few such words comes back as it is: without them nobody could tell what was asked.
    """
    original = text.rstrip("?.!").split(" ")
    words = [word for word in original if rng.random() < (0.93 if _carries_meaning(word) else 0.5)]
    if sum(map(_carries_meaning, words)) < 2:
        return text
    if rng.random() < 0.35 and len(words) > 3:
        cut = rng.randrange(1, len(words) - 1)
        words = words[cut:] + words[:cut]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        place = rng.randint(0, len(words))
        words[place:place] = _chunk(rng)
    return " ".join(words) + ("?" if rng.random() < 0.6 else "")
