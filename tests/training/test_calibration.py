"""The end of a training asks in wordings that were kept from it, and turns wrong answers into refusals."""

from __future__ import annotations

import random

import pytest
import torch

from training import train
from training.batches import UNLEARNT, Example, to_micro_batch
from training.calibration import Calibration, answers_right, build_calibration
from training.corpus import render
from training.corpus.questions import UNKNOWN_ABOUT_PAGEWICK, fact_chat, facts, wordings
from training.network import Network, NetworkConfig
from training.options import parse_options
from training.train import Corpus, Trainer
from training.vocabulary import token_id, train_tokenizer

CONFIG = NetworkConfig(vocab_size=600, hidden_size=32, intermediate_size=32, num_hidden_layers=1)


def test_every_fact_has_reserved_wordings_which_the_training_does_not_use() -> None:
    for fact in facts():
        lines = wordings(fact["id"])
        assert 1 <= len(lines.reserved) < len(lines.trained) / 4
        assert not set(lines.reserved) & set(lines.trained)


def test_wrong_answers_become_refusals_and_right_ones_stay() -> None:
    texts = ["".join(s.text for s in render(fact_chat(random.Random(seed)))) for seed in range(50)]
    tokenizer = train_tokenizer([*texts, UNKNOWN_ABOUT_PAGEWICK], CONFIG.vocab_size)
    questions = build_calibration(tokenizer, 12, seed=0, max_length=200)
    assert questions == build_calibration(tokenizer, 12, seed=0, max_length=200)
    labelled = questions.labelled([True] * 6 + [False] * 6)
    assert labelled[:6] == questions.answered[:6]
    for known, unknown in zip(questions.answered[6:], labelled[6:], strict=True):
        learnt = tokenizer.decode([x for x in unknown.targets if x != UNLEARNT])
        assert learnt == UNKNOWN_ABOUT_PAGEWICK or known == unknown
        prompt = unknown.targets.index(next(x for x in unknown.targets if x != UNLEARNT))
        assert unknown.token_ids[:prompt] == known.token_ids[:prompt]
    assert sum(known != unknown for known, unknown in zip(questions.answered, labelled, strict=True)) >= 2


def test_right_answers_are_told_in_the_order_of_the_questions() -> None:
    torch.manual_seed(0)
    network = Network(NetworkConfig(vocab_size=50, hidden_size=256, intermediate_size=256, num_hidden_layers=1))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 8], [2, 7, 1, 8]]
    with torch.autocast("cpu", torch.bfloat16):
        alone = [to_micro_batch([Example(prompt, prompt)]) for prompt in prompts]
        best = [
            int(network.logits(network(batch))[len(prompt) - 1].argmax())
            for prompt, batch in zip(prompts, alone, strict=True)
        ]
    answers = [best[0], (best[1] + 1) % 50, best[2]]
    examples = [
        Example(prompt, [UNLEARNT] * (len(prompt) - 1) + [answer])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert answers_right(network, examples, device="cpu") == [True, False, True]


def test_only_the_last_steps_have_such_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "DOCUMENTS_PER_STEP", 4)
    monkeypatch.setattr(train, "answers_right", lambda _, examples, *__: [False] * len(examples))
    usual = [Example([index], [1]) for index in range(40)]
    asked, declined = ([Example([index], [target]) for index in range(100, 104)] for target in (2, 3))
    tokenizer = train_tokenizer(["a text"], CONFIG.vocab_size)
    corpus = Corpus(tokenizer, usual, [], [], Calibration(asked, declined), "")
    trainer = Trainer(parse_options(["--steps", "10", "--calibration", "0.2"]), corpus, CONFIG)
    assert trainer.examples_of(7, 0.7) == usual[28:32]
    assert trainer.examples_of(8, 0.8) == [*usual[34:36], declined[0], declined[1]]
    assert trainer.examples_of(9, 0.9) == [*usual[38:40], declined[2], declined[3]]
    assert token_id(tokenizer, "<|endoftext|>") == trainer.pad_id
