"""GGUF files that llama.cpp's converter wrote, against transformers on what they were written from.

A file in F32 gives the bits of its checkpoint, which tests/models/test_against_transformers.py compares. So only the
others are compared here, and some files in F16; with PAGEWICK_DEEP=1 all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagewick.kernels import cpu
from tests.deep import IS_DEEP
from tests.models.answers import answers, judge, make_prompts, running
from tests.models.checkpoints import save
from tests.models.variants import VARIANTS
from tests.weights.gguf.mixes import quantize
from tests.weights.gguf.models import FACTORED, MODELS, TILED, VOCAB_SIZE, original, write_file

PROMPTS = make_prompts((1, 33, 40), vocab_size=VOCAB_SIZE)


# A file has the results of Llama 3's scaling of frequencies, rounded to float32.
EXACT = [name for name in MODELS if name not in TILED | {"llama3-rope", "llama4-scout", "exaone-4-32b", "step-3.7"}]
COMPARED = [
    *((name, "F32") for name in MODELS if IS_DEEP or name not in EXACT or cpu.library() is None),
    *((name, "F16") for number, name in enumerate(MODELS) if IS_DEEP or number % 5 == 0),
]


@pytest.mark.parametrize(("name", "stored_type"), COMPARED)
def test_logits(name: str, stored_type: str, tmp_path: Path) -> None:
    path = write_file(name, tmp_path)
    if stored_type != "F32":
        path = quantize(path, tmp_path / "other.gguf", stored_type)
    variant = VARIANTS[name]
    with running(path, **variant.engine) as engine:
        found = answers(engine, PROMPTS, num_tokens=12)
    judged = judge(original(name), PROMPTS, found, one_by_one=variant.one_by_one)
    for answer, expected in zip(found, judged, strict=True):
        assert expected.std() > 0.5
        torch.testing.assert_close(answer.logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", FACTORED)
def test_logits_of_a_file_with_factors_in_its_weights(name: str, tmp_path: Path) -> None:
    with running(write_file(name, tmp_path)) as engine:
        found = answers(engine, PROMPTS, num_tokens=12)
    judged = judge(original(name), PROMPTS, found, one_by_one=VARIANTS[name].one_by_one)
    for answer, expected in zip(found, judged, strict=True):
        assert expected.std() > 0.5
        torch.testing.assert_close(answer.logits, expected, atol=1e-3, rtol=0)


@pytest.mark.skipif(cpu.library() is None, reason="without the native library, products are torch's")
@pytest.mark.parametrize("name", EXACT)
def test_bits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    found = []
    for path in (write_file(name, tmp_path), tmp_path / "checkpoint"):
        with running(path, dtype="float32", **VARIANTS[name].engine) as engine:
            found.append(answers(engine, PROMPTS, num_tokens=4))
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert torch.equal(ours.logits, theirs.logits)
