"""The mean of two checkpoints, and what does not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.demo import MODEL_DIR
from training.average import average, mean_of
from training.checkpoint import report_of
from training.corpus.questions import facts


def test_the_mean_is_that_of_each_number() -> None:
    first, second = {"a": torch.tensor([1.0, 2.0]).bfloat16()}, {"a": torch.tensor([3.0, 5.0]).bfloat16()}
    assert mean_of([first, second])["a"].tolist() == [2.0, 3.5]
    with pytest.raises(ValueError, match="different tensors"):
        mean_of([first, {"a": torch.zeros(3)}])
    with pytest.raises(ValueError, match="different tensors"):
        mean_of([first, {"b": torch.zeros(2)}])


def copied(directory: Path, factor: float) -> Path:
    """Copy the shipped checkpoint, with its weights times a factor."""
    directory.mkdir()
    for path in MODEL_DIR.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    weights = load_file(directory / "model.safetensors")
    save_file({name: tensor * factor for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def test_a_mean_is_a_checkpoint_that_says_what_it_is_made_of(tmp_path: Path) -> None:
    average([copied(tmp_path / "a", 0.5), copied(tmp_path / "b", 1.5)], tmp_path / "out")
    expected, found = (load_file(directory / "model.safetensors") for directory in (MODEL_DIR, tmp_path / "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    report = json.loads((tmp_path / "out" / "TRAINING.json").read_text())
    shipped = json.loads((MODEL_DIR / "TRAINING.json").read_text())
    today = {fact["id"]: fact["answer"] for fact in facts()}
    assert report["answers"] == today
    right, taught = report["held_out_wordings_right"], shipped["held_out_wordings_right"]
    # The shipped weights cannot give an answer that changed after their training (training/waiting.toml).
    assert right == taught if today == shipped["answers"] else 0.8 * taught < right < taught
    earlier = report["earlier_checkpoints"]
    assert report["average_of"] == [len(earlier) - 1] * 2
    assert len(earlier) == len(shipped["earlier_checkpoints"]) + 1, "each is written once"
    assert report_of(tmp_path / "out")["average_of"] == [report_of(MODEL_DIR)] * 2


def test_checkpoints_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    first, second = copied(tmp_path / "a", 1.0), copied(tmp_path / "b", 1.0)
    (second / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizers"):
        average([first, second], tmp_path / "out")
    assert not (tmp_path / "out").exists()
