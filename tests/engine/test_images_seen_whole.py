"""Engines of models whose tokens of an image see each other: the tokens of transformers, however they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ConfigError
from tests.engine.serving import Answers, assert_same, record_plans, running, serve
from tests.engine.test_image_requests import Prompt, exact
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, write_checkpoint

NAME = "gemma-3-multimodal"
# A token stands for 12 x 12 pixels. Layers with a window see 18 tokens.
IMAGE, SIDE, NUM_TOKENS = 192, 48, 16
OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 160, "dtype": "float32", "num_kv_blocks": 120}


def image_at(start: int, seed: int) -> ImageInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    return ImageInput(start, NUM_TOKENS, SIDE, SIDE, pixels.tobytes())


def prompt(seed: int, *parts: int | str) -> Prompt:
    """A prompt of random texts of these numbers of tokens, and of images of which the letters are seeds."""
    random = Random(seed)
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, str):
            images.append(image_at(len(token_ids), ord(part)))
            token_ids += [IMAGE] * NUM_TOKENS
        else:
            token_ids += [random.randrange(2, 180) for _ in range(part)]
    return Prompt(token_ids, images)


PROMPTS = [
    prompt(1, 5, "a", 9),
    # transformers takes images without a token between them for one.
    prompt(2, "b", 3, "c", 1, "a", 2),
    prompt(3, 30),
    prompt(4, 4, "d"),
    prompt(1, 5, "e", 9),
]


def requests() -> list[EngineRequest]:
    return [one.request(f"r{number}") for number, one in enumerate(PROMPTS)]


def by_transformers(model: nn.Module, one: Prompt, answer: Sequence[int], *, sees_whole: bool = True) -> torch.Tensor:
    """Logits of the tokens of the answer."""
    token_ids = torch.tensor([[*one.token_ids, *answer]])
    given: dict[str, Any] = {}
    if one.images:
        arrays = [np.frombuffer(image.pixels, np.uint8).reshape(SIDE, SIDE, 3) for image in one.images]
        normed = (np.stack(arrays) / 255 - IMAGE_MEAN) / IMAGE_STD
        given["pixel_values"] = torch.from_numpy(normed).permute(0, 3, 1, 2).float()
        if sees_whole:
            is_image = token_ids == IMAGE
            is_image[:, len(one.token_ids) :] = False
            given["token_type_ids"] = is_image.long()
    with torch.inference_mode():
        logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **given).logits[0]
    return logits[len(one.token_ids) - 1 : -1]


def test_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path) -> None:
    model = write_checkpoint(NAME, tmp_path)
    with running(tmp_path, **OPTIONS, max_num_batched_tokens=64) as engine:
        info = engine.info
        assert (info.image_token_id, info.image_side, info.max_image_tokens) == (IMAGE, 12, NUM_TOKENS)
        found = serve(engine, requests())
    for number, one in enumerate(PROMPTS):
        answer = found[f"r{number}", 0]
        logits = by_transformers(model, one, answer.token_ids)
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        expected = torch.log_softmax(logits, -1)
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, chosen, atol=2e-3, rtol=0)
        if one.images:
            causal = by_transformers(model, one, answer.token_ids, sees_whole=False)
            assert float((causal - logits).abs().max()) > 0.05, "causal attention gives something else"
    # The picture matters.
    assert found["r0", 0].logprobs != found["r4", 0].logprobs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma-3")
    write_checkpoint(NAME, directory)
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
        {"max_num_batched_tokens": 17, "max_num_prefill_tokens": 1, "max_steps_in_flight": 2},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
        {"num_threads": 2},
    ],
)
def test_however_they_are_served(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    with running(checkpoint, **{**OPTIONS, **options}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests(), arrivals=[0, 1, 1, 3, 6]), alone)
    starts = {start.slot for plan in plans for start in plan.starts if start.images}
    assert starts, "images were computed"


@exact
def test_a_preempted_request_computes_its_images_again(checkpoint: Path, alone: Answers) -> None:
    wanted = requests()[:2]
    with running(checkpoint, **{**OPTIONS, "num_kv_blocks": 12, "max_model_len": 72}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, wanted), {key: alone[key] for key in alone if key[0] in ("r0", "r1")})
        assert engine.stats().num_preemptions > 0
    assert sum(bool(start.images) for plan in plans for start in plan.starts) > len(wanted)


@exact
@pytest.mark.parametrize("num_more", [1, 6, 12])
def test_a_prefix_that_ends_within_an_image(checkpoint: Path, num_more: int) -> None:
    """Blocks of 8 tokens: the cache has the image's first tokens, which were computed with all of it."""
    first, then = prompt(1, 5, "a"), prompt(1, 5, "a", num_more)
    with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as engine:
        expected = serve(engine, [first.request("one"), then.request("two")])
    with running(checkpoint, **OPTIONS) as engine:
        found = serve(engine, [first.request("one", max_tokens=1)])
        plans = record_plans(engine)
        found |= serve(engine, [then.request("two")])
        assert engine.stats().prefix_cache_hits == 16
    works = [work for plan in plans for work in plan.work]
    assert (works[0].start, works[0].num_tokens) == (16, 5 + num_more)
    assert found["two", 0] == expected["two", 0]
    assert found["one", 0].token_ids == expected["one", 0].token_ids[:1]


@exact
def test_several_choices_and_draft_tokens(checkpoint: Path) -> None:
    wanted = PROMPTS[1].request("a", n=3, temperature=0.9, max_tokens=8)
    answers = []
    for options in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "enable_prefix_caching": False}):
        with running(checkpoint, **{**OPTIONS, **options}) as engine:
            answers.append(serve(engine, [wanted]))
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 3
    wanted = PROMPTS[0].request("b", max_tokens=40)
    with running(checkpoint, **OPTIONS) as engine:
        expected = serve(engine, [wanted])
    with running(checkpoint, **OPTIONS, speculative_method="ngram") as engine:
        assert_same(serve(engine, [wanted]), expected)
        assert engine.stats().num_draft_tokens > 0


def test_two_ranks_see_the_same(checkpoint: Path) -> None:
    with running(checkpoint, **OPTIONS) as engine:
        expected = serve(engine, requests())
    with running(checkpoint, **OPTIONS, tensor_parallel_size=2) as engine:
        found = serve(engine, requests())
    for key, answer in expected.items():
        assert found[key].token_ids == answer.token_ids


def test_a_step_must_have_room_for_an_image(checkpoint: Path) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": 15}
    said = "the largest image has 16\n  give at least 16, or --language-model-only"
    with pytest.raises(ConfigError, match=said), running(checkpoint, **options):
        pass
    with running(checkpoint, **options, language_model_only=True) as engine:
        assert (engine.info.image_token_id, engine.info.max_image_tokens) == (None, 0)
        serve(engine, requests()[2:3])
