"""A linear classifier stands in for the network: `python -m training.stand_in` measures the wordings in minutes.

It learns from questions of the corpus which answer each one gets, from words, pairs of words and parts of words, and is
asked in the wordings that are never trained on. A fact that it confuses needs more wordings, and so does the network.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.corpus import held_out_questions
from training.corpus.questions import fact_chat, facts, unknown_chat, unrelated_chat

NUM_FEATURES = 2**17
DECLINED = "declined"
_BATCH_SIZE = 256
_LEARNING_RATE = 0.3


class Asked(NamedTuple):
    """A question and the id of the fact that it is about, or `DECLINED`."""

    text: str
    label: str


def features(text: str) -> list[int]:
    """Hashed words, neighbouring words, and three to five letters in a row."""
    words = re.findall(r"[\w.+/-]*\w", text.lower())
    found = {*words, *map(" ".join, pairwise(words))}
    for word in words:
        marked = f"<{word}>"
        found |= {f"~{marked[i : i + n]}" for n in (3, 4, 5) for i in range(len(marked) - n + 1)}
    return [zlib.crc32(name.encode()) % NUM_FEATURES for name in sorted(found)] or [0]


def drawn_questions(count: int, seed: int) -> list[Asked]:
    """Questions as the corpus asks them, with their answers."""
    rng = random.Random(seed)
    id_of = {fact["answer"]: fact["id"] for fact in facts()}
    documents = [rng.choices([fact_chat, unknown_chat, unrelated_chat], [60, 22, 18])[0](rng) for _ in range(count)]
    return [Asked(d.messages[0]["content"], id_of.get(d.messages[1]["content"], DECLINED)) for d in documents]


def read_questions(path: Path) -> list[Asked]:
    """Questions of a file with lines such as `license: may i sell it?`."""
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines() if ":" in line)
    return [Asked(text.strip(), label.strip()) for label, _, text in lines]


class Classifier:
    """A matrix of scores: hashed features times answers."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self.scores = nn.EmbeddingBag(NUM_FEATURES, len(self.labels), mode="mean", sparse=True)
        nn.init.zeros_(self.scores.weight)

    def forward(self, bags: Sequence[list[int]]) -> Tensor:
        """Logits `[questions, answers]`."""
        starts = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
        logits: Tensor = self.scores(torch.tensor([index for bag in bags for index in bag]), starts)
        return logits * 8

    def fit(self, asked: Sequence[Asked], passes: int = 4) -> None:
        """Learn from questions in random order."""
        optimizer = torch.optim.Adagrad(self.scores.parameters(), lr=_LEARNING_RATE)
        bags = [features(question.text) for question in asked]
        targets = torch.tensor([self.labels.index(question.label) for question in asked])
        for seed in range(passes):
            order = torch.randperm(len(bags), generator=torch.Generator().manual_seed(seed)).split(_BATCH_SIZE)  # type: ignore[no-untyped-call]
            for chosen in order:
                loss = F.cross_entropy(self.forward([bags[i] for i in chosen]), targets[chosen])
                optimizer.zero_grad()
                # Saying so explicitly keeps PyTorch from warning that it does not check sparse gradients.
                with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()

    @torch.no_grad()
    def answer(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """The most likely label of each question, and its probability."""
        likely, chosen = self.forward([features(text) for text in texts]).softmax(-1).max(-1)
        return [(self.labels[i], p) for i, p in zip(chosen.tolist(), likely.tolist(), strict=True)]


def main() -> None:
    """Report the share of right answers, and each false one."""
    parser = argparse.ArgumentParser(description="Measure the wordings of the corpus with a linear classifier.")
    parser.add_argument("--questions", type=int, default=40000, help="number of questions to learn from")
    parser.add_argument("--asked", type=Path, help="file of questions to ask instead of the held-out wordings")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held_out = [Asked(question.text, question.fact_id) for question in held_out_questions()]
    asked = read_questions(options.asked) if options.asked else held_out
    labels = [*(fact["id"] for fact in facts()), DECLINED]
    if strange := {question.label for question in asked} - set(labels):
        sys.exit(f"no such facts: {', '.join(sorted(strange))}")
    classifier = Classifier(labels)
    classifier.fit(drawn_questions(options.questions, seed=1))
    answers = classifier.answer([question.text for question in asked])
    pairs = list(zip(asked, answers, strict=True))
    for question, (answer, likely) in pairs:
        if answer != question.label:
            print(f"{answer} ({likely:.2f}) instead of {question.label}: {question.text}")
    num_right = sum(answer == question.label for question, (answer, _) in pairs)
    num_unknown = sum(answer == DECLINED != question.label for question, (answer, _) in pairs)
    print(f"{len(asked)} questions: {num_right / len(asked):.1%} right, {num_unknown / len(asked):.1%} declined")


if __name__ == "__main__":
    main()
