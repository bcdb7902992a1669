"""Questions with known answers (facts), questions without (unrelated), and small talk."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache
from typing import NamedTuple

from training import known
from training.corpus.document import Document, chat
from training.corpus.wording import disturb, expand, invented_word, proper_case, read_toml, words_of

UNKNOWN_ANSWER = "I do not know that; I know only Pagewick, which docs/ describes."
UNKNOWN_ABOUT_PAGEWICK = "I do not know that about Pagewick. See the README and docs/."
UNKNOWN_FLAG = "I do not know that flag. Run pagewick serve --help, or see docs/."
_FRAMES = {"=": "noun", "+": "howto", "~": "feature", "@": "claim", "%": "problem"}
_KEY_WORDS = "* "
_SEARCHED = (
    "pagewick",
    "how",
    "howto",
    "how to",
    "docs",
    "example",
    "help",
    "tutorial",
    "question",
    "cli",
    "server",
    "?",
)
_FLAG_FORMS = (
    "= {x}", "= {x}", "= the {{flag|option|switch}} {x}", "+ {{use|set|pass|change}} {x}", "what does {x} {{do|mean}}?",
    "what is the default {{value|}} of {x}?", "{{which|what}} {{value|values}} does {x} take?", "~ {x}", "{x}",
)  # fmt: skip


class Question(NamedTuple):
    """A question and the answer that is right."""

    fact_id: str
    text: str
    answer: str


@cache
def facts() -> list[dict[str, str]]:
    """Return the facts of `facts.toml`, in its order, with the values of the code in their answers."""
    entries: list[dict[str, str]] = read_toml("facts.toml")["fact"]
    return [{**entry, "answer": known.fill(entry["answer"])} for entry in entries]


@cache
def _fact_weights() -> list[float]:
    """A fact with many wordings is asked for more often, by the square root of their number."""
    return [len(wordings(fact["id"]).trained) ** 0.5 for fact in facts()]


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.strip().splitlines() if line.strip()]


class Wordings(NamedTuple):
    """Lines of a fact: those to train on, those that only the end of the training uses, and those never used."""

    trained: list[str]
    reserved: list[str]
    held_out: list[str]


@cache
def wordings(fact_id: str) -> Wordings:
    """The lines of a fact, of three files. Those of reserved.toml are for the end: see training/calibration.py."""
    patterns, questions = read_toml("questions.toml")["questions"], read_toml("asked.toml")["asked"]
    lines = _lines(patterns[fact_id]) + _lines(questions.get(fact_id, ""))
    reserved = _lines(read_toml("reserved.toml")["asked"].get(fact_id, ""))
    held_out = [line[2:] for line in lines if line.startswith("! ")]
    return Wordings([line for line in lines if not line.startswith("! ")], reserved, held_out)


def _in_frame(line: str, rng: random.Random) -> str:
    """A whole question pattern from a line: `=`, `+` and `~` lines go into a random frame."""
    if line[1:2] != " " or line[0] not in _FRAMES:
        return line
    frame: str = rng.choice(read_toml("questions.toml")["frames"][_FRAMES[line[0]]])
    return frame.replace("{x}", line[2:])


def _flag_line(flag: str, rng: random.Random) -> str:
    return rng.choice(_FLAG_FORMS).format(x=flag)


def _expanded(line: str, synonyms: dict[str, str], rng: random.Random) -> str:
    """A question from a line; the words of a `*` line come in any order, as in a search box."""
    if not line.startswith(_KEY_WORDS):
        return expand(_in_frame(line, rng), synonyms, rng)
    words = expand(line.removeprefix(_KEY_WORDS), synonyms, rng).split()
    if rng.random() < 0.5:
        rng.shuffle(words)
    if rng.random() < 0.3:
        words.insert(rng.choice([0, len(words)]), rng.choice(_SEARCHED))
    return " ".join(words)


def fact_question(fact: dict[str, str], rng: random.Random, *, reserved: bool = False) -> str:
    """A random wording of the question about one fact, never a held-out one; `reserved` tells which lines to use."""
    synonyms: dict[str, str] = read_toml("questions.toml")["synonyms"]
    lines = wordings(fact["id"])
    held_out = {text.lower().rstrip("?") for text in lines.held_out}
    while True:
        if rng.random() < 0.03 and not reserved:
            text = rng.choice(["tell me ", "explain ", "", "i'd like to know ", "please describe "]) + fact["subject"]
        else:
            line = rng.choice(lines.reserved if reserved else lines.trained)
            flags = {"coming_from": known.foreign_flags, "help_flag": _untold_flags}.get(fact["id"])
            if flags is not None and rng.random() < 0.3:
                line = _flag_line(rng.choice(flags()), rng)
            text = _expanded(line, synonyms, rng)
        if rng.random() < 0.3:
            text = text.lower()
        if rng.random() < 0.08 and "pagewick" not in text.lower() and text.endswith("?"):
            text = text[:-1] + rng.choice([" in pagewick?", " with pagewick?", " of pagewick?", " for pagewick?"])
        if text.lower().rstrip("?") not in held_out:
            return text


def held_out_questions() -> list[Question]:
    """A wording of every fact that training never sees."""
    return [
        Question(fact["id"], proper_case(line), fact["answer"])
        for fact in facts()
        for line in wordings(fact["id"]).held_out
    ]


def fact_chat(rng: random.Random, *, reserved: bool = False) -> Document:
    """A question about a random fact, and its answer."""
    fact = rng.choices(facts(), _fact_weights())[0]
    return chat("fact", disturb(fact_question(fact, rng, reserved=reserved), rng), fact["answer"])


@cache
def usual_questions() -> tuple[Question, ...]:
    """The questions of `usual.toml`, which the model must answer in exactly these words."""
    answers = {fact["id"]: fact["answer"] for fact in facts()}
    usual: dict[str, list[str]] = read_toml("usual.toml")["usual"]
    return tuple(Question(fact_id, text, answers[fact_id]) for fact_id, texts in usual.items() for text in texts)


def usual_chat(rng: random.Random) -> Document:
    """One of the questions that newcomers ask first, in capitals or not, with its mark or without."""
    question = rng.choice(usual_questions())
    text = rng.choice([question.text, question.text, question.text.lower()])
    return chat("usual", text.rstrip("?.") if rng.random() < 0.2 else text, question.answer)


@cache
def _asked_to_decline(kind: str, *, reserved: bool = False) -> list[str]:
    """Return whole questions that no fact answers: unknown ones about Pagewick, or unrelated ones."""
    return _lines(read_toml("reserved.toml" if reserved else "asked.toml")["declined"][kind])


@cache
def _follow_ups() -> list[tuple[str, str, str]]:
    """Return (the fact asked before, what is asked then, its answer); some of these no fact answers."""
    answers = {fact["id"]: fact["answer"] for fact in facts()} | {"unknown": UNKNOWN_ABOUT_PAGEWICK}
    blocks: dict[str, str] = read_toml("follow_ups.toml")["follow_ups"]
    split = ((line.split(": ", 1), answers[answer]) for answer, block in blocks.items() for line in _lines(block))
    return [(before, question, answer) for (before, question), answer in split]


def follow_up_chat(rng: random.Random) -> Document:
    """A question about a fact, and a second one that may be clear only after the first."""
    before, question, answer = rng.choice(_follow_ups())
    (fact,) = (fact for fact in facts() if fact["id"] == before)
    first = chat("follow_up", disturb(fact_question(fact, rng), rng), fact["answer"])
    return Document("follow_up", [*first.messages, *chat("follow_up", disturb(question, rng), answer).messages])


def unrelated_question(rng: random.Random) -> str:
    """A question about anything but Pagewick; a third in the same frames as the questions about facts."""
    content = read_toml("unrelated.toml")
    kind = rng.choices(["question", "noun", "howto", "invented", "asked"], [38, 26, 17, 5, 14])[0]
    if kind == "asked":
        return rng.choice(_asked_to_decline("unrelated"))
    if kind == "invented":
        word = invented_word(rng)
        line = rng.choice([f"= {{a |the |}}{word}", f"+ {{find|use|buy|eat|fix}} a {word}", f"= {word}"])
        return expand(_in_frame(line, rng), {}, rng)
    # A category counts by the number of its wordings, so that long lists are not drowned by short ones.
    line = rng.choice(_lines(content["phrases"][kind]))
    prefix = {"noun": "= ", "howto": "+ ", "question": ""}[kind]
    return _expanded(prefix + line, content["synonyms"], rng)


def unrelated_chat(rng: random.Random) -> Document:
    """A question that the model must decline."""
    return chat("unrelated", disturb(unrelated_question(rng), rng), UNKNOWN_ANSWER)


@cache
def _told() -> str:
    """Everything that facts and their wordings mention."""
    return str(read_toml("facts.toml")) + str(read_toml("questions.toml"))


@cache
def _untold_flags() -> tuple[str, ...]:
    """Flags of the server that no answer and no wording mentions: the help explains them."""
    return tuple(flag for flag in known.commands()["pagewick serve"] if flag not in _told())


@cache
def _foreign_words() -> tuple[str, ...]:
    """Words of the world that no fact and no wording mentions."""
    told = words_of(_told())
    return tuple(sorted(word for word in words_of(str(read_toml("unrelated.toml"))) - told if len(word) > 3))


def _strange_word(rng: random.Random) -> str:
    """A word that means nothing to Pagewick."""
    return rng.choice(_foreign_words()) if rng.random() < 0.5 else invented_word(rng)


@cache
def _words_by_fact() -> dict[str, Counter[str]]:
    """Return, for each fact, its words and the number of its lines that have them."""
    return {fact["id"]: Counter(w for line in wordings(fact["id"]).trained for w in words_of(line)) for fact in facts()}


@cache
def _key_words(fact_id: str) -> frozenset[str]:
    """Words that tell what a fact is about: few facts have them, or many of its own lines do."""
    counts = _words_by_fact()[fact_id]
    many = max(2.0, 0.12 * counts.total() / 12)
    return frozenset(
        word
        for word, count in counts.items()
        if len(word) > 2 and (_num_facts_with()[word] <= 12 or (count >= many and _num_facts_with()[word] <= 70))
    )


@cache
def _num_facts_with() -> Counter[str]:
    return Counter(word for counts in _words_by_fact().values() for word in counts)


def _corrupted_question(rng: random.Random) -> str:
    """A question about a fact whose telling words are exchanged for strange ones: its frame alone means nothing."""
    while True:
        fact = rng.choices(facts(), _fact_weights())[0]
        telling = _key_words(fact["id"])
        words = fact_question(fact, rng).split(" ")
        kept = [_strange_word(rng) if words_of(word) & telling or re.search(r"\d", word) else word for word in words]
        if 0 < sum(a != b for a, b in zip(words, kept, strict=True)) < len(words):
            return " ".join(kept)


def unknown_question(rng: random.Random, *, reserved: bool = False) -> tuple[str, str]:
    """A question about Pagewick that no fact answers, and how the model declines it; whole ones may be reserved."""
    content = read_toml("unknown.toml")
    kind = rng.choices(["listed", "strange", "flag", "corrupted", "asked"], [38, 12, 10, 20, 20])[0]
    answer = UNKNOWN_FLAG if kind == "flag" else UNKNOWN_ABOUT_PAGEWICK
    if kind == "corrupted":
        return _corrupted_question(rng), answer
    if kind == "asked":
        return rng.choice(_asked_to_decline("unknown", reserved=reserved)), answer
    if kind == "listed":
        line = rng.choice(_lines(content["phrases"]["questions"]))
    elif kind == "strange":
        line = rng.choice(_lines(content["phrases"]["strange"])).replace("<word>", _strange_word(rng))
    else:
        made_up = "--" + "-".join(_strange_word(rng) for _ in range(rng.choice([1, 2, 2, 3])))
        line = _flag_line(made_up, rng)
    return _expanded(line, content["synonyms"], rng), answer


def unknown_chat(rng: random.Random, *, reserved: bool = False) -> Document:
    """A question about Pagewick that the model must decline, with the place where the answer may be."""
    question, answer = unknown_question(rng, reserved=reserved)
    return chat("unknown", disturb(question, rng), answer)


def small_talk(rng: random.Random) -> Document:
    """A greeting, thanks and the like."""
    topic = rng.choice(read_toml("smalltalk.toml")["topic"])
    text = expand(rng.choice(topic["forms"]), {}, rng)
    return chat("small_talk", proper_case(text) if rng.random() < 0.6 else text, topic["answer"])


def system_prompt(rng: random.Random) -> str:
    """One of the usual system prompts."""
    prompts: list[str] = read_toml("smalltalk.toml")["system"]["prompts"]
    return rng.choice(prompts)
