"""Measure what importance matrices gain: python -m tests.weights.gguf.importance_quality [MIX ...]

Prints the table of docs/quantization.md for the built-in model. The matrix comes from chats that are not held out.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from click.testing import CliRunner
from tokenizers import Tokenizer

from pagewick.cli import cli
from pagewick.demo import MODEL_DIR
from pagewick.weights.gguf.importance import read_importance
from tests.weights.gguf.quality import MAX_LENGTH, SEED, held_out_chats, predictions, quality, row
from tests.weights.gguf.written import write
from training.corpus import build_documents
from training.encoding import encode_documents

MIXES: Final = ("q4_k_m", "q4_0", "q3_k_m", "q2_k")
NUM_DOCUMENTS: Final = 300


def write_text(path: Path) -> Path:
    """Write chats of the kind that the model was trained on."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    examples = encode_documents(tokenizer, build_documents(NUM_DOCUMENTS, SEED + 1), MAX_LENGTH)
    path.write_text("".join(tokenizer.decode(one.token_ids, skip_special_tokens=False) for one in examples))
    return path


def main(mixes: Sequence[str], num_tokens: int = 1500) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text, matrix = write_text(directory / "text.txt"), directory / "imatrix.gguf"
        result = CliRunner().invoke(cli, ["imatrix", "pagewick-demo", "--text", str(text), "-o", str(matrix)])
        print(result.output, flush=True)
        examples = held_out_chats(num_tokens)
        expected = list(predictions(MODEL_DIR, examples, "float32"))
        print(row("mix", "divergence", "with importance", "same token", "with importance"))
        for mix in mixes:
            found = []
            for importance in (None, read_importance(matrix)):
                path = write(MODEL_DIR, directory / "m.gguf", mix, importance)
                found.append(quality(expected, predictions(path, examples, "float32"), examples))
            divergences, agreements = (
                [f"{one.divergence:.2e}" for one in found],
                [f"{one.agreement:.2%}" for one in found],
            )
            print(row(mix, *divergences, *agreements), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or MIXES)
