"""Engines of models that part the rows of an image by another token: the tokens of transformers, however they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import UnsupportedError
from tests.engine.serving import Answers, assert_same, record_plans, running, serve
from tests.engine.test_image_requests import Prompt, exact
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, write_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 8, "max_model_len": 160, "dtype": "float32", "num_kv_blocks": 120}
# Patches of 4 pixels; squares of 2 x 2 of them and of 3 x 3, and single ones, become a token.
SIDES = {"mistral-small-3.1": 8, "ministral-3-multimodal": 12, "mistral-large-4": 8, "pixtral-12b": 4}
IMAGE, ROW_END, IMAGE_END = 190, 191, 192


def prompt(seed: int, side: int, *parts: int | tuple[int, int, int]) -> Prompt:
    """A prompt of random texts of these numbers of tokens, and of images: (seed, rows, columns)."""
    random = np.random.default_rng(seed)
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            token_ids += random.integers(2, 180, part).tolist()
            continue
        number, rows, columns = part
        shape = rows * side, columns * side, 3
        pixels = np.random.default_rng(number).integers(0, 256, shape, np.uint8).tobytes()
        tokens = [*[IMAGE] * columns, ROW_END] * rows
        images.append(ImageInput(len(token_ids), len(tokens), shape[0], shape[1], pixels, columns))
        token_ids += [*tokens[:-1], IMAGE_END]
    return Prompt(token_ids, images)


def prompts(side: int) -> list[Prompt]:
    return [
        prompt(1, side, 5, (1, 2, 7), 9),
        prompt(2, side, (3, 1, 1), (2, 6, 3), 1, (1, 2, 7), 2),
        prompt(3, side, 30),
        # The image ends the prompt.
        prompt(4, side, 4, (2, 6, 3)),
        prompt(1, side, 5, (9, 2, 7), 9),
    ]


def requests(side: int) -> list[EngineRequest]:
    return [one.request(f"r{number}") for number, one in enumerate(prompts(side))]


def by_transformers(model: nn.Module, side: int, one: Prompt, answer: Sequence[int]) -> torch.Tensor:
    """Logits of the tokens of the answer."""
    token_ids = torch.tensor([[*one.token_ids, *answer]])
    given: dict[str, Any] = {}
    if one.images:
        patch_size = {"height": side, "width": side}
        processor = PixtralImageProcessorPil(
            patch_size=patch_size, size={"longest_edge": 999}, image_mean=IMAGE_MEAN, image_std=IMAGE_STD
        )
        arrays = [np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3) for image in one.images]
        given = dict(processor(arrays, input_data_format="channels_last", return_tensors="pt"))
        assert given["image_sizes"].tolist() == [[image.height, image.width] for image in one.images]
    with torch.inference_mode():
        logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **given).logits[0]
    return logits[len(one.token_ids) - 1 : -1]


@pytest.mark.parametrize("name", SIDES)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, side = write_checkpoint(name, tmp_path), SIDES[name]
    with running(tmp_path, **OPTIONS, max_num_batched_tokens=64) as engine:
        assert (engine.info.image_token_id, engine.info.image_side) == (IMAGE, side)
        assert engine.info.has_row_breaks
        found = serve(engine, requests(side))
    for number, one in enumerate(prompts(side)):
        answer = found[f"r{number}", 0]
        logits = by_transformers(model, side, one, answer.token_ids)
        expected = torch.log_softmax(logits, -1)
        assert logits.argmax(-1).tolist() == answer.token_ids, number
        logprobs = torch.tensor([step.logprob for step in answer.logprobs])
        chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, chosen, atol=2e-3, rtol=0)
    # The picture matters, not only its size.
    assert found["r0", 0].logprobs != found["r4", 0].logprobs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistral")
    write_checkpoint("mistral-small-3.1", directory)
    return directory


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    """The answer to each request by an engine of its own."""
    found: Answers = {}
    for one in requests(8):
        with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as engine:
            found |= serve(engine, [one])
    return found


@exact
@pytest.mark.parametrize(
    "options",
    [
        # One token of a step may be the break between two rows, or the last token of an image.
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 2},
        {"max_num_batched_tokens": 64, "max_steps_in_flight": 2},
        {"max_num_seqs": 2, "num_kv_blocks": 24},
    ],
)
def test_however_they_are_served(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    with running(checkpoint, **{**OPTIONS, **options}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests(8), arrivals=[0, 1, 1, 3, 6]), alone)
    assert any(start.images for plan in plans for start in plan.starts)


@exact
@pytest.mark.parametrize("num_before", range(8))
def test_a_prefix_may_end_anywhere_in_an_image(checkpoint: Path, num_before: int) -> None:
    """The image has 2 * 6 tokens: the blocks of 8 end before, between and behind its rows and the breaks."""
    one, other = (prompt(1, 8, num_before, (seed, 2, 5), 13) for seed in (1, 9))
    with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as engine:
        expected = serve(engine, [one.request("one"), other.request("other")])
    assert expected["one", 0].logprobs != expected["other", 0].logprobs
    with running(checkpoint, **OPTIONS) as engine:
        num_hits = 0
        for name, request in (("one", one), ("one", one), ("other", other), ("one", one)):
            assert_same(serve(engine, [request.request(name)]), {(name, 0): expected[name, 0]})
            if name == "other":
                assert engine.stats().prefix_cache_hits == num_hits, "another picture of this size shares nothing"
            num_hits = engine.stats().prefix_cache_hits
        # Prompts that share the beginning of one of them, cut within the image or behind it.
        for length in range(num_before + 12, len(one.token_ids), 3):
            shorter = Prompt(one.token_ids[:length], one.images)
            found = serve(engine, [shorter.request("shorter")])
            assert engine.stats().prefix_cache_hits > num_hits
            num_hits = engine.stats().prefix_cache_hits
            with running(checkpoint, **OPTIONS, enable_prefix_caching=False) as fresh:
                assert_same(found, serve(fresh, [shorter.request("shorter")]))


def test_two_ranks_see_the_same(checkpoint: Path) -> None:
    with running(checkpoint, **OPTIONS) as engine:
        expected = serve(engine, requests(8))
    with running(checkpoint, **OPTIONS, tensor_parallel_size=2) as engine:
        found = serve(engine, requests(8))
    assert len(expected) == 5
    for key, answer in expected.items():
        assert found[key].token_ids == answer.token_ids


def test_the_language_model_alone_refuses_images_and_keeps_its_text(checkpoint: Path) -> None:
    image, _, text, *_ = requests(8)
    with running(checkpoint, **OPTIONS) as engine:
        expected, whole = serve(engine, [text]), engine.info.num_parameters
    with running(checkpoint, **OPTIONS, language_model_only=True) as engine:
        assert engine.info.image_token_id is None and not engine.info.has_row_breaks
        assert engine.info.num_parameters < whole
        with pytest.raises(UnsupportedError, match="reads no images"):
            engine.add(image)
        assert_same(serve(engine, [text]), expected)
