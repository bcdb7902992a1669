"""A training that was interrupted continues with the same bits, and never leaves half a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from training import train
from training.batches import Example
from training.checkpoint import report_of
from training.network import NetworkConfig
from training.options import Options, parse_options
from training.state import read_progress, save_state
from training.train import Corpus, Trainer, prepare_corpus

STEPS = 4
CALIBRATION = ("--calibration", "0.5")
CONFIG = NetworkConfig(
    vocab_size=600,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "VOCAB_SIZE", CONFIG.vocab_size)
        patch.setattr(train, "DOCUMENTS_PER_STEP", 8)
        return prepare_corpus(parse_options(["--steps", str(STEPS), *CALIBRATION]), CONFIG.max_position_embeddings)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "DOCUMENTS_PER_STEP", 8)
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    monkeypatch.setattr(Trainer, "dev_accuracy", lambda _: 0.5)


def options_in(directory: Path, *more: str) -> Options:
    paths = ["--out", str(directory / "model"), "--state", str(directory / "state" / "run.safetensors")]
    return parse_options([*paths, "--steps", str(STEPS), *CALIBRATION, "--save-every", "0", *more])


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.network.state_dict().items()}


class Interrupted(Exception):
    pass


def interrupted_run(options: Options, corpus: Corpus, *, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(options, corpus, CONFIG)
    step = trainer.step

    def step_or_stop(examples: Sequence[Example], number: int, progress: float) -> float:
        if number == after:
            raise Interrupted
        return step(examples, number, progress)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "step", step_or_stop)
        with pytest.raises(Interrupted):
            trainer.run()


def test_a_continued_run_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also within the steps that teach it to decline: what it knew before them is part of the state."""
    answered: list[int] = []

    def first_half_right(_: object, examples: Sequence[Example], *__: object) -> list[bool]:
        answered.append(len(examples))
        return [index < len(examples) / 2 for index in range(len(examples))]

    monkeypatch.setattr(train, "answers_right", first_half_right)
    whole = Trainer(options_in(tmp_path / "whole"), corpus, CONFIG)
    assert whole.run() == STEPS

    options = options_in(tmp_path / "parts")
    interrupted_run(options, corpus, after=3, monkeypatch=monkeypatch)
    assert not options.out.exists(), "an unfinished run must not replace a checkpoint"
    continued = Trainer(options, corpus, CONFIG)
    continued.resume()
    assert "continuing after step 3" in capsys.readouterr().out
    assert continued.run() == STEPS
    assert continued.first_step == 3
    assert answered == [8, 8], "the continued run must not ask again"
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(continued)[name]), name


def test_the_log_has_the_loss_and_the_time_left(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(options_in(tmp_path), corpus, CONFIG).run()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS
    assert all(" loss " in line and " left " in line for line in lines)


@pytest.mark.parametrize("more", [["--restart"], ["--seed", "5"], ["--learning-rate", "0.5"], ["--calibration", "0"]])
def test_another_run_starts_anew(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    interrupted_run(options_in(tmp_path), corpus, after=1, monkeypatch=monkeypatch)
    fresh = Trainer(options_in(tmp_path, *more), corpus, CONFIG)
    fresh.resume()
    assert fresh.first_step == 0


def test_a_state_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    assert read_progress(path) is None
    save_state(path, torch.nn.Linear(2, 2), [], {"step": 1})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("training.state.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_state(path, torch.nn.Linear(2, 2), [], {"step": 2})
    assert read_progress(path) == {"step": 1}


def test_the_report_has_the_answers_that_were_taught(tmp_path: Path, corpus: Corpus) -> None:
    trainer = Trainer(options_in(tmp_path), corpus, CONFIG)
    trainer.save()
    trainer.report(0)
    report = json.loads((trainer.options.out / "TRAINING.json").read_text())
    assert report["answers"]["default_port"] == "The server listens on port 8000 by default. Change it with --port."


def test_a_run_starts_from_an_earlier_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    earlier = Trainer(options_in(tmp_path / "earlier"), corpus, CONFIG)
    earlier.save()
    earlier.report(3)
    options = options_in(tmp_path / "later", "--seed", "1", "--start-from", str(earlier.options.out))
    later_corpus = prepare_corpus(options, CONFIG.max_position_embeddings)
    assert later_corpus.tokenizer.to_str() == corpus.tokenizer.to_str(), "the weights belong to its tokens"
    later = Trainer(options, later_corpus, CONFIG)
    for name, tensor in weights(earlier).items():
        assert torch.equal(tensor.bfloat16(), weights(later)[name].bfloat16()), name
    later.save()
    later.report(0)
    report = json.loads((options.out / "TRAINING.json").read_text())
    (started_from,) = report["earlier_checkpoints"]
    assert (report["started_from"], started_from["steps"], started_from["seed"]) == (0, 3, 0)
    assert report_of(options.out)["started_from"] == started_from
