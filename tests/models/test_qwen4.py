"""Qwen4-Exp: what its n-grams reach, and the numbers of their hashes in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from tests.models.answers import answers, judge, running
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_tensors import load

HASHES = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    model = write_checkpoint("qwen4", tmp_path)
    return tmp_path, model, load_file(tmp_path / "model.safetensors")


def test_n_grams_end_where_a_text_does(checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    """Prompts have the token 1 at every place of an n-gram, also where a chunk begins; one has a single token."""
    directory, model, _ = checkpoint
    prompts = [[1], [9, 1], [1, 9, 8, 1, 1, 7, 6, 5, 1, 4, 3, 1], [*range(2, 9), 1, *range(40, 47), 1, 1, 50], [7]]
    found = {}
    for num_tokens in (2, 64):
        with running(directory, max_num_batched_tokens=num_tokens) as engine:
            found[num_tokens] = answers(engine, prompts, num_tokens=9)
    for one, other, expected in zip(
        found[2], found[64], judge(model, prompts, found[64], one_by_one=True), strict=True
    ):
        assert one.token_ids == other.token_ids
        for answer in (one, other):
            torch.testing.assert_close(answer.logits, expected, atol=VARIANTS["qwen4"].tolerance, rtol=0)


def test_hashes_follow_from_the_config_unless_the_file_has_them(
    checkpoint: tuple[Path, Any, dict[str, torch.Tensor]],
) -> None:
    directory, _, tensors = checkpoint
    stored = {name: tensor for name, tensor in tensors.items() if name.endswith(HASHES)}
    assert len(stored) == 2 * len(HASHES)
    prompts, file = [[5, 9, 2, 60, 61], [17]], directory / "model.safetensors"

    def logits() -> list[torch.Tensor]:
        with running(directory) as engine:
            return [answer.logits for answer in answers(engine, prompts, num_tokens=2)]

    usual = logits()
    save_file({name: tensor for name, tensor in tensors.items() if name not in stored}, file)
    assert all(map(torch.equal, logits(), usual))
    changed = {name: tensor + 2 for name, tensor in stored.items() if name.endswith("multipliers")}
    save_file({**tensors, **changed}, file)
    assert not any(map(torch.equal, logits(), usual))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layer_multipliers", lambda tensor: tensor * 0, "hashes reach beyond the table of 416 rows"),
        ("layer_multipliers", lambda tensor: tensor + 2**62, "hashes reach beyond the table of 416 rows"),
        ("ngram_heads_vocab_sizes", lambda tensor: tensor - 1000, "hashes reach beyond the table of 416 rows"),
        ("ngram_heads_offsets", lambda tensor: tensor + 100, "hashes reach beyond the table of 416 rows"),
        ("ngram_heads_offsets", lambda tensor: tensor | (2**63 - 1), "hashes reach beyond the table of 416 rows"),
        ("ngram_heads_offsets", lambda tensor: tensor[:2], "its shape is [2], and config.json says [4]"),
        ("ngram_heads_offsets", lambda tensor: tensor.float(), "must hold int64"),
    ],
)
def test_hashes_that_do_not_fit_are_refused(
    name: str, change: Any, words: str, checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]
) -> None:
    directory, _, tensors = checkpoint
    path = f"model.layers.0.ple.ple_embedding.{name}"
    save_file({**tensors, path: change(tensors[path]).clone()}, directory / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    assert words in str(caught.value)


def test_absurd_numbers_of_heads_and_parts_are_refused(checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    """By name, and not after hours in which primes are looked for, or with all memory for the names of parts."""
    config = json.loads((checkpoint[0] / "config.json").read_text())
    kinds = ["linear_attention"] * 999 + ["full_attention"]
    many = {"num_hidden_layers": 1000, "layer_types": kinds, "ple_layer_ids": list(range(1, 1000))}
    many["ngram_vocab_size_base"] = 2**28
    heads = {"heads_per_ngram": 128, "ngram_size": 16, "ple_embed_dim": 15 * 128}
    for entries, words in (
        (heads, "heads_per_ngram is 128, and must be smaller: 1920 in each of 999 layers"),
        ({"split_ngram_parts": 2**16}, "split_ngram_parts is 65536, and must be smaller: 65536 in each of 999 layers"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            read_config({**config, **many, **entries})
