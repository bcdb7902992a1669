"""Values of tool parameters: real and invented, and how people write them in a request."""

from __future__ import annotations

import random

from training.corpus.tasks import random_word
from training.corpus.wording import invented_word, read_toml, word_list

NUMBERS = ("amount", "number", "small")
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
_INVENTED = 0.4
_PLACES = (
    "San {}", "New {}", "Port {}", "El {}", "Saint {}", "St. {}", "Santa {}", "Los {}", "La {}", "Fort {}", "Mount {}",
    "North {}", "South {}", "East {}", "West {}", "Bad {}", "Lake {}", "Puerto {}", "Le {}", "Al {}", "Old {}",
    "{} City", "{} Beach", "{} Falls", "{} Bay", "{} Springs", "{} Hills", "{} Town", "{} {}", "{} {}", "{} {}",
    "{}-{}", "{}-{}", "{} de {}", "{} del {}", "{}-sur-{}", "{} am {}", "{}-on-{}", "{} upon {}", "Saint-{}",
    "{} {} City", "San {} de {}",
)  # fmt: skip
_ACCENTS = {"a": "áàãäå", "e": "éèêë", "i": "íï", "o": "óôöø", "u": "úü", "n": "ñ", "c": "ç", "s": "š"}


def _with_accent(word: str, rng: random.Random) -> str:
    places = [index for index, letter in enumerate(word) if letter in _ACCENTS]
    if not places:
        return word
    index = rng.choice(places)
    return word[:index] + rng.choice(_ACCENTS[word[index]]) + word[index + 1 :]


def _invented_name(kind: str, rng: random.Random) -> str:
    """A name that no list has teaches copying from the request instead of recalling the list."""
    words = [invented_word(rng).capitalize() for _ in range(2)]
    if rng.random() < 0.15:
        words[0] = _with_accent(words[0], rng)
    if rng.random() < 0.6:
        return words[0]
    return rng.choice(_PLACES if kind == "city" else ("{} {}",)).format(*words)


def _amount(rng: random.Random) -> int:
    """A number of one to five digits, so that two of them often differ in length."""
    digits = rng.choice([1, 2, 2, 3, 3, 4, 5])
    number = rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)
    return -number if rng.random() < 0.04 else number


def draw_value(kind: str, rng: random.Random) -> str | int:
    """A random value of a kind named in tools.toml."""
    choices: dict[str, list[str]] = read_toml("words.toml")["choices"]
    if kind in ("city", "person") and rng.random() < _INVENTED:
        return _invented_name(kind, rng)
    if kind == "person" or kind in choices:
        return rng.choice(word_list("names") if kind == "person" else choices[kind])
    if kind == "amount":
        return _amount(rng)
    if kind == "degrees":
        return rng.randint(-20, 42)
    if kind in NUMBERS:
        return rng.randint(1, 60) if kind == "small" else rng.randint(0, rng.choice([20, 100, 1000, 9999]))
    words = [random_word(rng) for _ in range(rng.randint(1, 4))]
    return {
        "clock": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
        "symbol": "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVWXYZ") for _ in range(rng.randint(2, 4))),
        "email": f"{invented_word(rng)}@{rng.choice(['example.com', 'mail.org', 'example.org'])}",
        "path": rng.choice(["", "/tmp/", "docs/", "./"])
        + random_word(rng)
        + rng.choice([".txt", ".py", ".md", ".csv"]),
        "folder": f"{rng.choice(['/', './', '/home/'])}{words[0]}",
        "text": " ".join(words),
    }[kind]


def draw_argument(kind: str, json_type: str, rng: random.Random) -> str | int | float:
    """A value as it stands in a call: exactly as the user writes it, also where a name has no capital letter."""
    value = draw_value(kind, rng)
    if isinstance(value, int):
        is_decimal = json_type == "number" and rng.random() < 0.5
        return round(value + rng.random(), rng.choice([1, 2])) if is_decimal else value
    draw = rng.random()
    if kind in ("city", "person") and draw < 0.24:
        return value.lower() if draw < 0.22 else value.upper()
    return value


def written(value: str | int | float, kind: str, quote: str, rng: random.Random) -> str:
    """A value as a request has it: a text perhaps in quotes, a small number as a word, a large one with a comma."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}" if kind == "text" else value
    if kind == "amount" and isinstance(value, int):
        if 0 <= value < len(NUMBER_WORDS) and rng.random() < 0.15:
            return NUMBER_WORDS[value]
        return f"{value:,}" if rng.random() < 0.06 else str(value)
    return str(value)
