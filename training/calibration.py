"""The end of a training teaches the network to decline where it would err.

A network that knows every wording of its corpus is as sure of a wrong answer as of a right one. So wordings by other
hands (corpus/reserved.toml) are kept from it until the last steps. There it answers them once; where it is wrong, it
learns to say that it does not know, and where it is right, it learns the answer. Half of the documents of these steps
are such questions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from training.batches import UNLEARNT, Example, to_micro_batch
from training.corpus import Document
from training.corpus.questions import UNKNOWN_ABOUT_PAGEWICK, fact_chat, unknown_chat
from training.encoding import encode_documents
from training.network import Network

SHARE_OF_FACTS = 0.75
_ROWS = 64


class Calibration(NamedTuple):
    """Questions in reserved wordings: with their answers, and with the refusal instead."""

    answered: list[Example]
    declined: list[Example]

    def labelled(self, is_right: Sequence[bool]) -> list[Example]:
        """Each question with its answer if the network gave that, and with the refusal otherwise."""
        return [
            answered if right else declined
            for answered, declined, right in zip(self.answered, self.declined, is_right, strict=True)
        ]


def _declined(document: Document) -> Document:
    question, answer = document.messages
    if document.kind == "fact":
        answer = {**answer, "content": UNKNOWN_ABOUT_PAGEWICK}
    return replace(document, messages=[question, answer])


def build_calibration(tokenizer: Tokenizer, count: int, seed: int, max_length: int) -> Calibration:
    """`count` questions, three of four about facts; the others have the refusal as their answer anyway."""
    rng = random.Random(f"calibration {seed}")
    documents = [
        (fact_chat if rng.random() < SHARE_OF_FACTS else unknown_chat)(rng, reserved=True) for _ in range(count)
    ]
    both = (documents, [_declined(document) for document in documents])
    answered, declined = (encode_documents(tokenizer, each, max_length, random.Random(seed)) for each in both)
    return Calibration(answered, declined)


@torch.no_grad()
def answers_right(network: Network, examples: Sequence[Example], device: str) -> list[bool]:
    """Tell of each example whether greedy decoding would write its whole answer."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].token_ids))
    is_right = [False] * len(examples)
    for first in range(0, len(order), _ROWS):
        rows = order[first : first + _ROWS]
        batch = to_micro_batch([examples[index] for index in rows]).to(device)
        with torch.autocast(device, torch.bfloat16):
            choices = network.logits(network(batch)).argmax(dim=-1)
        agrees = ((choices == batch.targets) | (batch.targets == UNLEARNT)).cpu()
        for index, start in zip(rows, batch.starts, strict=True):
            is_right[index] = bool(agrees[start : start + len(examples[index].token_ids)].all())
    return is_right
