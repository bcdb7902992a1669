"""Average the weights of checkpoints: `python -m training.average DIR DIR --out DIR`.

The mean of two runs of which the second started from the first knows more than either, as Izmailov et al. 2018
(arXiv:1803.05407) found for points of one run. The tokenizer must be the same.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.calibration import answers_right
from training.checkpoint import report_of, save_weights, write_report
from training.corpus import held_out_questions
from training.corpus.document import chat
from training.encoding import encode_documents
from training.known import VOCAB_SIZE
from training.network import Network, NetworkConfig

_OTHER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def mean_of(weights: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each tensor, computed in float32, in bfloat16. Raises ValueError if names or shapes differ."""
    shapes = [{name: tensor.shape for name, tensor in one.items()} for one in weights]
    if any(one != shapes[0] for one in shapes):
        raise ValueError("the checkpoints have different tensors")
    means = {name: torch.stack([one[name].float() for one in weights]).mean(0) for name in weights[0]}
    return {name: tensor.bfloat16().contiguous() for name, tensor in means.items()}


def average(directories: Sequence[Path], out: Path) -> None:
    """Write the mean of checkpoints with its TRAINING.json. Raises ValueError if they do not fit together."""
    if len({(directory / "tokenizer.json").read_bytes() for directory in directories}) > 1:
        raise ValueError("the checkpoints have different tokenizers")
    weights = mean_of([load_file(directory / "model.safetensors") for directory in directories])
    out.mkdir(parents=True, exist_ok=True)
    save_weights(weights, out)
    for name in _OTHER_FILES:
        shutil.copyfile(directories[-1] / name, out / name)
    report = {
        "average_of": [report_of(directory) for directory in directories],
        "held_out_wordings_right": round(_dev_accuracy(weights, out), 4),
    }
    write_report(report, out)


def _dev_accuracy(weights: dict[str, Tensor], directory: Path) -> float:
    """Return the share of the never trained wordings that are answered exactly."""
    network = Network(NetworkConfig(vocab_size=VOCAB_SIZE))
    network.load_state_dict(weights)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    questions = [chat("fact", question.text, question.answer) for question in held_out_questions()]
    is_right = answers_right(network, encode_documents(tokenizer, questions, 2048), "cpu")
    return sum(is_right) / len(is_right)


def main() -> None:
    """Average and write the checkpoint."""
    parser = argparse.ArgumentParser(description="Average the weights of checkpoints with the same tokenizer.")
    parser.add_argument("directories", type=Path, nargs="+", help="directories of the checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="directory of the mean")
    options = parser.parse_args()
    try:
        average(options.directories, options.out)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
