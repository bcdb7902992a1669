"""Tiny random rerankers with a tokenizer, and their scores by transformers, as Qwen3-Reranker's model card has them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from torch import nn

from tests.models.checkpoints import VARIANTS, make_model, save
from tests.models.labelled import write_labelled

VOCAB_SIZE = 420
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QUERY = "What is the capital of China?"
DOCUMENTS = [
    "The capital of China is Beijing.",
    "Gravity is a force.\n",
    "你好 😀",
    "yes",
    "The capital of China is Beijing.",
]


def backend() -> tokenizers.Tokenizer:
    """Bytes and some merges, among them the words yes and no, and control tokens like Qwen3's."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([*["yes", "no"] * 90, *[PREFIX, QUERY, *DOCUMENTS] * 20], trainer)
    made.add_special_tokens(CONTROL)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    assert all(made.token_to_id(word) is not None for word in ("yes", "no")) and made.get_vocab_size() <= VOCAB_SIZE
    return made


BACKEND = backend()
YES, NO = BACKEND.token_to_id("yes"), BACKEND.token_to_id("no")


def write_reranker(
    directory: Path, *, num_labels: int = 0, chat_template: str | None = None, **entries: Any
) -> nn.Module:
    """Write a model of Qwen3's kind, with a head of labels if it has some, and the tokenizer; return transformers'."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, **entries}
    directory.mkdir(parents=True, exist_ok=True)
    if num_labels:
        model = write_labelled("qwen3-tied-bias", directory, num_labels, **sizes)
    else:
        model = make_model("qwen3-tied-bias", {**VARIANTS["qwen3-tied-bias"].all_entries(), **sizes})
        save(model, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [BACKEND.token_to_id(CONTROL[2])]}))
    BACKEND.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROL[2], "pad_token": CONTROL[0]}
    template = {} if chat_template is None else {"chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | template))
    return model


def encode(text: str) -> list[int]:
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


def card_prompt(query: str, document: str, instruction: str = DEFAULT, *, max_len: int | None = None) -> list[int]:
    """The prompt of the model card: prefix and suffix are encoded by themselves, what lies between is cut."""
    prefix, suffix = encode(PREFIX), encode(SUFFIX)
    between = encode(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    return [*prefix, *between[: None if max_len is None else max_len - len(prefix) - len(suffix)], *suffix]


def card_score(model: nn.Module, prompt: list[int]) -> float:
    """The probability of yes, of the two answers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1, [NO, YES]].double()
    return float(torch.log_softmax(logits, dim=0)[1].exp())


def label_score(model: nn.Module, prompt: list[int]) -> float:
    """The sigmoid of the only label's logit."""
    with torch.no_grad():
        return 1 / (1 + math.exp(-float(model(torch.tensor([prompt])).logits[0, 0])))
