"""Pairs of GGUF files that llama.cpp's converter wrote for models that cut images: they see the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ModelLoadError
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import MergingSiglipConfig
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.engine.serving import Answers, request, running, serve
from tests.images.test_lfm2_vl_settings import PREPROCESSOR as LFM2_PREPROCESSOR
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, save
from tests.weights.gguf.forms_2026 import publish_minicpm
from tests.weights.gguf.mixes import Change, rewrite
from tests.weights.gguf.test_images import OPTIONS, exact, unchanged
from tests.weights.gguf.vision_models import IMAGE, TILED, Pair, original, stored_and_plain, write_pair

# Sides of a picture in pixels, and of a token.
SIZES = {
    "smolvlm": (24, 24, 12), "lfm2-vl": (64, 96, 32), "internvl": (24, 24, 8), "internvl-6b-moe": (32, 32, 16),
    "minicpm-v-4.6": (32, 48, 16), "minicpm-v-4.6-4x": (24, 40, 8),
}  # fmt: skip
NUM_TENSORS = {
    "smolvlm": 3 * 16 + 6, "lfm2-vl": 3 * 16 + 11, "internvl": 4 * 18 + 10, "internvl-6b-moe": 4 * 15 + 10,
    "minicpm-v-4.6": 4 * 16 + 27, "minicpm-v-4.6-4x": 4 * 16 + 11,
}  # fmt: skip
PLACES = (
    "model.vision_",
    "model.connector.",
    "model.merger.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
)
OPTIONAL_KEYS = ("clip.vision.preproc_image_size", "clip.vision.preproc_min_tiles", "clip.vision.preproc_max_tiles")


def write_checkpoint(name: str, directory: Path, model: nn.Module | None = None) -> None:
    """Write the model from which the files were converted, or another one."""
    save(model or original(name), directory)
    if name == "lfm2-vl":
        # Files do not say how images are cut. The published settings count.
        entries = {**LFM2_PREPROCESSOR, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD}
        (directory / "preprocessor_config.json").write_text(json.dumps(entries))
    if name.startswith("minicpm"):
        publish_minicpm(directory)


def image_at(name: str, start: int, seed: int) -> ImageInput:
    height, width, side = SIZES[name]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return ImageInput(start, height * width // side**2, height, width, pixels.tobytes())


def requests(name: str) -> list[EngineRequest]:
    """One with two pictures, one with one of them, one with another one, one of text."""
    random = Random(1)
    texts = [[random.randrange(2, IMAGE) for _ in range(count)] for count in (5, 3, 9, 30)]
    first = image_at(name, 5, 1)
    tokens = [IMAGE] * first.num_tokens
    second = image_at(name, 5 + len(tokens) + 3, 2)
    two = [*texts[0], *tokens, *texts[1], *tokens, *texts[2]]
    one = [*texts[0], *tokens, *texts[2]]
    given = [(two, [first, second]), (one, [first]), (one, [image_at(name, 5, 3)]), (texts[3], [])]
    values: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    return [request(ids, f"r{number}", images=images, **values) for number, (ids, images) in enumerate(given)]


def answers(name: str, path: Path, mmproj: Path | None = None, **options: Any) -> Answers:
    with running(path, **{**OPTIONS, **options}, mmproj=None if mmproj is None else str(mmproj)) as engine:
        assert engine.info.image_token_id == IMAGE and engine.info.image_side == SIZES[name][2]
        return serve(engine, requests(name))


@pytest.fixture(params=TILED)
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
    write_checkpoint(name, tmp_path / "checkpoint")
    found, expected = answers(name, *pair), answers(name, tmp_path / "checkpoint")
    assert found == expected
    assert found["r1", 0].logprobs != found["r2", 0].logprobs, "the picture matters"


def test_tensors_are_those_of_the_checkpoint(name: str, pair: Pair, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "checkpoint")
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        stored = sorted(one for one in checkpoint.names() if one.startswith(PLACES))
        if name.endswith("4x"):
            # The checkpoint has a step that it does not use.
            stored = [one for one in stored if ".vit_merger." not in one]
        assert len(stored) == NUM_TENSORS[name]
        assert sorted(one for one in source.names() if one.startswith(PLACES)) == stored
        for one in stored:
            assert torch.equal(source.get(one), checkpoint.get(one)), one


def test_configs_are_those_of_the_checkpoint(name: str, pair: Pair, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "checkpoint")
    found = read_config(describe(pair.text, str(pair.vision)).config)
    expected = read_config(describe(tmp_path / "checkpoint").config)
    assert found.vision == expected.vision and found.vision is not None


def settings_in(pair: Pair, path: Path, **options: Any) -> ImageSettings:
    found = image_settings(EngineConfig(str(pair.text), mmproj=str(path), **options))
    assert found is not None
    assert found.mean == pytest.approx(IMAGE_MEAN) and found.std == pytest.approx(IMAGE_STD)
    # Files have them in float32.
    return replace(found, mean=tuple(IMAGE_MEAN), std=tuple(IMAGE_STD))


def test_settings_are_those_of_the_checkpoint(name: str, pair: Pair, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "checkpoint")
    assert settings_in(pair, pair.vision) == read_settings(tmp_path / "checkpoint")
    assert image_settings(EngineConfig(str(pair.text))) is None


@pytest.mark.parametrize(
    ("name", "keys", "published"),
    [
        ("smolvlm", ["image_size"], {"longest_edge": 4 * 27}),
        ("internvl", ["min_tiles", "max_tiles"], {"max_tiles": 12}),
    ],
)
def test_settings_that_old_files_lack(name: str, keys: list[str], published: dict[str, int], pair: Pair) -> None:
    path = with_vision(pair, "old.gguf", values={f"clip.vision.preproc_{key}": None for key in keys})
    found = settings_in(pair, path)
    assert found == replace(settings_in(pair, pair.vision), **published) != settings_in(pair, pair.vision)


@exact
def test_the_eps_of_smolvlm_is_the_same_whatever_the_file_says(tmp_path: Path) -> None:
    """The converter writes 1e-5 where config.json leaves it out, for which transformers takes 1e-6."""
    pair = write_pair("smolvlm", tmp_path)
    path = with_vision(pair, "eps.gguf", values={"clip.vision.attention.layer_norm_epsilon": 1e-5})
    assert answers("smolvlm", pair.text, path) == answers("smolvlm", *pair)


@exact
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_types_of_weights(kind: str, tmp_path: Path) -> None:
    """Weights in blocks are the numbers that they stand for."""
    # Rows of 60 numbers have no blocks of 32.
    for name in ("lfm2-vl",) if kind == "Q8_0" else ("lfm2-vl", "internvl"):
        pair = write_pair(name, tmp_path)
        changes = zip(("stored.gguf", "plain.gguf"), stored_and_plain(kind, (2, 3, 4)), strict=True)
        stored, plain = (with_vision(pair, file, change) for file, change in changes)
        assert stored.stat().st_size < plain.stat().st_size
        assert answers(name, pair.text, stored) == answers(name, pair.text, plain)


@pytest.mark.parametrize("norm", ["mm.input_norm.weight", "mm.input_norm.bias"])
def test_lfm2_vl_may_lack_the_norm_of_its_projector(norm: str, tmp_path: Path) -> None:
    pair = write_pair("lfm2-vl", tmp_path)
    path = with_vision(pair, "none.gguf", lambda one, numbers: [] if "input_norm" in one else [(one, numbers, "F32")])
    vision = read_config(describe(pair.text, str(path)).config).vision
    assert isinstance(vision, MergingSiglipConfig) and vision.projector_eps is None
    assert answers("lfm2-vl", pair.text, path) != answers("lfm2-vl", *pair)
    half = with_vision(pair, "half.gguf", lambda one, numbers: [] if one == norm else [(one, numbers, "F32")])
    with pytest.raises(ModelLoadError, match=r"layer_norm"), running(pair.text, **OPTIONS, mmproj=str(half)):
        pass


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("smolvlm", {"clip.projector_type": "lfm2"}, "of the kind lfm2 belong to lfm2, lfm2moe, and this is llama"),
        ("smolvlm", {"clip.vision.projection_dim": 64}, "projection_dim is 64, and llama.embedding_length 48"),
        ("smolvlm", {"clip.vision.block_count": 2}, r"block_count is 2, and the file also holds v\.blk\.2"),
        ("smolvlm", {"clip.vision.projector.scale_factor": None}, "projector.scale_factor is missing"),
        (
            "smolvlm",
            {"clip.vision.projector.scale_factor": 5},
            "projector.scale_factor is 5, which does not divide 6",
        ),
        ("smolvlm", {"clip.vision.attention.layer_norm_epsilon": 1e-4}, "layer_norm_epsilon is .*, and only 1e-06"),
        ("smolvlm", {"clip.vision.preproc_image_size": 217}, "images would become too many tiles"),
        ("lfm2-vl", {"clip.vision.block_count": 2}, r"block_count is 2, and the file also holds v\.blk\.2"),
        ("lfm2-vl", {"clip.vision.image_std": None}, r"clip\.vision\.image_std is missing"),
        ("lfm2-vl", {"clip.use_gelu": False}, "clip.use_gelu is not what lfm2 has"),
        ("minicpm-v-4.6", {"clip.vision.projector.scale_factor": 3}, "scale_factor is 3, and must be 2 or 4"),
        ("minicpm-v-4.6", {"clip.vision.wa_layer_indexes": [1, 2]}, r"wa_layer_indexes is \[1, 2\], and must be one"),
        ("minicpm-v-4.6", {"clip.vision.wa_layer_indexes": [4]}, r"wa_layer_indexes is \[4\], and .* below 4"),
        ("internvl", {"clip.vision.image_size": 50}, r"clip\.vision\.image_size is 50, and must be a multiple of"),
        ("internvl", {"clip.vision.projector.scale_factor": 4}, "scale_factor is 4, which does not divide 6"),
        ("internvl", {"clip.vision.preproc_min_tiles": 7}, "min_patches in .* is 7, and max_patches 6"),
        ("internvl", {"clip.use_silu": True}, "clip.use_silu is not what internvl has"),
    ],
)
def test_files_that_cannot_be_used(name: str, values: dict[str, Any], complaint: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", values=values)
    with pytest.raises(ModelLoadError, match=complaint) as error, running(pair.text, **OPTIONS, mmproj=str(path)):
        pass
    assert "bad.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("smolvlm", "mm.model.fc.weight"),
        ("smolvlm", "v.post_ln.bias"),
        ("lfm2-vl", "v.position_embd.weight"),
        ("lfm2-vl", "mm.2.bias"),
        ("internvl", "v.class_embd"),
        ("internvl", "v.blk.1.ls2.weight"),
        ("internvl-6b-moe", "v.blk.3.attn_k_norm.weight"),
    ],
)
def test_a_tensor_that_is_missing(name: str, tensor: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", lambda one, numbers: [] if one == tensor else [(one, numbers, "F32")])
    with pytest.raises(ModelLoadError, match=r"lacks|holds no"), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("smolvlm", "v.class_embd"),
        ("smolvlm", "v.blk.0.ls1.weight"),
        ("lfm2-vl", "mm.3.weight"),
        ("internvl", "v.post_ln.bias"),
    ],
)
def test_a_tensor_that_is_not_known(name: str, tensor: str, pair: Pair) -> None:
    def with_another(one: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        yield one, numbers, "F32"
        if one == "v.blk.0.ln1.weight":
            yield tensor, numbers, "F32"

    path = with_vision(pair, "bad.gguf", with_another)
    with pytest.raises(ModelLoadError, match=f"does not have: {tensor}"):
        describe(pair.text, str(path))


@pytest.mark.parametrize("name", [name for name in TILED if not name.endswith("4x")])
def test_two_ranks_see_the_same(name: str, pair: Pair) -> None:
    found, expected = answers(name, *pair, tensor_parallel_size=2), answers(name, *pair)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}
