"""Pairs of GGUF files that llama.cpp's converter wrote for models that read images: they answer as checkpoints do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ModelLoadError, UnsupportedError
from pagewick.images.glm_settings import GlmSettings
from pagewick.kernels import cpu
from pagewick.models.registry import read_config
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.engine.serving import Answers, request, running, serve
from tests.images.reading_model import PAD_ID
from tests.images.tiny_vlm import write_tiny_vlm
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, save
from tests.weights.gguf.mixes import Change, Numbers, quantize, rewrite
from tests.weights.gguf.vision_models import IMAGE, PAIRS, SIDE, VOCAB_SIZE, Pair, original, write_pair
from tests.weights.gguf.written import write

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
    """The tensors of the vision part are all there, and none is there twice."""
    model = original(name)
    save(model, tmp_path / "checkpoint")
    pair = write_pair(name, tmp_path)
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        stored = {one.removeprefix("model."): one for one in checkpoint.names() if "visual." in one}
        assert [one for one in sorted(source.names()) if one.startswith("visual.")] == sorted(stored)
        for ours, theirs in stored.items():
            assert torch.equal(source.get(ours), checkpoint.get(theirs)), ours


def unchanged(name: str, numbers: Numbers) -> Iterable[tuple[str, Numbers, str]]:
    return [(name, numbers, "F32")]


def with_vision(pair: Pair, name: str, change: Change = unchanged, values: Mapping[str, Any] | None = None) -> Path:
    """Copy the vision part with other tensors and keys, as mixes.rewrite has it."""
    return rewrite(pair.vision, pair.vision.with_name(name), change, values)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair("qwen3-vl", tmp_path)


def dequantized(name: str, numbers: Any, kind: str) -> Iterator[tuple[str, Any, str]]:
    """The numbers that a matrix has after it was stored in a type, if its rows can be."""
    if numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
        number_type = gguf.GGMLQuantizationType[kind]
        numbers = gguf.quants.dequantize(gguf.quants.quantize(numbers, number_type), number_type)
    yield name, numbers, "F32"


def quantized(name: str, numbers: Any, kind: str) -> Iterator[tuple[str, Any, str]]:
    if numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
        yield name, gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]), kind
    else:
        yield name, numbers, "F32"


@exact
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types_of_weights(kind: str, pair: Pair) -> None:
    """Weights in blocks are the numbers that they stand for; the text part may have another type."""
    text = quantize(pair.text, pair.text.with_name("q8.gguf"), "Q8_0")
    stored = with_vision(pair, "stored.gguf", lambda name, numbers: quantized(name, numbers, kind))
    numbers = with_vision(pair, "numbers.gguf", lambda name, numbers: dequantized(name, numbers, kind))
    assert stored.stat().st_size < numbers.stat().st_size
    found = answers(text, stored)
    assert found == answers(text, numbers)
    assert found != answers(pair.text, numbers), "the text part is in Q8_0"


@exact
def test_weights_quantized_at_load_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    save(original("qwen2-vl"), tmp_path / "checkpoint")
    pair = write_pair("qwen2-vl", tmp_path)
    options: dict[str, Any] = {"quantization": "q8_0", "quantized_cache": False}
    assert answers(*pair, **options) == answers(tmp_path / "checkpoint", **options)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl-window"])
def test_the_first_files_of_qwen2_vl(name: str, tmp_path: Path) -> None:
    pair = write_pair(name, tmp_path)
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def swapped(name: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        parts = name.split(".")
        yield ".".join(names.get(part, part) for part in parts), numbers, "F32"

    # Two keys were 0, and general.type was missing.
    values = {"clip.vision.projection_dim": 0, "clip.vision.feed_forward_length": 0, "general.type": None}
    path = with_vision(pair, "swapped.gguf", swapped, values)
    with open_source(pair.text, mmproj=str(pair.vision)) as old, open_source(pair.text, mmproj=str(path)) as source:
        assert source.config() == old.config() and set(source.names()) == set(old.names())
        for one in old.names():
            assert torch.equal(source.get(one), old.get(one)), one


def test_two_ranks_see_the_same(pair: Pair) -> None:
    found, expected = answers(*pair, tensor_parallel_size=2), answers(*pair)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}


@exact
def test_without_the_vision_part_images_are_refused_and_text_is_the_same(pair: Pair) -> None:
    expected = answers(*pair)
    with running(pair.text, **OPTIONS) as engine:
        assert engine.info.image_token_id is None
        with pytest.raises(UnsupportedError, match="reads no images"):
            engine.add(requests()[0])
        assert serve(engine, requests()[3:]) == {("r3", 0): expected["r3", 0]}


@exact
@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("glm")])
def test_text_parts_of_glm_read_text_alone(name: str, tmp_path: Path) -> None:
    """Their queries and keys are in another order than those of models that only read text."""
    pair = write_pair(name, tmp_path)
    with running(pair.text, **OPTIONS) as engine:
        assert engine.info.image_token_id is None
        assert serve(engine, requests()[3:]) == {("r3", 0): answers(*pair)["r3", 0]}


def settings_of(pair: Pair, path: Path, **options: Any) -> Any:
    return image_settings(EngineConfig(str(pair.text), mmproj=str(path), **options))


def test_settings_are_those_of_the_file_and_of_the_family(pair: Pair, tmp_path: Path) -> None:
    settings = settings_of(pair, pair.vision)
    assert (settings.patch_size, settings.merge_size, settings.temporal_patch_size) == (4, 2, 2)
    assert settings.mean == pytest.approx(IMAGE_MEAN) and settings.std == pytest.approx(IMAGE_STD)
    assert (settings.min_pixels, settings.max_pixels, settings.rescale_factor) == (2**16, 2**24, 1 / 255)
    assert settings_of(pair, pair.vision, max_image_pixels=1000).max_pixels == 1000
    older = write_pair("qwen2-vl", tmp_path)
    assert settings_of(older, older.vision).min_pixels == 3136
    assert settings_of(older, older.vision).max_pixels == 12845056
    glm = settings_of(write_pair("glm-4.1v", tmp_path), tmp_path / "mmproj-glm-4.1v-F32.gguf")
    assert isinstance(glm, GlmSettings) and (glm.patch_size, glm.merge_size, glm.temporal_patch_size) == (4, 2, 2)
    assert (glm.min_pixels, glm.max_pixels) == (8 * 28**2, 6144 * 28**2)
    assert glm.mean == pytest.approx(IMAGE_MEAN) and glm.std == pytest.approx(IMAGE_STD)
    limits = {"clip.vision.image_min_pixels": 128, "clip.vision.image_max_pixels": 4096}
    limited = settings_of(pair, with_vision(pair, "limited.gguf", values=limits))
    assert (limited.min_pixels, limited.max_pixels) == (128, 4096)
    assert image_settings(EngineConfig(str(pair.text))) is None


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"clip.projector_type": "mlp"}, "a vision part of the kind 'mlp', which is not supported"),
        ({"clip.projector_type": "qwen2vl_merger"}, "belong to qwen2vl, and this is qwen3vl"),
        ({"clip.vision.projection_dim": 64}, "clip.vision.projection_dim is 64, and qwen3vl.embedding_length 48"),
        ({"clip.vision.block_count": 10**6}, "clip.vision.block_count is 1000000, more than the tensors"),
        ({"clip.vision.block_count": None}, "clip.vision.block_count is missing"),
        ({"clip.use_gelu": False}, "clip.use_gelu is not what qwen3vl_merger has"),
        (
            {"clip.vision.attention.layer_norm_epsilon": 1e-5},
            "clip.vision.attention.layer_norm_epsilon is 9.9.*, and only 1e-06",
        ),
        ({"clip.vision.attention.head_count": 5}, "clip.vision.attention.head_count"),
        ({"general.type": "model"}, "does not hold the vision part of a model"),
        ({"clip.vision.image_mean": None}, "clip.vision.image_mean is missing"),
        ({"clip.vision.image_std": [0.5, 0.5]}, "image_std in .*bad.gguf must be three numbers"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], complaint: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", values=values)
    with pytest.raises(ModelLoadError, match=complaint) as error, running(pair.text, **OPTIONS, mmproj=str(path)):
        pass
    assert "bad.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("v.patch_embd.weight.1", "must hold a v.patch_embd.weight.1"),
        ("v.position_embd.weight", "holds no v.position_embd.weight"),
        ("v.deepstack.2.fc1.weight", "deepstack_merger_list.1"),
        ("mm.2.weight", "merger.linear_fc2"),
    ],
)
def test_a_tensor_that_is_missing(name: str, complaint: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", lambda one, numbers: [] if one == name else [(one, numbers, "F32")])
    with pytest.raises(ModelLoadError, match=complaint), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass


def test_a_tensor_that_is_not_known(pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", lambda one, numbers: [(one.replace("ln2", "ls2"), numbers, "F32")])
    with pytest.raises(ModelLoadError, match=r"does not have: v\.blk\.0\.ls2\.bias"):
        describe(pair.text, str(path))


def test_the_parts_of_two_models_are_refused_by_both_names(pair: Pair, tmp_path: Path) -> None:
    other = write_pair("qwen3.5-multimodal", tmp_path)
    for text, vision in ((other.text, pair.vision), (pair.text, other.vision)):
        with pytest.raises(ModelLoadError, match=r"v\.deepstack\.\* for \d layers, and .* takes \d") as error:
            describe(text, str(vision))
        assert text.name in str(error.value) and vision.name in str(error.value)


def test_a_vocabulary_without_the_token_for_images(pair: Pair) -> None:
    tokens = [f"t{token_id}" for token_id in range(VOCAB_SIZE)]
    path = rewrite(pair.text, pair.text.with_name("text.gguf"), unchanged, {"tokenizer.ggml.tokens": tokens})
    with pytest.raises(ModelLoadError, match=r"text\.gguf has no token <\|image_pad\|>"):
        describe(path, str(pair.vision))


@pytest.mark.parametrize("name", ["qwen3.5-multimodal", "qwen3.5-moe-multimodal"])
def test_a_text_part_that_pagewick_wrote_takes_the_vision_part(name: str, tmp_path: Path) -> None:
    write_tiny_vlm(tmp_path / "checkpoint", name)
    text = write(tmp_path / "checkpoint", tmp_path / "text.gguf", "q8_0")
    config = read_config(describe(text, str(write_pair(name, tmp_path).vision)).config)
    expected = read_config(describe(tmp_path / "checkpoint").config)
    assert config.vision is not None and config.vision.image_token_id == PAD_ID
    assert [layer.rope for layer in config.layers] == [layer.rope for layer in expected.layers]
