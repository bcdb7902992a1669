"""A pair of GGUF files that llama.cpp's converter wrote for Gemma 3: it sees what the checkpoint sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pagewick import LLM
from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.gemma3_settings import Gemma3Settings
from pagewick.models.registry import read_config
from pagewick.weights.description import describe
from pagewick.weights.gguf.vocabulary import TokenType
from pagewick.weights.opening import open_source
from tests.engine.serving import Answers, request, running, serve
from tests.images.test_gemma3_model import MESSAGES, PARAMS, PICTURES, write_tiny_gemma
from tests.images.test_gemma3_settings import IMAGE_ID
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, save
from tests.weights.gguf.mixes import Change, rewrite
from tests.weights.gguf.test_images import OPTIONS, exact, unchanged
from tests.weights.gguf.vision_models import IMAGE, VOCAB_SIZE, Pair, original, stored_and_plain, write_pair
from tests.weights.gguf.written import write

NAME = "gemma-3-multimodal"
# An image has 48 x 48 pixels and 16 tokens.
SIDE, NUM_TOKENS = 48, 16


def image_at(start: int, seed: int) -> ImageInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    return ImageInput(start, NUM_TOKENS, SIDE, SIDE, pixels.tobytes())


def requests() -> list[EngineRequest]:
    """One with two images, one with one of them, one with another one, one of text."""
    random = Random(1)
    texts = [[random.randrange(2, IMAGE) for _ in range(count)] for count in (5, 3, 9, 30)]
    tokens = [IMAGE] * NUM_TOKENS
    two = [*texts[0], *tokens, *texts[1], *tokens, *texts[2]]
    one = [*texts[0], *tokens, *texts[2]]
    second = 5 + NUM_TOKENS + 3
    given = [(two, [image_at(5, 1), image_at(second, 2)]), (one, [image_at(5, 1)]), (one, [image_at(5, 3)])]
    values: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    whole = [*given, (texts[3], [])]
    return [request(ids, f"r{number}", images=images, **values) for number, (ids, images) in enumerate(whole)]


def answers(path: Path, mmproj: Path | None = None, **options: Any) -> Answers:
    with running(path, **{**OPTIONS, **options}, mmproj=None if mmproj is None else str(mmproj)) as engine:
        assert engine.info.image_token_id == IMAGE and engine.info.image_side == 12
        return serve(engine, requests())


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(NAME, tmp_path)


def with_vision(pair: Pair, name: str, change: Change = unchanged, values: Mapping[str, Any] | None = None) -> Path:
    """Copy the vision part with other tensors and keys, as mixes.rewrite has it; the projection becomes float32."""

    def in_float32(tensor: str, numbers: Any) -> Any:
        return change(tensor, numbers.astype(np.float32))

    return rewrite(pair.vision, pair.vision.with_name(name), in_float32, values)


@exact
def test_bits_are_those_of_the_checkpoint(pair: Pair, tmp_path: Path) -> None:
    save(original(NAME), tmp_path / "checkpoint")
    found, expected = answers(*pair), answers(tmp_path / "checkpoint")
    assert found == expected
    assert found["r1", 0].logprobs != found["r2", 0].logprobs, "the picture matters"


def test_tensors_are_those_of_the_checkpoint(pair: Pair, tmp_path: Path) -> None:
    save(original(NAME), tmp_path / "checkpoint")
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        places = ("vision_tower.", "multi_modal_projector.")
        stored = sorted(one for one in checkpoint.names() if one.startswith(places))
        assert len(stored) == 3 * 16 + 7
        assert sorted(one for one in source.names() if one.startswith(places)) == stored
        for name in stored:
            assert torch.equal(source.get(name).float(), checkpoint.get(name)), name


def test_settings_are_those_of_the_file(pair: Pair) -> None:
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision)))
    assert isinstance(settings, Gemma3Settings)
    assert (settings.patch_size, settings.merge_size, settings.max_pixels) == (4, 3, SIDE**2)
    assert (settings.max_tokens, settings.resample, settings.rescale_factor) == (NUM_TOKENS, 2, 1 / 255)
    assert settings.mean == pytest.approx(IMAGE_MEAN) and settings.std == pytest.approx(IMAGE_STD)
    assert image_settings(EngineConfig(str(pair.text))) is None
    with pytest.raises(ConfigError, match="at least 2304, because the model reads every image as 48 x 48 pixels"):
        image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision), max_image_pixels=SIDE**2 - 1))


def test_squares_of_patches_are_four_wide_unless_the_file_says_otherwise(pair: Pair) -> None:
    """Published files have no key for it; 12 / 4 rows of 3 tokens."""
    path = with_vision(pair, "usual.gguf", values={"clip.vision.projector.scale_factor": None})
    vision = read_config(describe(pair.text, str(path)).config).vision
    assert vision is not None and vision.merge_size == 4
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(path)))
    assert settings is not None and settings.max_tokens == 9


@exact
def test_the_projections_of_mlps_may_have_each_others_names(pair: Pair) -> None:
    """In the first files of Gemma 3, before the converter wrote both parts."""
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def swapped(name: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        yield ".".join(names.get(part, part) for part in name.split(".")), numbers, "F32"

    path = with_vision(pair, "swapped.gguf", swapped)
    assert answers(pair.text, path) == answers(*pair)


@exact
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types_of_weights(kind: str, pair: Pair) -> None:
    """Weights in blocks are the numbers that they stand for."""
    changes = zip(("stored.gguf", "plain.gguf"), stored_and_plain(kind, (2,)), strict=True)
    stored, plain = (with_vision(pair, name, change) for name, change in changes)
    assert stored.stat().st_size < plain.stat().st_size
    assert answers(pair.text, stored) == answers(pair.text, plain)


def test_two_ranks_see_the_same(pair: Pair) -> None:
    found, expected = answers(*pair, tensor_parallel_size=2), answers(*pair)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in expected.items()}


@exact
def test_a_vocabulary_that_ends_before_the_token_of_images(pair: Pair) -> None:
    """The first files end there. A control token that no text has takes its place."""
    tokens = [f"t{token_id}" for token_id in range(VOCAB_SIZE)]
    tokens[IMAGE], tokens[7], tokens[IMAGE + 2] = "<unused12>", "<unused1>", "<unused13>"
    types = [int(TokenType.NORMAL)] * VOCAB_SIZE
    types[IMAGE] = types[7] = int(TokenType.CONTROL)
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    text = rewrite(pair.text, pair.text.with_name("text.gguf"), unchanged, values)
    assert answers(text, pair.vision) == answers(*pair)
    types[IMAGE] = types[7] = int(TokenType.NORMAL)
    text = rewrite(pair.text, pair.text.with_name("none.gguf"), unchanged, values)
    with pytest.raises(ModelLoadError, match=r"none\.gguf has no token <image_soft_token>"):
        describe(text, str(pair.vision))


def test_prompts_are_those_of_the_checkpoint(pair: Pair, tmp_path: Path) -> None:
    """With a text part that Pagewick wrote, whose vocabulary has the tokens around an image."""
    write_tiny_gemma(tmp_path / "checkpoint", sliding_window_pattern=6, query_pre_attn_scalar=16)
    text = write(tmp_path / "checkpoint", tmp_path / "text.gguf", "q8_0")
    prompt = {"prompt": "a\n<start_of_image>", "multi_modal_data": {"image": PICTURES[1]}}
    found = []
    for model, mmproj in ((tmp_path / "checkpoint", None), (text, str(pair.vision))):
        with LLM(str(model), mmproj=mmproj, dtype="float32", max_model_len=200) as llm:
            answers = [*llm.chat(MESSAGES, PARAMS), *llm.generate([prompt], PARAMS)]
        found.append([answer.prompt_token_ids for answer in answers])
    assert found[0] == found[1]
    assert [(ids or []).count(IMAGE_ID) for ids in found[0]] == [3 * NUM_TOKENS, NUM_TOKENS]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"clip.projector_type": "qwen3vl_merger"}, "of the kind qwen3vl_merger belong to .*, and this is gemma3"),
        ({"clip.vision.block_count": 10**6}, "clip.vision.block_count is 1000000, more than the tensors"),
        ({"clip.vision.image_size": None}, "clip.vision.image_size is missing"),
        ({"clip.vision.image_size": 50}, r"clip\.vision\.image_size is 50, and must be a multiple of patch_size"),
        ({"clip.vision.projector.scale_factor": 5}, "scale_factor is 5, which does not divide 12 patches"),
        ({"clip.use_gelu": False}, "clip.use_gelu is not what gemma3 has"),
        ({"clip.vision.attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 9.9.*, and only 1e-06"),
        ({"clip.vision.attention.head_count": 7}, r"clip\.vision\.attention\.head_count is 7"),
        ({"clip.vision.image_mean": None}, "clip.vision.image_mean is missing"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], complaint: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", values=values)
    with pytest.raises(ModelLoadError, match=complaint) as error, running(pair.text, **OPTIONS, mmproj=str(path)):
        pass
    assert "bad.gguf" in str(error.value)


def narrow(name: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
    yield name, np.ascontiguousarray(numbers[:, :32]) if name == "mm.input_projection.weight" else numbers, "F32"


def test_the_part_of_another_model_is_refused_by_both_names(pair: Pair) -> None:
    path = with_vision(pair, "narrow.gguf", narrow)
    with pytest.raises(ModelLoadError, match=r"the width of mm\.input_projection\.weight is 32, .* 48") as error:
        describe(pair.text, str(path))
    assert pair.text.name in str(error.value) and "narrow.gguf" in str(error.value)


@pytest.mark.parametrize("name", ["mm.input_projection.weight", "v.position_embd.weight", "v.blk.1.attn_k.bias"])
def test_a_tensor_that_is_missing(name: str, pair: Pair) -> None:
    path = with_vision(pair, "bad.gguf", lambda one, numbers: [] if one == name else [(one, numbers, "F32")])
    with pytest.raises(ModelLoadError, match=r"lacks|holds no"), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass


@pytest.mark.parametrize("name", ["v.patch_embd.weight.1", "v.blk.0.ls1.weight"])
def test_a_tensor_that_is_not_known(name: str, pair: Pair) -> None:
    def with_another(one: str, numbers: Any) -> Iterator[tuple[str, Any, str]]:
        yield one, numbers, "F32"
        if one == "v.patch_embd.weight":
            yield name, numbers, "F32"

    path = with_vision(pair, "bad.gguf", with_another)
    with pytest.raises(ModelLoadError, match=f"Gemma3ForConditionalGeneration does not have: {name}"):
        describe(pair.text, str(path))
