"""Pairs of GGUF files that llama.cpp's converter wrote for Mistral's models: they see what the checkpoint sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pagewick import LLM, SamplingParams
from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ModelLoadError
from pagewick.images.pixtral_settings import PixtralSettings
from pagewick.models.registry import read_config
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.engine.serving import Answers, request, running, serve
from tests.images.test_pixtral_model import MESSAGES, write_tiny_mistral
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, save
from tests.weights.gguf.mixes import Change, rewrite
from tests.weights.gguf.models import write_file
from tests.weights.gguf.test_images import OPTIONS, exact, unchanged
from tests.weights.gguf.vision_models import IMAGE, ROWS, Pair, original, stored_and_plain, write_pair
from tests.weights.gguf.written import write

# Pixels of a token's side. The largest image has sides of 160 pixels.
SIDES = {"mistral-small-3.1": 8, "ministral-3-multimodal": 12, "mistral-small-4": 8, "pixtral-12b": 4}
EDGE = 160
# Tensors of three blocks, and of all else.
NUM_TENSORS = {
    "mistral-small-3.1": 3 * 9 + 6, "ministral-3-multimodal": 3 * 9 + 8, "mistral-small-4": 3 * 9 + 6,
    "pixtral-12b": 3 * 9 + 6,
}  # fmt: skip
PLACES = tuple(f"{place}{part}." for place in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))


def image_at(name: str, start: int, seed: int, rows: int, columns: int) -> ImageInput:
    height, width = rows * SIDES[name], columns * SIDES[name]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return ImageInput(start, rows * (columns + 1), height, width, pixels.tobytes(), columns)


def tokens_of(rows: int, columns: int) -> list[int]:
    row = [*[IMAGE] * columns, IMAGE + 1]
    return [*(row * rows)[:-1], IMAGE + 2]


def requests(name: str) -> list[EngineRequest]:
    """One with two images, one with one of them, one with another one, one of text."""
    random = Random(1)
    texts = [[random.randrange(2, IMAGE) for _ in range(count)] for count in (5, 3, 9, 30)]
    tall, wide = tokens_of(3, 2), tokens_of(2, 4)
    second = image_at(name, 5 + len(tall) + 3, 2, 2, 4)
    two = [*texts[0], *tall, *texts[1], *wide, *texts[2]]
    one = [*texts[0], *tall, *texts[2]]
    first, other = (image_at(name, 5, seed, 3, 2) for seed in (1, 3))
    given = [(two, [first, second]), (one, [first]), (one, [other]), (texts[3], [])]
    values: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    return [request(ids, f"r{number}", images=images, **values) for number, (ids, images) in enumerate(given)]


def answers(name: str, path: Path, mmproj: Path | None = None, **options: Any) -> Answers:
    with running(path, **{**OPTIONS, **options}, mmproj=None if mmproj is None else str(mmproj)) as engine:
        assert engine.info.image_token_id == IMAGE and engine.info.image_side == SIDES[name]
        return serve(engine, requests(name))


@pytest.fixture(params=ROWS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(name: str, tmp_path: Path) -> Pair:
    return write_pair(name, tmp_path)


def with_vision(pair: Pair, file: str, change: Change = unchanged, values: Mapping[str, Any] | None = None) -> Path:
    """Copy the vision part with other tensors and keys, as mixes.rewrite has it."""
    return rewrite(pair.vision, pair.vision.with_name(file), change, values)


@exact
def test_bits_are_those_of_the_checkpoint(name: str, pair: Pair, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    found, expected = answers(name, *pair), answers(name, tmp_path / "checkpoint")
    assert found == expected
    assert found["r1", 0].logprobs != found["r2", 0].logprobs, "the picture matters"


def test_tensors_and_config_are_those_of_the_checkpoint(name: str, pair: Pair, tmp_path: Path) -> None:
    save(original(name), tmp_path / "checkpoint")
    found, expected = (
        read_config(describe(*one).config) for one in ((pair.text, str(pair.vision)), (tmp_path / "checkpoint",))
    )
    assert found.vision is not None and expected.vision is not None
    assert replace(found.vision, projector_eps=None) == replace(expected.vision, projector_eps=None)
    assert [layer.window for layer in found.layers] == [layer.window for layer in expected.layers]
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        stored = {one.removeprefix("model."): one for one in checkpoint.names() if one.startswith(PLACES)}
        assert len(stored) == NUM_TENSORS[name]
        assert sorted(one for one in source.names() if one.startswith(PLACES)) == sorted(stored)
        for ours, theirs in stored.items():
            assert torch.equal(source.get(ours), checkpoint.get(theirs)), ours


def test_files_may_say_how_patches_turn(pair: Pair) -> None:
    """Those of llama.cpp's converter do if they come from Mistral's own form of checkpoints."""
    path = with_vision(pair, "turned.gguf", values={"clip.rope.freq_base": 5e5})
    found = [read_config(describe(pair.text, str(one)).config).vision for one in (pair.vision, path)]
    assert [vision and vision.rope_theta for vision in found] == [1e4, 5e5]


def test_settings_are_those_of_the_file(name: str, pair: Pair) -> None:
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision)))
    assert isinstance(settings, PixtralSettings)
    assert (settings.patch_size, settings.token_side, settings.longest_edge) == (4, SIDES[name], EDGE)
    assert settings.mean == pytest.approx(IMAGE_MEAN) and settings.std == pytest.approx(IMAGE_STD)
    assert (settings.row_end, settings.image_end) == ("[IMG_BREAK]", "[IMG_END]")
    assert image_settings(EngineConfig(str(pair.text))) is None


@exact
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_types_of_weights(kind: str, tmp_path: Path) -> None:
    """Weights in blocks are the numbers that they stand for, in the order of the checkpoint."""
    pair = write_pair("mistral-small-3.1", tmp_path)
    changes = zip(("stored.gguf", "plain.gguf"), stored_and_plain(kind, (2, 4)), strict=True)
    stored, plain = (with_vision(pair, file, change) for file, change in changes)
    assert stored.stat().st_size < plain.stat().st_size
    assert answers("mistral-small-3.1", pair.text, stored) == answers("mistral-small-3.1", pair.text, plain)


def test_prompts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """With a text part that Pagewick wrote, whose vocabulary has the tokens behind rows."""
    pair = write_pair("mistral-small-3.1", tmp_path)
    write_tiny_mistral(tmp_path / "checkpoint")
    text = write(tmp_path / "checkpoint", tmp_path / "text.gguf", "q8_0")
    found = []
    for model, mmproj in (
        (tmp_path / "checkpoint", None),
        (text, str(with_vision(pair, "small.gguf", values={"clip.vision.image_size": 40}))),
    ):
        with LLM(str(model), mmproj=mmproj, dtype="float32", max_model_len=400) as llm:
            found.append([one.prompt_token_ids for one in llm.chat(MESSAGES, SamplingParams(max_tokens=1))])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"clip.projector_type": "glm4v"}, "of the kind glm4v belong to glm4, glm4moe, and this is mistral3"),
        ({"clip.vision.image_size": None}, "clip.vision.image_size is missing"),
        ({"clip.vision.attention.head_count": 5}, r"clip\.vision\.attention\.head_count"),
        ({"clip.use_silu": False, "clip.use_gelu": True}, "clip.use_gelu is not what pixtral has"),
        ({"clip.vision.attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is .*, and only 1e-05"),
        ({"clip.vision.spatial_merge_size": 3}, "merging_layer"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    pair = write_pair("mistral-small-3.1", tmp_path)
    path = with_vision(pair, "bad.gguf", values=values)
    with pytest.raises(ModelLoadError, match=complaint), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass


@pytest.mark.parametrize("tensor", ["v.pre_ln.weight", "mm.input_norm.weight", "v.blk.1.ffn_gate.weight"])
def test_a_tensor_that_is_missing(tensor: str, tmp_path: Path) -> None:
    pair = write_pair("mistral-small-3.1", tmp_path)
    path = with_vision(pair, "bad.gguf", lambda one, numbers: [] if one == tensor else [(one, numbers, "F32")])
    with pytest.raises(ModelLoadError, match=r"lacks|holds no"), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass


def test_a_text_part_of_another_family(tmp_path: Path) -> None:
    """Mixtral's files are of the architecture `llama`, too."""
    mixtral = write_file("mixtral", tmp_path)
    tokens = [
        "[IMG]" if token_id == IMAGE else f"t{token_id}" for token_id in range(describe(mixtral).config["vocab_size"])
    ]
    text = rewrite(mixtral, tmp_path / "text.gguf", unchanged, {"tokenizer.ggml.tokens": tokens})
    pair = write_pair("pixtral-12b", tmp_path)
    width = describe(text).config["hidden_size"]
    path = with_vision(pair, "other.gguf", values={"clip.vision.projection_dim": width})
    with pytest.raises(
        ModelLoadError, match=r"other\.gguf is not the vision part of .*: a MixtralForCausalLM is no text"
    ):
        describe(text, str(path))
