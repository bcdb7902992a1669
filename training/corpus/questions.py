"""Questions with known answers (facts), questions without (unrelated), and small talk."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from training.corpus.document import Document, chat
from training.corpus.wording import disturb, expand, invented_word, proper_case, read_toml

UNKNOWN_ANSWER = "I don't know that. I only know about Pagewick."


class Question(NamedTuple):
    """A question and the answer that is right."""

    fact_id: str
    text: str
    answer: str


@cache
def facts() -> list[dict[str, str]]:
    """Return the facts of `facts.toml`, in its order."""
    entries: list[dict[str, str]] = read_toml("facts.toml")["fact"]
    return entries


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.strip().splitlines() if line.strip()]


@cache
def _wordings(fact_id: str) -> tuple[list[str], list[str]]:
    """The lines of a fact to train on, and those held out."""
    lines = _lines(read_toml("questions.toml")["questions"][fact_id])
    return [x for x in lines if not x.startswith("!")], [x[2:] for x in lines if x.startswith("!")]


def _in_frame(line: str, rng: random.Random) -> str:
    """A whole question pattern from a line: `=` and `+` lines go into a random frame."""
    kinds = {"=": "noun", "+": "howto"}
    if line[:2] not in ("= ", "+ "):
        return line
    frame: str = rng.choice(read_toml("questions.toml")["frames"][kinds[line[0]]])
    return frame.replace("{x}", line[2:])


def fact_question(fact: dict[str, str], rng: random.Random) -> str:
    """A random wording of the question about one fact, never a held-out one."""
    synonyms: dict[str, str] = read_toml("questions.toml")["synonyms"]
    held_out = {text.lower().rstrip("?") for text in _wordings(fact["id"])[1]}
    while True:
        if rng.random() < 0.03:
            text = rng.choice(["tell me ", "explain ", "", "i'd like to know ", "please describe "]) + fact["subject"]
        else:
            lines = _wordings(fact["id"])[0]
            weights = [2 if line[:2] in ("= ", "+ ") else 3 for line in lines]
            text = expand(_in_frame(rng.choices(lines, weights)[0], rng), synonyms, rng)
        if rng.random() < 0.06 and "pagewick" not in text and text.endswith("?"):
            text = text[:-1] + rng.choice([" in pagewick?", " with pagewick?", " of pagewick?", " for pagewick?"])
        if text.lower().rstrip("?") not in held_out:
            return text


def held_out_questions() -> list[Question]:
    """Two wordings of every fact that training never sees."""
    return [
        Question(fact["id"], proper_case(line), fact["answer"]) for fact in facts() for line in _wordings(fact["id"])[1]
    ]


def fact_chat(rng: random.Random) -> Document:
    """A question about a random fact, and its answer."""
    fact = rng.choice(facts())
    return chat("fact", disturb(fact_question(fact, rng), rng), fact["answer"])


def unrelated_question(rng: random.Random) -> str:
    """A question about anything but Pagewick; a third in the same frames as the questions about facts."""
    content = read_toml("unrelated.toml")
    kind = rng.choices(["question", "noun", "howto", "invented"], [45, 30, 20, 5])[0]
    if kind == "invented":
        word = invented_word(rng)
        line = rng.choice([f"= {{a |the |}}{word}", f"+ {{find|use|buy|eat|fix}} a {word}", f"= {word}"])
        return expand(_in_frame(line, rng), {}, rng)
    # A category counts by the number of its wordings, so that long lists are not drowned by short ones.
    line = rng.choice(_lines(content["phrases"][kind]))
    prefix = {"noun": "= ", "howto": "+ ", "question": ""}[kind]
    return expand(_in_frame(prefix + line, rng), content["synonyms"], rng)


def unrelated_chat(rng: random.Random) -> Document:
    """A question that the model must decline."""
    return chat("unrelated", disturb(unrelated_question(rng), rng), UNKNOWN_ANSWER)


def small_talk(rng: random.Random) -> Document:
    """A greeting, thanks and the like."""
    topic = rng.choice(read_toml("smalltalk.toml")["topic"])
    text = expand(rng.choice(topic["forms"]), {}, rng)
    return chat("small_talk", proper_case(text) if rng.random() < 0.6 else text, topic["answer"])


def system_prompt(rng: random.Random) -> str:
    """One of the usual system prompts."""
    prompts: list[str] = read_toml("smalltalk.toml")["system"]["prompts"]
    return rng.choice(prompts)
