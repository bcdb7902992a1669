"""Many wordings from few lines: alternation patterns, and small disturbances of finished questions."""

from __future__ import annotations

import random
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_INNERMOST = re.compile(r"\{([^{}]*)\}")
_SYNONYM = re.compile(r"<(\w+)>")
_PLACEHOLDER = re.compile(r"(<\w+>)")
_WORD = re.compile(r"[a-z][a-z0-9_.+/-]*[a-z0-9+]|[a-z]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SINGLE_ONSETS = "bcdfghjklmnprstvwz"
_ONSETS = (*_SINGLE_ONSETS, "br", "cl", "dr", "fl", "gr", "pl", "st", "tr", "sh", "ch", "th")


@cache
def read_toml(name: str) -> dict[str, Any]:
    """A data file of this package."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


def word_list(name: str) -> list[str]:
    """A list of words.toml."""
    words: list[str] = read_toml("words.toml")[name]
    return words


def words_of(text: str) -> set[str]:
    """The words of a text in lower case, without marks."""
    return set(_WORD.findall(text.lower()))


def expand(pattern: str, synonyms: dict[str, str], rng: random.Random) -> str:
    """One random wording of a pattern such as `how do i <start> {the|my} server?`."""
    while True:
        text = _SYNONYM.sub(lambda match: _look_up(match, synonyms, rng), pattern)
        text = _INNERMOST.sub(lambda match: rng.choice(match.group(1).split("|")), text)
        if text == pattern:
            return re.sub(r" {2,}", " ", text).replace(" ?", "?").strip()
        pattern = text


def _look_up(match: re.Match[str], synonyms: dict[str, str], rng: random.Random) -> str:
    words = synonyms.get(match.group(1))
    return match.group(0) if words is None else rng.choice(words.split("|"))


def proper_case(text: str) -> str:
    """Capital first letter, and names spelt as their owners do."""
    cased: dict[str, str] = read_toml("words.toml")["cased"]
    joined = "".join(cased.get(word, word) for word in re.split(r"([\s?,.!:]+)", text))
    return joined if joined.startswith(("vLLM", "--")) else joined[:1].upper() + joined[1:]


def with_typo(text: str, rng: random.Random) -> str:
    """Swap, drop, double or replace one letter inside a word."""
    places = [i for i in range(1, len(text) - 1) if text[i - 1 : i + 2].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    here, after = text[i], text[i + 1]
    replacement = rng.choice([after + here, after, here * 2 + after, rng.choice(_LETTERS) + after])
    return text[:i] + replacement + text[i + 2 :]


def _without_words(text: str, rng: random.Random, keep: float = 0.4) -> str:
    """Leave words out that carry no meaning; `keep` is the share of them that stays."""
    words = text.split(" ")
    dropped = _function_words()
    kept = [word for word in words if word.lower().strip("?,.!") not in dropped or rng.random() < keep]
    return " ".join(kept) if kept else text


@cache
def _function_words() -> frozenset[str]:
    return frozenset(word_list("function_words"))


def _with_other_words(text: str, rng: random.Random) -> str:
    """Replace some common verbs and adjectives by words of the same meaning, which the patterns need not list."""
    synonyms: dict[str, list[str]] = read_toml("words.toml")["synonyms"]
    words = [
        rng.choice(synonyms[word]) if word in synonyms and rng.random() < 0.5 else word for word in text.split(" ")
    ]
    return " ".join(words)


def _with_words_swapped(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    if len(words) < 4:
        return text
    i = rng.randrange(len(words) - 2)
    words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def _with_noise(text: str, rng: random.Random) -> str:
    """Lose some words, or put words in that belong to no question: no single word may decide."""
    words: list[str] = []
    for word in text.split(" "):
        draw = rng.random()
        if draw < 0.1:
            continue
        words.append(rng.choice(word_list("words")) if draw < 0.15 else word)
    return " ".join(words) if words else text


def _rephrased(text: str, rng: random.Random) -> str:
    """Change the words of a question but not its subject."""
    if rng.random() < 0.22:
        text = _with_other_words(text, rng)
    draw = rng.random()
    if draw < 0.10:
        # As people type into a search box.
        return _without_words(text, rng, keep=0).rstrip("?")
    if draw < 0.22:
        return _without_words(text, rng)
    if draw < 0.32:
        return _with_noise(text, rng)
    return _with_words_swapped(text, rng) if draw < 0.35 else text


def _framed(text: str, rng: random.Random) -> str:
    """Put a greeting, a polite word or a sentence about the situation around a question."""
    if rng.random() < 0.14:
        text = rng.choice(word_list("leads")) + text
    elif rng.random() < 0.09:
        text = rng.choice(word_list("situations")) + " " + text
    if rng.random() < 0.06:
        mark = "?" if text.endswith("?") else ""
        text = text.removesuffix("?") + rng.choice(word_list("tails")) + mark
    elif rng.random() < 0.05:
        text += (" " if text.endswith("?") else ". ") + rng.choice(word_list("afterthoughts"))
    return text


def disturb(text: str, rng: random.Random) -> str:
    """Rewrite a question as another person would type it: other words, greeting, case, punctuation, slips."""
    text = _framed(_rephrased(text, rng), rng)
    for share in (0.12, 0.03):
        if rng.random() < share:
            text = with_typo(text, rng)
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    elif rng.random() < 0.05 and text[-1].isalnum():
        text += rng.choice(["?", ".", "!", "??", "...", " ?"])
    draw = rng.random()
    if draw < 0.62:
        return proper_case(text)
    if draw < 0.67:
        return text.title() if rng.random() < 0.5 else text.upper()
    return text


def disturb_lightly(pattern: str, rng: random.Random, *, has_tail: bool) -> str:
    """Rewrite a request as another person would type it, but keep its words and its placeholders such as <city>."""
    if rng.random() < 0.12:
        pattern = rng.choice(word_list("leads")) + pattern
    if has_tail and rng.random() < 0.08:
        mark = "?" if pattern.endswith("?") else ""
        pattern = pattern.removesuffix("?") + rng.choice(word_list("courtesies")) + mark
    if rng.random() < 0.3:
        pattern = pattern.rstrip("?.!")
    elif has_tail and rng.random() < 0.04 and not pattern.endswith("?"):
        pattern += rng.choice(["?", ".", "!", "??", "..."])
    pieces = _PLACEHOLDER.split(pattern)
    if rng.random() < 0.06:
        index = 2 * rng.randrange((len(pieces) + 1) // 2)
        pieces[index] = with_typo(pieces[index], rng)
    draw = rng.random()
    if draw < 0.5:
        return proper_case("".join(pieces))
    if draw < 0.53:
        pieces[::2] = [piece.upper() for piece in pieces[::2]]
    return "".join(pieces)


def invented_word(rng: random.Random) -> str:
    """A pronounceable word without a meaning, of two to four syllables."""
    syllables = [rng.choice(_ONSETS) + rng.choice("aeiou") for _ in range(rng.randint(1, 3))]
    coda: str = rng.choice([*"nrxlksmt", ""])
    return "".join(syllables) + coda + rng.choice(["", "o", "er", "us", "in"])
