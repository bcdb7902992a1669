"""The built-in model with quantized weights predicts what it predicts without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from torch import Tensor

from pagewick.demo import MODEL_DIR
from tests.deep import IS_DEEP
from tests.weights.gguf.demo import write_demo
from tests.weights.gguf.mixes import MIXES
from tests.weights.gguf.quality import NUM_TOKENS, Example, held_out_chats, predictions, quality


class Bar(NamedTuple):
    """Limits of the mean divergence from the unquantized model, with 8-bit activations and with exact ones."""

    divergence: float
    weights_only: float
    agreement: float


BARS: Final = {
    "Q8_0": Bar(1e-4, 5e-5, 0.999),
    "Q6_K": Bar(3e-4, 3e-4, 0.995),
    "Q5_K_M": Bar(8e-4, 8e-4, 0.99),
    "Q4_K_M": Bar(1.5e-3, 1.5e-3, 0.98),
    "Q4_0": Bar(2e-3, 2e-3, 0.98),
    "Q3_K_M": Bar(1e-2, 1e-2, 0.97),
    "Q2_K": Bar(1e-1, 1e-1, 0.9),
}


@pytest.fixture(scope="module")
def chats() -> tuple[Sequence[Example], Sequence[Tensor]]:
    """Held-out chats, and what the unquantized model predicts."""
    examples = held_out_chats(NUM_TOKENS if IS_DEEP else 500)
    return examples, list(predictions(MODEL_DIR, examples, "float32"))


@pytest.mark.parametrize("mix", MIXES if IS_DEEP else ["Q8_0", "Q4_K_M"])
def test_predictions(mix: str, chats: tuple[Sequence[Example], Sequence[Tensor]], tmp_path: Path) -> None:
    examples, expected = chats
    found, bar = {}, BARS[mix]
    for is_expanded in (False, True):
        path = write_demo(tmp_path / f"{is_expanded}.gguf", mix, is_expanded=is_expanded)
        found[is_expanded] = quality(expected, predictions(path, examples, "float32"), examples)
    at_load = quality(expected, predictions(MODEL_DIR, examples, "float32", quantization=mix.lower()), examples)
    assert 0 < found[True].divergence <= bar.weights_only
    assert 0 < at_load.divergence <= bar.divergence
    assert 0 < found[False].divergence <= bar.divergence
    # A few of 500 tokens may be ties.
    assert found[False].agreement >= bar.agreement - (0 if IS_DEEP else 0.006)
