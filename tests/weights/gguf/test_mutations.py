"""Damaged and hostile GGUF files: an error that names the problem, or a model; never a crash."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.preflight import check_models
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.gguf.header import read_gguf_header
from pagewick.weights.gguf.source import GgufSource
from tests.doctor.test_model import tiny_gguf
from tests.models.encoders import VOCAB_SIZE
from tests.models.test_encoders import LABELS
from tests.models.word_pieces import unigrams, word_pieces
from tests.weights.gguf.demo import write_demo
from tests.weights.gguf.encoder_vocabularies import unigram_values, word_piece_values
from tests.weights.gguf.encoders import write_gguf
from tests.weights.gguf.models import write_file
from tests.weights.gguf.random_models import write_random
from tests.weights.gguf.test_types import in_turn
from tests.weights.gguf.vision_models import write_pair

NUM_MUTATIONS = 10_000 if os.environ.get("PAGEWICK_DEEP") == "1" else 500

# Rules of normalisation that change nothing: a table without entries.
RULES = [*struct.pack("<I", 1024), *bytes(1024)]


def mutated(data: bytes, random: Random, header_bytes: int) -> bytes:
    """Flip bits, overwrite numbers with large ones, cut, repeat or remove a part; mostly within the header."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        place = random.randrange(min(header_bytes, len(changed) - 9) if random.random() < 0.9 else len(changed) - 9)
        match random.randrange(6):
            case 0:
                changed[place] ^= 1 << random.randrange(8)
            case 1:
                number = random.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1, len(data)])
                changed[place : place + 8] = struct.pack("<Q", number)
            case 2:
                changed[place : place + 4] = struct.pack("<I", random.choice([*range(43), 2**32 - 1]))
            case 3:
                end = len(changed) if random.random() < 0.3 else place + random.randrange(1, 9)
                del changed[place:end]
            case 4:
                changed[place:place] = changed[place : place + random.randrange(1, 64)]
            case 5:
                changed[place] = random.randrange(256)
        if len(changed) < 32:
            break
    return bytes(changed)


def use(path: Path, mmproj: Path | None = None, *, has_vocabulary: bool) -> None:
    """Do all that loading does: the checks before it, every tensor, the vocabulary, the settings for images."""
    config = EngineConfig(model=str(path), mmproj=None if mmproj is None else str(mmproj))
    check_models(config)
    image_settings(config)
    with GgufSource(path, mmproj) as source:
        for name in source.names():
            tensor = source.get(name)
            assert tensor.shape == source.shape(name) and tensor.dtype == source.dtype(name)
            tensor.sum()
    if has_vocabulary:
        Tokenizer.from_directory(path)


KINDS: dict[str, tuple[Callable[[Path], bytes], int]] = {
    "q8_0": (lambda directory: tiny_gguf(), 1500),
    "experts": (lambda directory: write_file("qwen3-moe", directory).read_bytes(), 6000),
    "states": (lambda directory: write_file("nemotron-3-latents", directory).read_bytes(), 4500),
    "types": (lambda directory: write_random(directory / "types.gguf", "dense", in_turn).read_bytes(), 5400),
    "vocabulary": (lambda directory: write_demo(directory / "demo.gguf").read_bytes(), 150_000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file(kind: str, tmp_path: Path) -> None:
    make, header_bytes = KINDS[kind]
    data, path, num_refused = make(tmp_path), tmp_path / "m.gguf", 0
    for seed in range(NUM_MUTATIONS // len(KINDS)):
        path.write_bytes(mutated(data, Random(f"{kind}-{seed}"), header_bytes))
        try:
            use(path, has_vocabulary=kind == "vocabulary")
        except (ModelLoadError, ConfigError) as error:
            num_refused += 1
            assert len(str(error)) < 1500 and len(str(error).splitlines()) <= 6, seed
            assert "config.json:" not in str(error), seed
    assert 0 < num_refused < NUM_MUTATIONS // len(KINDS)


@pytest.mark.parametrize("name", ["qwen2.5-vl-window", "qwen3-vl", "gemma-3-multimodal"])
def test_a_mutated_vision_part(name: str, tmp_path: Path) -> None:
    pair, path, num_refused = write_pair(name, tmp_path), tmp_path / "m.gguf", 0
    data = pair.vision.read_bytes()
    for seed in range(NUM_MUTATIONS // len(KINDS)):
        path.write_bytes(mutated(data, Random(f"{name}-{seed}"), 5000))
        try:
            use(pair.text, path, has_vocabulary=False)
        except (ModelLoadError, ConfigError) as error:
            num_refused += 1
            assert len(str(error)) < 1500 and len(str(error).splitlines()) <= 6, seed
            assert "config.json" not in str(error), seed
    assert 0 < num_refused < NUM_MUTATIONS // len(KINDS)


@pytest.mark.parametrize(
    ("name", "task"),
    [("bert", "Model"), ("xlm-roberta", LABELS), ("modernbert", LABELS), ("embedding-gemma", "Model")],
)
def test_a_mutated_encoder(name: str, task: str, tmp_path: Path) -> None:
    vocabulary = unigram_values(unigrams(), VOCAB_SIZE, precompiled_charsmap=RULES)
    if name == "bert":
        vocabulary = word_piece_values(word_pieces(), VOCAB_SIZE)
    written, _ = write_gguf(name, tmp_path, task, vocabulary=vocabulary, num_labels=1)
    header_bytes = min(tensor.offset for tensor in read_gguf_header(written).tensors)
    data, path, num_refused = written.read_bytes(), tmp_path / "m.gguf", 0
    for seed in range(NUM_MUTATIONS // len(KINDS)):
        path.write_bytes(mutated(data, Random(f"{name}-{seed}"), header_bytes))
        try:
            use(path, has_vocabulary=True)
        except (ModelLoadError, ConfigError) as error:
            num_refused += 1
            assert len(str(error)) < 1500 and len(str(error).splitlines()) <= 6, seed
            assert "config.json:" not in str(error), (seed, str(error))
    assert 0 < num_refused < NUM_MUTATIONS // len(KINDS)
