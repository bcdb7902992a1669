"""Pairs of GGUF files that llama.cpp's converter wrote for Gemma 4: they see what the checkpoints see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ModelLoadError
from pagewick.images.gemma4_settings import Gemma4Settings
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig
from pagewick.models.registry import read_config
from pagewick.models.vision.config import Gemma4VisionConfig
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.engine.serving import Answers, request, running, serve
from tests.models.checkpoints import save
from tests.weights.gguf.mixes import Change, rewrite
from tests.weights.gguf.test_images import OPTIONS, exact, unchanged
from tests.weights.gguf.vision_models import IMAGE, SCALED, VOCAB_SIZE, Pair, original, stored_and_plain, write_pair

# The first model is causal and its products have limits; the second one sees images whole and has standards.
CAUSAL, WHOLE = SCALED
# Pixels of a token's side.
SIDE = 12
_PLACES = ("model.vision_tower.", "model.embed_vision.")


def image_at(start: int, seed: int, rows: int, columns: int) -> ImageInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * SIDE, columns * SIDE, 3), np.uint8)
    return ImageInput(start, rows * columns, rows * SIDE, columns * SIDE, pixels.tobytes())


def requests() -> list[EngineRequest]:
    """One with two images, one with one of them, one with another one, one of text."""
    random = Random(1)
    texts = [[random.randrange(4, IMAGE) for _ in range(count)] for count in (5, 3, 9, 30)]
    two = [*texts[0], *[IMAGE] * 12, *texts[1], *[IMAGE] * 10, *texts[2]]
    one = [*texts[0], *[IMAGE] * 12, *texts[2]]
    first, second, other = image_at(5, 1, 3, 4), image_at(20, 2, 5, 2), image_at(5, 3, 3, 4)
    given = [(two, [first, second]), (one, [first]), (one, [other]), (texts[3], [])]
    values: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    return [request(ids, f"r{number}", images=images, **values) for number, (ids, images) in enumerate(given)]


def answers(path: Path, mmproj: Path | None = None, **options: Any) -> Answers:
    with running(path, **{**OPTIONS, **options}, mmproj=None if mmproj is None else str(mmproj)) as engine:
        assert engine.info.image_token_id == IMAGE and engine.info.image_side == SIDE
        return serve(engine, requests())


def with_vision(pair: Pair, name: str, change: Change = unchanged, values: Mapping[str, Any] | None = None) -> Path:
    """Copy the vision part with other tensors and keys, as mixes.rewrite has it."""
    return rewrite(pair.vision, pair.vision.with_name(name), change, values)


def config_of(pair: Pair, vision: Path | None = None) -> ModelConfig:
    return read_config(describe(pair.text, str(vision or pair.vision)).config)


def vision_of(pair: Pair, vision: Path | None = None) -> Gemma4VisionConfig:
    found = config_of(pair, vision).vision
    assert isinstance(found, Gemma4VisionConfig)
    return found


def whole(config: ModelConfig) -> list[bool]:
    """Whether each layer sees images whole."""
    return [isinstance(one.attention, AttentionConfig) and one.attention.sees_images_whole for one in config.layers]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(CAUSAL, tmp_path)


@exact
@pytest.mark.parametrize("name", SCALED)
def test_bits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    found, expected = answers(*write_pair(name, tmp_path)), answers(tmp_path / "checkpoint")
    assert found == expected
    assert found["r1", 0].logprobs != found["r2", 0].logprobs, "the picture matters"


@pytest.mark.parametrize(("name", "number"), [(CAUSAL, 3 * (13 + 7 * 4) + 3), (WHOLE, 3 * 13 + 5)])
def test_tensors_are_those_of_the_checkpoint(name: str, number: int, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    pair = write_pair(name, tmp_path)
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        stored = sorted(one for one in checkpoint.names() if one.startswith(_PLACES))
        assert len(stored) == number
        assert sorted(one for one in source.names() if one.startswith(_PLACES)) == stored
        for one in stored:
            assert source.shape(one) == checkpoint.shape(one)
            assert torch.equal(source.get(one).float(), checkpoint.get(one)), one


@pytest.mark.parametrize("name", SCALED)
def test_the_config_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    pair = write_pair(name, tmp_path)
    with open_source(tmp_path / "checkpoint") as checkpoint:
        expected = read_config(checkpoint.config())
    found = config_of(pair)
    assert found.vision == expected.vision
    assert whole(found) == whole(expected) and any(whole(found)) == (name == WHOLE)
    assert (found.layer_inputs is None) == (name == WHOLE)
    assert found.layer_inputs is None or found.layer_inputs.image_row == 0


def test_the_padding_is_that_of_the_file(pair: Pair) -> None:
    path = rewrite(pair.text, pair.text.with_name("pad.gguf"), unchanged, {"tokenizer.ggml.padding_token_id": 3})
    inputs = config_of(Pair(path, pair.vision)).layer_inputs
    assert inputs is not None and inputs.image_row == 3
    expected = answers(*pair)
    found = answers(path, pair.vision)
    assert found["r1", 0].logprobs != expected["r1", 0].logprobs and found["r3", 0] == expected["r3", 0]


def test_settings_are_those_of_the_processor(pair: Pair) -> None:
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision)))
    assert isinstance(settings, Gemma4Settings)
    assert (settings.patch_size, settings.merge_size, settings.max_tokens) == (4, 3, 280)
    assert (settings.mean, settings.std, settings.rescale_factor) == ((0.0,) * 3, (1.0,) * 3, 1 / 255)
    assert settings.placeholder is not None and settings.placeholder.written == "<|image|>"
    assert image_settings(EngineConfig(str(pair.text))) is None
    limited = image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision), max_image_pixels=11 * SIDE**2))
    assert limited is not None and limited.max_tokens == 11


def test_files_may_say_how_wide_a_token_is(pair: Pair) -> None:
    path = with_vision(pair, "two.gguf", values={"clip.vision.projector.scale_factor": 2})
    assert (vision_of(pair, path).merge_size, vision_of(pair).merge_size) == (2, 3)
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(path)))
    assert settings is not None and settings.token_side == 8


@exact
def test_a_part_that_hears_is_left_out(pair: Pair) -> None:
    def with_sound(name: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        yield name, numbers, "F32"
        if name == "mm.input_projection.weight":
            for other in ("a.blk.0.attn_q.weight", "a.blk.0.attn_q.input_max", "mm.a.input_projection.weight"):
                yield other, numbers, "F32"

    values = {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
    assert answers(pair.text, with_vision(pair, "sound.gguf", with_sound, values)) == answers(*pair)


@exact
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types_of_weights(kind: str, tmp_path: Path) -> None:
    """Weights in blocks are the numbers that they stand for."""
    pair = write_pair(CAUSAL, tmp_path)
    changes = zip(("stored.gguf", "plain.gguf"), stored_and_plain(kind, (2, 4)), strict=True)
    stored, plain = (with_vision(pair, name, change) for name, change in changes)
    assert stored.stat().st_size < plain.stat().st_size
    assert answers(pair.text, stored) == answers(pair.text, plain)


def test_two_ranks_see_the_same(pair: Pair) -> None:
    found, expected = answers(*pair, tensor_parallel_size=2), answers(*pair)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}


def test_without_the_vision_part_the_model_reads_text(pair: Pair) -> None:
    with running(pair.text, **OPTIONS) as engine:
        assert engine.info.image_token_id is None
        found = serve(engine, requests()[3:])
    assert found["r3", 0] == answers(*pair)["r3", 0]


def test_a_vocabulary_without_the_token_of_images(pair: Pair) -> None:
    tokens = [f"t{token_id}" for token_id in range(VOCAB_SIZE)]
    text = rewrite(pair.text, pair.text.with_name("none.gguf"), unchanged, {"tokenizer.ggml.tokens": tokens})
    with pytest.raises(ModelLoadError, match=r"none\.gguf has no token <\|image\|>"):
        describe(text, str(pair.vision))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"clip.vision.projector_type": "gemma3"}, "of the kind gemma3 belong to gemma3, and this is gemma4"),
        ({"clip.vision.projector_type": "gemma4uv"}, "of the kind 'gemma4uv', which is not supported"),
        ({"clip.vision.projection_dim": 64}, r"clip\.vision\.projection_dim is 64, and gemma4\.embedding_length 48"),
        ({"clip.vision.block_count": 10**6}, "clip.vision.block_count is 1000000, more than the tensors"),
        ({"clip.use_silu": True}, "clip.use_silu is not what gemma4v has"),
        ({"clip.vision.attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 9.9.*, and only 1e-06"),
        ({"clip.vision.attention.head_count": 7}, r"clip\.vision\.attention\.head_count is 7"),
        ({"clip.vision.patch_size": None}, "clip.vision.patch_size is missing"),
        ({"clip.vision.image_mean": None}, "clip.vision.image_mean is missing"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], complaint: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", values=values)
    with pytest.raises(ModelLoadError, match=complaint) as error, running(pair.text, **OPTIONS, mmproj=str(path)):
        pass
    assert "bad.gguf" in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["mm.input_projection.weight", "v.position_embd.weight", "v.blk.1.attn_k.weight", "v.blk.2.ffn_up.input_min"],
)
def test_a_tensor_that_is_missing(name: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", lambda one, numbers: [] if one == name else [(one, numbers, "F32")])
    with pytest.raises(ModelLoadError, match=r"lacks|holds no"), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass


@pytest.mark.parametrize("name", ["v.patch_embd.bias", "v.blk.0.ln1.input_max", "v.blk.0.ls1.weight", "v.std_mean"])
def test_a_tensor_that_is_not_known(name: str, pair: Pair) -> None:
    def with_another(one: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        yield one, numbers, "F32"
        if one == "v.blk.0.ln1.weight":
            yield name, numbers, "F32"

    path = with_vision(pair, "bad.gguf", with_another)
    with pytest.raises(ModelLoadError) as error, running(pair.text, **OPTIONS, mmproj=str(path)):
        pass
    assert name in str(error.value) and "bad.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v.blk.0.attn_q.input_max", "must be one number"),
        ("v.position_embd.weight", "must have three dimensions"),
        ("v.patch_embd.weight", "must have four dimensions"),
    ],
)
def test_shapes_that_are_wrong_are_named(name: str, said: str, pair: Pair) -> None:
    def changed(one: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        shape = (2, -1) if numbers.size > 1 else (1, 1)
        yield one, numbers.reshape(shape) if one == name else numbers, "F32"

    path = with_vision(pair, "bad.gguf", changed)
    with (
        pytest.raises(ModelLoadError, match=rf"bad\.gguf: {name} {said}"),
        running(pair.text, **OPTIONS, mmproj=str(path)),
    ):
        pass
