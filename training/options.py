"""The options of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewick.demo import MODEL_DIR
from training.known import ROOT

STATE = ROOT / "build" / "training-state.safetensors"


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    out: Path
    steps: int
    device: str
    seed: int
    threads: int
    minutes: float
    calibration: float
    learning_rate: float
    save_every: float
    state: Path
    restart: bool
    start_from: Path | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(description="Train the built-in demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=2100)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=55, help="stop after this time; the decay follows it")
    parser.add_argument("--calibration", type=float, default=0.08, help="share of the run that teaches it to decline")
    parser.add_argument("--learning-rate", type=float, default=1.0, help="factor of the usual learning rates")
    parser.add_argument("--save-every", type=float, default=4, help="minutes between two saved states")
    parser.add_argument("--state", type=Path, default=STATE, help="file from which an interrupted run continues")
    parser.add_argument("--start-from", type=Path, help="checkpoint of an earlier run whose weights to train further")
    parser.add_argument("--restart", action="store_true", help="do not continue an interrupted run")
    return Options(**vars(parser.parse_args(arguments)))
