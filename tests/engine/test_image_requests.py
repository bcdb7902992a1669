"""Engines of models that read images: the tokens of transformers, and the same ones however a request is served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pagewick.engine.images import with_image_keys
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import UnsupportedError
from pagewick.kernels import cpu
from tests.engine.serving import Answers, assert_same, record_plans, request, running, serve
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, VARIANTS, make_model, save, write_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 160, "dtype": "float32", "num_kv_blocks": 120}
# In the variants of tests/models: patches of 4 pixels, of which 2 x 2 become a token.
IMAGE, SIDE = 190, 8


NAMES = (
    "qwen3-vl", "qwen2.5-vl-window", "qwen2-vl", "qwen3.5-multimodal", "qwen3-vl-moe", "qwen3.5-moe-multimodal",
    "glm-4.1v", "glm-4.5v", "glm-ocr", "lfm3-vl", "exaone-4.5", "paddleocr-vl",
)  # fmt: skip
exact = pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")


class Picture(NamedTuple):
    pixels: np.ndarray[Any, Any]

    @property
    def num_tokens(self) -> int:
        height, width, _ = self.pixels.shape
        return height * width // SIDE**2

    def at(self, start: int) -> ImageInput:
        height, width, _ = self.pixels.shape
        return ImageInput(start, self.num_tokens, height, width, self.pixels.tobytes())


def picture(seed: int, rows: int, columns: int) -> Picture:
    random = np.random.default_rng(seed)
    return Picture(random.integers(0, 256, (rows * SIDE, columns * SIDE, 3), np.uint8))


class Prompt(NamedTuple):
    token_ids: list[int]
    images: list[ImageInput]

    def request(self, request_id: str, **values: Any) -> EngineRequest:
        # No placeholder is generated, for which transformers would want an image.
        values = {"logit_bias": {IMAGE: -100}, "max_tokens": 12, "ignore_eos": True, "temperature": 0.0, **values}
        values = {"logprobs": 1, **values}
        return request(self.token_ids, request_id, images=self.images, **values)


def prompt(seed: int, *parts: int | Picture) -> Prompt:
    """A prompt of pictures and of random texts of these numbers of tokens."""
    random = Random(seed)
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, Picture):
            images.append(part.at(len(token_ids)))
            token_ids += [IMAGE] * part.num_tokens
        else:
            token_ids += [random.randrange(2, 180) for _ in range(part)]
    return Prompt(token_ids, images)


WIDE, TALL, SMALL = picture(1, 2, 7), picture(2, 6, 3), picture(3, 1, 1)
PROMPTS = [
    prompt(1, 5, WIDE, 9),
    # transformers takes images without a token between them for one.
    prompt(2, SMALL, 3, TALL, 1, WIDE, 2),
    prompt(3, 30),
    prompt(4, 4, TALL),
    prompt(1, 5, picture(9, 2, 7), 9),
]


def write(directory: Path, name: str) -> nn.Module:
    """Write a checkpoint, with small windows if its encoder has some."""
    if "window" not in name:
        return write_checkpoint(name, directory)
    entries = VARIANTS[name].all_entries()
    model = make_model(name, {**entries, "vision_config": {**entries["vision_config"], "window_size": 16}})
    save(model, directory)
    return model


def by_transformers(model: nn.Module, one: Prompt, answer: Sequence[int]) -> torch.Tensor:
    """Logits of the tokens of the answer."""
    token_ids = torch.tensor([[*one.token_ids, *answer]])
    given: dict[str, Any] = {}
    if one.images:
        is_paddle = model.config.model_type == "paddleocr_vl"
        processor = (PaddleOCRVLImageProcessorPil if is_paddle else Qwen2VLImageProcessorPil)(
            patch_size=SIDE // 2, merge_size=2, do_resize=False, image_mean=IMAGE_MEAN, image_std=IMAGE_STD
        )
        arrays = [np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3) for image in one.images]
        given = dict(processor(arrays, return_tensors="pt"))
        is_image = token_ids == IMAGE
        is_image[:, len(one.token_ids) :] = False
        if model.config.model_type not in ("lfm3_vl", "exaone4_5"):
            given["mm_token_type_ids"] = is_image.long()
    with torch.inference_mode():
        logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **given).logits[0]
    return logits[len(one.token_ids) - 1 : -1].clone()


def requests() -> list[EngineRequest]:
    return [one.request(f"r{number}") for number, one in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name)
    with running(tmp_path, **OPTIONS, max_num_batched_tokens=64) as engine:
        assert engine.info.image_token_id == IMAGE and engine.info.image_side == SIDE
        found = serve(engine, requests())
    for number, one in enumerate(PROMPTS):
        answer = found[f"r{number}", 0]
        logits = by_transformers(model, one, answer.token_ids)
        expected = torch.log_softmax(logits, -1)
        logits[:, IMAGE] = -torch.inf
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, chosen, atol=2e-3, rtol=0)
    # The picture matters, not only its size.
    assert found["r0", 0].logprobs != found["r4", 0].logprobs


@pytest.fixture(scope="module", params=["qwen3-vl", "qwen3.5-multimodal"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write(directory, request.param)
    return directory


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    """The answer to each request by an engine of its own."""
    found: Answers = {}
    for one in requests():
        with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as engine:
            found |= serve(engine, [one])
    return found


@exact
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64, "max_steps_in_flight": 2},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
        {"num_threads": 2},
    ],
)
def test_however_they_are_served(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    with running(checkpoint, **{**OPTIONS, **options}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests(), arrivals=[0, 1, 1, 3, 6]), alone)
    assert any(start.images for plan in plans for start in plan.starts)


@exact
def test_a_preempted_request_brings_its_images_again(checkpoint: Path, alone: Answers) -> None:
    wanted = requests()[:2]
    # Blocks for 80 tokens or fewer, and the two have 91.
    with running(checkpoint, **{**OPTIONS, "num_kv_blocks": 10, "max_model_len": 56}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, wanted), {key: alone[key] for key in alone if key[0] in ("r0", "r1")})
        assert engine.stats().num_preemptions > 0
    assert sum(bool(start.images) for plan in plans for start in plan.starts) > len(wanted)


@exact
def test_a_prefix_with_an_image_is_found_again_and_only_for_this_image(checkpoint: Path) -> None:
    one, other = (prompt(1, 5, image, 50) for image in (WIDE, picture(9, 2, 7)))
    with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as engine:
        expected = serve(engine, [one.request("one"), other.request("other")])
    with running(checkpoint, **OPTIONS) as engine:
        first = serve(engine, [one.request("one")])
        plans = record_plans(engine)
        again = serve(engine, [one.request("one")])
        num_hits = engine.stats().prefix_cache_hits
        found = serve(engine, [other.request("other")])
        assert engine.stats().prefix_cache_hits == num_hits, "another picture of this size shares nothing"
    assert num_hits == 64, "whole blocks of 69 tokens"
    (image,) = plans[0].starts[0].images
    assert image.pixels == b"", "the encoder is not needed"
    for served in (first, again, found):
        assert_same(served, {key: expected[key] for key in served})


@exact
def test_several_choices_of_one_prompt(checkpoint: Path) -> None:
    wanted = PROMPTS[0].request("a", n=3, temperature=0.9, max_tokens=8)
    answers = []
    for options in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "enable_prefix_caching": False}):
        with running(checkpoint, **{**OPTIONS, **options}) as engine:
            answers.append(serve(engine, [wanted]))
    assert len(answers[0]) == 3
    assert answers[0] == answers[1] == answers[2]


@exact
def test_draft_tokens_behind_an_image(tmp_path: Path) -> None:
    write(tmp_path, "qwen3-vl")
    wanted = [one.request(f"r{number}", max_tokens=40) for number, one in enumerate(PROMPTS[:2])]
    with running(tmp_path, **OPTIONS) as engine:
        expected = serve(engine, wanted)
    with running(tmp_path, **OPTIONS, speculative_method="ngram") as engine:
        assert_same(serve(engine, wanted), expected)
        assert engine.stats().num_draft_tokens > 0


def test_two_ranks_see_the_same(tmp_path: Path) -> None:
    write(tmp_path, "qwen3-vl")
    with running(tmp_path, **OPTIONS) as engine:
        expected = serve(engine, requests())
    with running(tmp_path, **OPTIONS, tensor_parallel_size=2) as engine:
        found = serve(engine, requests())
    for key, answer in expected.items():
        assert found[key].token_ids == answer.token_ids


def test_the_language_model_alone_refuses_images_and_keeps_its_text(tmp_path: Path) -> None:
    write(tmp_path, "qwen3-vl")
    text = PROMPTS[2].request("text")
    with running(tmp_path, **OPTIONS) as engine:
        expected, whole = serve(engine, [text]), engine.info.num_parameters
    with running(tmp_path, **OPTIONS, language_model_only=True) as engine:
        assert engine.info.image_token_id is None
        assert engine.info.num_parameters < whole
        with pytest.raises(UnsupportedError, match="reads no images"):
            engine.add(PROMPTS[0].request("image"))
        assert_same(serve(engine, [text]), expected)


def test_without_its_description_images_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "qwen3-vl")
    (tmp_path / "preprocessor_config.json").unlink()
    with running(tmp_path, **OPTIONS) as engine:
        assert engine.info.image_token_id is None
        serve(engine, [PROMPTS[2].request("text")])
    assert "preprocessor_config.json" in caplog.text


def test_extra_keys_of_the_prompts_differ() -> None:
    """Else the tests above would say nothing about prefixes."""
    one, other = (with_image_keys(PROMPTS[number].request("a")).extra_keys for number in (0, 4))
    assert one != other
