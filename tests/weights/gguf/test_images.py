"""Pairs of GGUF files that llama.cpp's converter wrote for models that read images: they answer as checkpoints do."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.kernels import cpu
from pagewick.weights.opening import open_source
from tests.engine.serving import Answers, request, running, serve
from tests.models.checkpoints import save
from tests.weights.gguf.vision_models import IMAGE, PAIRS, SIDE, original, write_pair

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 160, "dtype": "float32", "num_kv_blocks": 120}
exact = pytest.mark.skipif(cpu.library() is None, reason="without the native library, products are torch's")


def image_at(start: int, seed: int, rows: int, columns: int) -> ImageInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * SIDE, columns * SIDE, 3), np.uint8)
    return ImageInput(start, rows * columns, rows * SIDE, columns * SIDE, pixels.tobytes())


def requests() -> list[EngineRequest]:
    """One with two images, one with a third, one of text."""
    random = Random(1)
    texts = [[random.randrange(2, IMAGE) for _ in range(count)] for count in (5, 3, 9, 30, 4)]
    wide, tall, other = image_at(5, 1, 2, 7), image_at(22, 2, 6, 3), image_at(5, 3, 2, 7)
    two = [*texts[0], *[IMAGE] * 14, *texts[1], *[IMAGE] * 18, *texts[2]]
    one = [*texts[0], *[IMAGE] * 14, *texts[4]]
    given = [(two, [wide, tall]), (one, [other]), (one, [wide]), (texts[3], [])]
    values: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    return [request(ids, f"r{number}", images=images, **values) for number, (ids, images) in enumerate(given)]


def answers(path: Path, mmproj: Path | None = None, **options: Any) -> Answers:
    with running(path, **{**OPTIONS, **options}, mmproj=None if mmproj is None else str(mmproj)) as engine:
        assert engine.info.image_token_id == IMAGE and engine.info.image_side == SIDE
        return serve(engine, requests())


@exact
@pytest.mark.parametrize("name", PAIRS)
def test_bits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    pair = write_pair(name, tmp_path)
    found, expected = answers(*pair), answers(tmp_path / "checkpoint")
    assert found == expected
    assert found["r1", 0].logprobs != found["r2", 0].logprobs, "the picture matters"


@pytest.mark.parametrize("name", PAIRS)
def test_tensors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Of the vision part; all are there, and none is there twice."""
    model = original(name)
    save(model, tmp_path / "checkpoint")
    pair = write_pair(name, tmp_path)
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        stored = {one.removeprefix("model."): one for one in checkpoint.names() if "visual." in one}
        assert [one for one in sorted(source.names()) if one.startswith("visual.")] == sorted(stored)
        for ours, theirs in stored.items():
            assert torch.equal(source.get(ours), checkpoint.get(theirs)), ours
