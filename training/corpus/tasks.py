"""Small tasks that need no knowledge: counting, copying, JSON objects."""

from __future__ import annotations

import json
import random
from functools import cache

from training.corpus.document import Document, chat
from training.corpus.wording import invented_word, proper_case, read_toml, word_list, words_of


def random_value(rng: random.Random) -> str | int | float | bool:
    """A value as people put it in small JSON objects."""
    draw = rng.random()
    if draw < 0.35:
        return rng.randint(0, rng.choice([9, 99, 999, 2030]))
    if draw < 0.42:
        return rng.random() < 0.5
    if draw < 0.47:
        return round(rng.uniform(0, 100), 1)
    if draw < 0.55:
        return " ".join(random_word(rng) for _ in range(rng.choice([2, 2, 3])))
    return rng.choice([random_word(rng), invented_word(rng), invented_word(rng).capitalize()])


def spoken(value: object) -> str:
    """A JSON value as it stands in a sentence."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def counting(rng: random.Random) -> Document:
    """Count from one number to another, up or down."""
    wordings: dict[str, list[str]] = read_toml("words.toml")["frames"]
    start = rng.choice([0, 1, 1, 2, 3, 5, rng.randint(0, 30), rng.randint(0, 120)])
    end = start + rng.randint(2, 14)
    if rng.random() < 0.25:
        start, end = end, start
        frames = wordings["count_down"]
    else:
        frames = wordings["count_up"]
        if start == 1:
            frames = frames + wordings["count_to"]
    question = rng.choice(frames).format(start, end)
    step = 1 if end > start else -1
    answer = ", ".join(str(number) for number in range(start, end + step, step))
    return chat("counting", proper_case(question) if rng.random() < 0.6 else question, answer)


@cache
def all_words() -> tuple[str, ...]:
    """Every word of the questions, so that every piece of the tokenizer is copied now and then."""
    texts = str(read_toml("questions.toml")) + str(read_toml("unrelated.toml")) + str(read_toml("words.toml"))
    return tuple(sorted(words_of(texts)))


def random_word(rng: random.Random) -> str:
    """A word to be copied: a common one, any word of the corpus, a name, an invented word, or an identifier."""
    draw = rng.random()
    if draw < 0.25:
        return rng.choice(word_list("words"))
    if draw < 0.55:
        word = rng.choice(all_words())
        return word if rng.random() < 0.8 else word.capitalize()
    if draw < 0.62:
        return rng.choice(word_list("names"))
    if draw < 0.94:
        return invented_word(rng)
    return f"{invented_word(rng)}{rng.choice('-_')}{rng.randint(0, 999)}"


def _random_words(rng: random.Random, num_words: int) -> str:
    chosen = [random_word(rng) for _ in range(num_words)]
    if rng.random() < 0.3:
        chosen[rng.randrange(num_words)] = str(rng.randint(0, 9999))
    return " ".join(chosen)


def copying(rng: random.Random) -> Document:
    """Repeat a text word for word; a few are long."""
    num_words = rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 7, 10]) if rng.random() < 0.97 else rng.randint(30, 100)
    text = _random_words(rng, num_words)
    if rng.random() < 0.3:
        text = text.capitalize() + rng.choice([".", "!", "?"])
    frame: str = rng.choice(read_toml("words.toml")["frames"]["copy"])
    if rng.random() < 0.5:
        frame = frame[0].upper() + frame[1:]
    return chat("copying", frame.format(text), text)


def json_object(rng: random.Random) -> Document:
    """A JSON object from keys and values in a sentence."""
    keys = rng.sample(word_list("keys"), rng.choice([1, 2, 2, 2, 3, 3, 4]))
    if rng.random() < 0.25:
        keys[0] = invented_word(rng)
    values = {key: random_value(rng) for key in keys}
    style = rng.choice(["{} {}", "{} {}", "{}={}", "{}: {}", "{} = {}", "{} set to {}"])
    pairs = [style.format(key, spoken(value)) for key, value in values.items()]
    listed = pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + rng.choice([" and ", ", ", ", and "]) + pairs[-1]
    frame: str = rng.choice(read_toml("words.toml")["frames"]["json"])
    if rng.random() < 0.5:
        frame = frame[0].upper() + frame[1:]
    return chat("json", frame.format(listed) + rng.choice(["", "", "."]), json.dumps(values))
